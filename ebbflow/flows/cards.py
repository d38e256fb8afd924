"""Show a job's HTML page as a Metaflow card: the report in the step `report`, the live page in the
step `start`.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from metaflow.cards import MetaflowCard, MetaflowCardComponent
from metaflow.plugins import CARDS
from metaflow.plugins.cards.card_datastore import CardDatastore

if TYPE_CHECKING:
    from ebbflow.cost.report.report import RunReport

_CARD_TYPE = "ebbflow"  # no hyphen: Metaflow splits file names there
# Parts of the name of one file, which each page replaces
_LIVE_ID = "live"
_LIVE_HASH = "0" * 20


class PageCard(MetaflowCard):
    """Metaflow card that shows a complete HTML page instead of Metaflow's components."""

    type = _CARD_TYPE
    ALLOW_USER_COMPONENTS = True

    def __init__(
        self,
        options: object = None,  # noqa: ARG002 - Metaflow passes it by name
        components: Sequence[object] = (),
        graph: object = None,  # noqa: ARG002 - Metaflow passes it by name
        flow: object = None,  # noqa: ARG002 - Metaflow passes it by name
    ) -> None:
        self._parts = components

    def render(self, task: object) -> str:  # noqa: ARG002 - Metaflow's interface
        return "".join(str(part) for part in self._parts)


def register_card() -> None:
    """Register `PageCard` with Metaflow in this process.

    Call this before Metaflow reads the flow's decorators.

    Metaflow 2.19 ignores METAFLOW_CARD_LOCALROOT and then stores local cards where its own
    `get_cards` does not look.
    """
    if PageCard not in CARDS:
        CARDS.append(PageCard)
        find = CardDatastore.get_storage_root
        CardDatastore.get_storage_root = lambda kind: (
            find(kind) or os.environ.get("METAFLOW_CARD_LOCALROOT")
        )


def show_report(card: Any, run: RunReport) -> None:
    """Show a report's HTML page, which compares the job with earlier jobs, as a Metaflow card."""
    from ebbflow.cost.report.render_html import render
    from ebbflow.observe.watch import read_earlier_reports

    card.append(_Page(render(run, earlier=read_earlier_reports(run.job))))


def save_live_card(flow: str, run: str, html: str) -> None:
    """Store the live page as the card `live` of the run's step `start`.

    Every run has this step, even one that fails. Metaflow stores no final card of a task that fails
    or is killed.
    """
    from metaflow import Run
    from metaflow.metaflow_config import DEFAULT_DATASTORE
    from metaflow.plugins import DATASTORES

    given = [word.partition("=")[2] for word in sys.argv if word.startswith("--datastore=")]
    given += [
        after for word, after in zip(sys.argv, sys.argv[1:], strict=False) if word == "--datastore"
    ]
    kind = (given or [DEFAULT_DATASTORE])[0]
    datastore = next(datastore for datastore in DATASTORES if kind == datastore.TYPE)
    backend = datastore(CardDatastore.get_storage_root(kind))
    task = Run(f"{flow}/{run}", _namespace_check=False)["start"].task
    known = SimpleNamespace(_storage_impl=backend, flow_name=flow)
    CardDatastore(known, pathspec=task.pathspec).save_card(
        _LIVE_HASH, _CARD_TYPE, html, card_id=_LIVE_ID
    )


class _Page(MetaflowCardComponent):
    def __init__(self, html: str) -> None:
        self._html = html

    def render(self) -> str:
        return self._html

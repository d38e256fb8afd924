"""The Metaflow card of a step with `@ebbflow`: the live page while it trains, then the report.

The user needs no `@card`: the page is stored as a card of the task, where Metaflow's viewers look.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from metaflow.plugins import DATASTORES
from metaflow.plugins.cards.card_datastore import CardDatastore

from ebbflow.core.layout import KnownJob, remember_job
from ebbflow.core.observer_process import LIVE_PAGE, shows_live_page, start_observer
from ebbflow.core.store.marker import expected_marker_id
from ebbflow.flows.job import RUNS, Job
from ebbflow.flows.own_flow.task_name import TaskName
from ebbflow.observe.job_report import replace_live_page

_CARD_TYPE = "ebbflow"  # no hyphen: Metaflow splits file names there
_HASH = "0" * 20  # part of the name of one file, which each page replaces
_CARD_SECONDS = 10.0
_REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class StepCard:
    """The Metaflow card of one training in a task."""

    task: TaskName
    datastore: str  # type of the flow's datastore, such as local or s3
    name: str  # id of the card in its task

    def save(self, html: str) -> None:
        """Store the page in place of the previous one. Raises any error of Metaflow's storage."""
        [storage] = [found for found in DATASTORES if self.datastore == found.TYPE]
        root = CardDatastore.get_storage_root(self.datastore)
        known = SimpleNamespace(_storage_impl=storage(root), flow_name=self.task.flow)
        cards = CardDatastore(known, pathspec=self.task.pathspec)
        cards.save_card(_HASH, _CARD_TYPE, html, card_id=self.name)

    def try_save(self, html: str) -> bool:
        """Store the page. Return False, and print why, if this failed."""
        try:
            self.save(html)
        except Exception as error:  # Metaflow's storages raise many kinds of errors
            print(f"no card: {type(error).__name__}: {error}", flush=True)
            return False
        return True


@contextlib.contextmanager
def show_live(job: Job, card: StepCard) -> Iterator[None]:
    """Context manager that keeps the job's live page and the step's card up to date."""
    page = None
    if shows_live_page():
        store = job.config.store
        page = remember_job(RUNS, KnownJob(job.name, store, expected_marker_id(store))) / LIVE_PAGE
    config = job.config.model_dump(mode="json")
    observer = start_observer(job.name, job.config.store, config, page=page)
    try:
        with copy_live_page(page, card):
            yield
    finally:
        if observer is not None:
            observer.end()


@contextlib.contextmanager
def copy_live_page(page: Path | None, card: StepCard) -> Iterator[None]:
    """Context manager that copies a live page to the step's card every few seconds.

    Nothing is done without a page.
    """
    if page is None:
        yield
        return
    ending = threading.Event()
    thread = threading.Thread(
        target=_copy_page, args=(page, card, ending), name="card of the step", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def show_report(job: Job, card: StepCard) -> None:
    """Show the job's report as the step's card. A failure to store it is printed."""
    replace_live_page(job.folder)
    card.try_save((job.folder / _REPORT).read_text())


def _copy_page(page: Path, card: StepCard, ending: threading.Event) -> None:
    while not ending.wait(_CARD_SECONDS):
        if page.is_file() and not card.try_save(page.read_text()):
            return

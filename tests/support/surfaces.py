"""All surfaces of one job that has ended, and the false words on them.

To check a job of your own: `python -m tests.support.surfaces runs/JOB terminal.txt`, with the terminal's
output in a file. It prints one line for each contradiction, and exits with 1 if there is one.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from ebbflow.core.errors import Outcome
from ebbflow.cost.__main__ import main as cost_main
from ebbflow.cost.jobs import find_job_uri, load_report
from ebbflow.cost.report.report import RunReport
from ebbflow.cost.report.verdict import render_verdict

_SPENT = re.compile(r"\$([\d,]+\.\d{2,}) (?:of \$[\d,.]+ )?spent")
_EXACT = "bit for bit"
# Words that accuse; none is true of a job that completed without a kill
_ACCUSATIONS = ("DAMAGED", "root cause", "killed or lost", "interrupted", "crash loop")


@dataclass(frozen=True, kw_only=True)
class Surfaces:
    """What a user sees of one job."""

    terminal: str  # all output of the commands that ran the job
    report: RunReport  # report.json
    fresh: RunReport  # built anew from the events
    page: str  # report.html as text without tags
    live: str  # live.html likewise
    state: str  # of `ebbflow jobs`
    spent_usd: float  # likewise, with simulated dollars


def read_surfaces(folder: Path, terminal: str) -> Surfaces:
    """Read the surfaces of the job whose folder of runs is `folder`."""
    report = load_report(str(folder / "report.json"))
    uri = find_job_uri(str(folder))
    listed = io.StringIO()
    with contextlib.redirect_stdout(listed):
        cost_main(["jobs", uri, "--json"])
    (row,) = json.loads(listed.getvalue())
    return Surfaces(
        terminal=terminal,
        report=report,
        fresh=load_report(uri, fresh=True),
        page=_text(folder / "report.html"),
        live=_text(folder / "live.html"),
        state=row["state"],
        spent_usd=float(row["spent_usd"]) + float(row["simulated_usd"]),
    )


def find_false_words(surfaces: Surfaces, *, was_killed: bool) -> list[str]:
    """Return a line for each contradiction between two surfaces, and each accusation of a sound job.

    Args:
        was_killed: whether the job was interrupted on purpose.
    """
    return [
        *_contradictions(surfaces),
        *_accusations(surfaces, was_killed=was_killed),
        *_empty_promises(surfaces),
    ]


def _contradictions(surfaces: Surfaces) -> list[str]:
    report = surfaces.report
    found = []
    verdict = render_verdict(report)
    for name, text in (("report.html", surfaces.page), ("live.html", surfaces.live)):
        if verdict not in text:
            found.append(f"{name} lacks the verdict of report.json: {verdict}")
    if f" {verdict}" not in surfaces.terminal:
        found.append(f"the terminal lacks the verdict of report.json: {verdict}")
    if surfaces.fresh.total_usd != report.total_usd:
        found.append(f"total {report.total_usd}, from the events {surfaces.fresh.total_usd}")
    if abs(surfaces.spent_usd - float(report.total_usd)) > 1e-6:
        found.append(f"total {report.total_usd}, ebbflow jobs says {surfaces.spent_usd}")
    completed = report.outcome is Outcome.COMPLETED
    if completed != (surfaces.state == "done"):
        found.append(f"outcome {report.outcome}, ebbflow jobs says {surfaces.state}")
    # The closing verdict has the total, after which no figure of the progress can be larger
    spent = [float(usd.replace(",", "")) for usd in _SPENT.findall(surfaces.terminal)]
    for before, after in zip(spent, [*spent[1:], float(report.total_usd)], strict=False):
        if after < before - 5e-5:
            found.append(f"the terminal's dollars fall from {before} to {after}")
    return found


def _accusations(surfaces: Surfaces, *, was_killed: bool) -> list[str]:
    report = surfaces.report
    if was_killed or report.outcome is not Outcome.COMPLETED:
        return []
    found = []
    for word in _ACCUSATIONS:
        for name, text in (("terminal", surfaces.terminal), ("report.html", surfaces.page)):
            if word in text:
                found.append(f"the {name} of a sound job says {word!r}")
    if report.interruptions or report.redone_steps:
        found.append(f"{report.interruptions} interruptions of a job that nothing interrupted")
    if report.events.get("finding"):
        found.append(f"a root cause of a sound job: {report.events['finding']['title']}")
    if "at risk" in surfaces.page:
        found.append("a job that has ended has work at risk")
    return found


def _empty_promises(surfaces: Surfaces) -> list[str]:
    if _EXACT in surfaces.page and not surfaces.report.actual["commits"]:
        return ["bit for bit without a commit"]
    return []


def _text(page: Path) -> str:
    without_scripts = re.sub(r"<(script|style).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", "", without_scripts))


if __name__ == "__main__":
    FALSE_WORDS = find_false_words(
        read_surfaces(Path(sys.argv[1]), Path(sys.argv[2]).read_text()),
        was_killed="--killed" in sys.argv,
    )
    print("\n".join(FALSE_WORDS))
    sys.exit(bool(FALSE_WORDS))

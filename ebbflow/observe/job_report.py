"""Writer of the files of a job's report: report.json, report.html and metrics.prom."""

import contextlib
import json
from pathlib import Path

from ebbflow.core.events import Event, read_log
from ebbflow.core.layout import write_atomically
from ebbflow.core.metrics import has_client, render_job_metrics
from ebbflow.core.observer_process import LIVE_PAGE
from ebbflow.core.rank_logs import read_logs
from ebbflow.core.store import Store
from ebbflow.cost.report.render_html import render
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.observe.watch import read_earlier_reports


def write_report_files(job: str, job_store: Store, folder: Path) -> tuple[RunReport, list[Event]]:
    """Build the report of a job that has ended, and write its files to `folder` and the store.

    The local files are written first, so that they exist even if the store is full.

    Returns:
        The report, and the events that it was built from.

    Raises:
        CostError: No report can be built from the events.
        StoreError: The store rejected a file or did not answer.
    """
    log = read_log(job_store)
    report = build_report(
        log.events, damage=log.damage, logs=lambda: read_logs([folder], [job_store]).lines
    )
    page = render(report, earlier=read_earlier_reports(job))
    files = {
        "report.json": json.dumps(report.to_json(), indent=1, allow_nan=False).encode(),
        "report.html": page.encode(errors="backslashreplace"),
    }
    if has_client():
        files["metrics.prom"] = render_job_metrics(report.to_json(), log.events)
    for name, content in files.items():
        in_store = job_store.local_path(name)
        here = folder / name
        if in_store is None or in_store.resolve() != here.resolve():
            write_atomically(here, content)
    for name, content in files.items():
        job_store.put(name, content)
    return report, log.events


def replace_live_page(folder: Path) -> None:
    """Replace the live page with the report.

    A browser that shows the live page then shows the report.
    """
    with contextlib.suppress(OSError):
        for unfinished in folder.glob(f".{LIVE_PAGE}.*"):  # of a writer that was ended
            unfinished.unlink(missing_ok=True)
        write_atomically(folder / LIVE_PAGE, (folder / "report.html").read_bytes())

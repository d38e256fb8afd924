"""One report per job, written by the `report` step, or by the launcher when a run died before it got there."""

from __future__ import annotations

import json

from cost.render_html import render as render_html
from cost.report import RunReport, build_report
from flows.job import Job
from infra.events import read_events


def write_report(job: Job) -> RunReport:
    """Fold the job's events; write report.json and report.html into the store and into runs/<job>/."""
    report = build_report(read_events(job.store))
    files = {
        "report.json": json.dumps(report.to_json(), indent=1, allow_nan=False).encode(),
        "report.html": render_html(report).encode(),
    }
    for name, content in files.items():
        job.store.put(name, content)
        if job.store.local_path(name) is None or not (job.folder / name).exists():
            (job.folder / name).write_bytes(content)
    return report

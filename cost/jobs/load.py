"""A job's report for notebooks and for comparisons: as it was written, or built anew from the job's events."""

from __future__ import annotations

import json
from pathlib import Path

from cost.errors import ReportError
from cost.jobs.find import job_uri, read_job
from cost.report.report import RunReport, build_report
from infra.errors import ObjectNotFound
from infra.store import Store

_NAME = "report.json"
_REQUEST_SECONDS = 10.0


def load_report(uri: str, *, store: str | None = None, fresh: bool = False) -> RunReport:
    """The report of a job, with `total_usd` as Decimal; `cost.report.frames` makes DataFrames of its ledger and losses.

    uri: a report.json, the folder or s3:// URI of a job, or the name of a job that this machine knows ("latest").
    fresh: fold the events anew, also where a report was written. Raises ReportError when there is neither, naming
    the places; StoreError when the store does not answer.
    """
    path = Path(uri)
    if "://" not in uri and path.suffix == ".json":
        return _parse(path.read_bytes() if path.is_file() else b"", uri)
    place = job_uri(uri, store)
    if not fresh:
        try:
            return _parse(Store.open(place, request_timeout_seconds=_REQUEST_SECONDS).get(_NAME), f"{place}/{_NAME}")
        except ObjectNotFound:
            pass  # the job died before its report, or is still going on
    return build_report(read_job(uri, store))


def _parse(content: bytes, where: str) -> RunReport:
    try:
        return RunReport.from_json(json.loads(content))
    except ReportError as error:
        raise ReportError(f"{where}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{where}: not a report: {error!r}") from error

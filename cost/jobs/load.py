"""Find a job by name or path, and load its report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbflow.cost.errors import ReportError
from ebbflow.cost.ledger.generations import final_outcome
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.infra.errors import ObjectNotFound, StoreError
from ebbflow.infra.events import Event, LogContent, read_events, read_log
from ebbflow.infra.known_jobs import known_job, runs_folder
from ebbflow.infra.launchers import running_launcher
from ebbflow.infra.layout import job_prefix
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.program import PROJECT_ROOT
from ebbflow.infra.segments import Damage
from ebbflow.infra.store import Store

_NAME = "report.json"
_REQUEST_SECONDS = 10.0


def job_uri(job: str, store: str | None = None) -> str:
    """Where the job's events are: a URI as given, a folder that holds them, or a job of the store.

    Without a store: the one in which the job lies, if it was started from this machine. Raises ReportError with the
    places that were looked at.
    """
    if "://" in job:
        return job
    if store is not None and "://" in store:
        return f"{store.rstrip('/')}/{job_prefix(job)}"
    root = runs_folder(PROJECT_ROOT) if store is None else Path(store)
    places = [Path(job), root / job_prefix(job), root / job]
    known = known_job(root / job) or known_job(Path(job))
    if store is None and known is not None:
        if "://" in known.uri:
            return known.uri
        places.append(Path(known.uri))
    for place in places:
        if (place / "events").is_dir():
            return str(place)
    listed = "\n".join(f"  {place}/events" for place in places)
    raise ReportError(f"no events of job {job!r}; looked for\n{listed}")


def read_job(job: str, store: str | None = None) -> list[Event]:
    """All events of a job, by time. Raises ReportError when there are none, StoreError when they cannot be read."""
    uri = job_uri(job, store)
    events = read_events(Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS))
    if not events:
        raise ReportError(f"no events of job {job!r} in {uri}")
    return events


def read_job_log(job: str, store: str | None = None) -> LogContent:
    """The same with what is damaged in the job's log, for a report. Raises as `read_job`."""
    uri = job_uri(job, store)
    store_of_job = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    content = read_log(store_of_job)
    if not content.events:
        damage = "".join(f"\n  damage: {one.text}" for one in content.damage[:10])
        raise ReportError(f"no events of job {job!r} in {uri}{damage}")
    return replace(content, damage=(*content.damage, *_lost_since_report(store_of_job, content.events)))


def _lost_since_report(job_store: Store, events: Sequence[Event]) -> list[Damage]:
    """Events that the job's own report counted and that are no longer there: of a process whose log is lost whole."""
    try:
        counted = json.loads(job_store.get(_NAME))["events"]["counts"]
        known = {str(name): int(count) for name, count in counted.items()}
    except (StoreError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the job has no report yet
    left = Counter(event.name for event in events)
    return [
        Damage(_NAME, f"counted {count:,} {name!r} events, of which {left[name]:,} are left")
        for name, count in known.items()
        if left[name] < count
    ]


def read_running(job: str, events: Sequence[Event], store: str | None = None) -> dict[str, Any] | None:
    """The launcher that runs the job now, by its claim in the store (`infra.launchers`); None where the job has ended.

    A launcher that has only its report left to write does not count. Raises ReportError, StoreError.
    """
    found = running_launcher(Store.open(job_uri(job, store), request_timeout_seconds=_REQUEST_SECONDS))
    if found is None:
        return None
    done = final_outcome(events)
    written = done is not None and done.data.get("outcome") == Outcome.COMPLETED
    if written and done is not None and done.t_wall >= found.launcher.since_utc:
        return None
    return found.to_json()


def known_job_names(root: Path | None = None) -> list[str]:
    """Jobs that this machine knows, the one that was last written to last; `latest` is not counted again."""
    folder = runs_folder(PROJECT_ROOT) if root is None else root
    found = [path for path in folder.glob("*") if path.name != "latest" and known_job(path) is not None]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]


def load_report(uri: str, *, store: str | None = None, fresh: bool = False) -> RunReport:
    """The report of a job, with `total_usd` as Decimal; `cost.report.frames` makes DataFrames of its ledger and losses.

    uri: a report.json, the folder or s3:// URI of a job, or the name of a job that this machine knows ("latest").
    fresh: fold the events anew, also where a report was written, as is done for a running job. Raises ReportError when
    there is neither, naming the places; StoreError when the store does not answer.
    """
    path = Path(uri)
    if "://" not in uri and path.suffix == ".json":
        return _parse(path.read_bytes() if path.is_file() else b"", uri)
    place = job_uri(uri, store)
    running = read_running(uri, (), store)
    if not fresh and running is None:
        try:
            return _parse(Store.open(place, request_timeout_seconds=_REQUEST_SECONDS).get(_NAME), f"{place}/{_NAME}")
        except ObjectNotFound:
            pass  # the job died before its report, or is still going on
    content = read_job_log(uri, store)
    if running is not None:  # its claim stands: the events say whether there is only the report left to write
        running = read_running(uri, content.events, store)
    return build_report(content.events, running=running, damage=content.damage)


def _parse(content: bytes, where: str) -> RunReport:
    try:
        return RunReport.from_json(json.loads(content))
    except ReportError as error:
        raise ReportError(f"{where}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{where}: not a report: {error!r}") from error

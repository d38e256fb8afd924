"""Where a job lies, from what a person calls it."""

from __future__ import annotations

from pathlib import Path

from cost.errors import ReportError
from infra.events import Event, read_events
from infra.known_jobs import known_job, runs_folder
from infra.layout import job_prefix
from infra.store import Store

PROJECT_ROOT = Path(__file__).resolve().parents[2]
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


def known_job_names(root: Path | None = None) -> list[str]:
    """Jobs that this machine knows, the one that was last written to last; `latest` is not counted again."""
    folder = runs_folder(PROJECT_ROOT) if root is None else root
    found = [path for path in folder.glob("*") if path.name != "latest" and known_job(path) is not None]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]

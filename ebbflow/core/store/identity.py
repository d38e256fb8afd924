"""Check of a job's store at the start: is it the store that this machine has recorded for the job?

A store keeps its markers for ever, and several are no contradiction: of two launchers that see a
new store at the same time, each may write one, and both are right from then on.
"""

import contextlib
import json
import secrets
import time
from dataclasses import replace
from pathlib import Path

from ebbflow.core.errors import JobNotInStore, StoreError
from ebbflow.core.layout import (
    MARKERS_PREFIX,
    NOTE,
    KnownJob,
    job_prefix,
    known_job,
    marker_id,
    marker_key,
    write_atomically,
)
from ebbflow.core.store.marker import expect_marker
from ebbflow.core.store.objects import Store

_REPORT = "report.json"
_OLD_REPORT = "report-before.json"
_REQUEST_SECONDS = 10.0


def adopt_store(uri: str, job: str, runs: Path, *, from_scratch: bool = False) -> str:
    """Find or create the store's marker (its identity), expect it from now on, and return its id.

    Args:
        runs: the folder of this machine whose `<job>/job.json` and `report.json` tell in which
            store the job was, and how far it came.
        from_scratch: the user permits the job to begin anew, whatever this machine knows of it.

    Raises:
        JobNotInStore: this machine knows the job in another store of the same address, such as the
            one on a disk that is not mounted.
        StoreError: the store does not answer.
    """
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS, create=False)
    folder = runs / job
    known = known_job(folder)
    ids = [marker_id(meta.key) for meta in store.list(MARKERS_PREFIX)]
    if known is not None and _is_same_place(known.store, uri):
        if from_scratch:  # later starts must not measure the new job by the old one's steps
            with contextlib.suppress(OSError):
                (folder / _REPORT).rename(folder / _OLD_REPORT)
        else:
            _check_known_store(store, known, folder, ids)
    if known is not None and known.marker in ids:
        chosen = known.marker
    elif ids:
        chosen = min(ids)
    else:
        chosen = _make_marker(uri)
    if known is not None and _is_same_place(known.store, uri) and known.marker != chosen:
        write_atomically(folder / NOTE, replace(known, marker=chosen).note())
    expect_marker(uri, chosen)
    return chosen


def adopt_if_it_answers(uri: str, job: str, runs: Path, *, from_scratch: bool = False) -> str:
    """Call `adopt_store`, but return "" if the store does not answer.

    A launcher calls this before its checks, which report such a store. Raises JobNotInStore.
    """
    try:
        return adopt_store(uri, job, runs, from_scratch=from_scratch)
    except StoreError:
        return ""


def _check_known_store(store: Store, known: KnownJob, folder: Path, ids: list[str]) -> None:
    steps = _reported_steps(folder / _REPORT)
    begun = f"reached step {steps:,} there" if steps else "began there"
    if known.marker and known.marker not in ids:
        if ids:
            seen = f"it has the marker of another store ({', '.join(sorted(ids)[:3])})"
        else:
            seen = "it has none"
        why = f"that store had the marker {marker_key(known.marker)}, and {seen}"
    elif steps and not _has_job(store, known.name):
        why = "it has nothing of this job"
    else:
        return
    raise JobNotInStore(
        f"job {known.name}: {store.uri} is not the store that {folder / NOTE} names: {why}, and "
        f"the job {begun}; nothing was started; fix: bring that store back (its mount, its folder's "
        "name or its content); to begin anew in this one, start again with --from-scratch, or "
        f"delete {folder / NOTE}"
    )


def _make_marker(uri: str) -> str:
    # Only now may a missing folder be created
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    new = secrets.token_hex(8)
    store.put(marker_key(new), json.dumps({"version": 1, "t_wall": time.time()}).encode())
    return new


def _has_job(store: Store, job: str) -> bool:
    return any(
        store.list(f"{job_prefix(job)}/{part}", limit=1)
        for part in ("generations", "commits", "events")
    )


def _is_same_place(one_uri: str, other_uri: str) -> bool:
    if one_uri.startswith("s3://") or other_uri.startswith("s3://"):
        return one_uri.rstrip("/") == other_uri.rstrip("/")
    paths = [Path(uri.removeprefix("file://")).expanduser() for uri in (one_uri, other_uri)]
    return paths[0].absolute() == paths[1].absolute() or paths[0].resolve() == paths[1].resolve()


def _reported_steps(path: Path) -> int:
    """Return the last step in a job's local report, or 0 if there is no readable report."""
    try:
        curve = json.loads(path.read_text())["loss_curve"]
        return max((int(step) for step, _ in curve), default=0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0

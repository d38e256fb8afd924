"""Permits: a person's recorded consent that a start may give up commits. Torch-free.

There are two kinds. With --from-scratch a start may give up all commits. With --accept-rollback it
may continue without commits that the store no longer has, for example because the store was
restored from an older snapshot. Both lose work, so a person decides. A permit covers only the
generations that existed when it was given.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.core.event_payloads import CommitPayload, GenerationStartedPayload, RestorePayload
from ebbflow.core.events import (
    Event,
    read_events,
    select_events,
)
from ebbflow.core.layout import permit_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import lineage
from ebbflow.training.checkpoint.manifest import VERSION
from ebbflow.training.checkpoint.verified_io import seal
from ebbflow.training.errors import RolledBack

ROLLBACK = "rollback"
# Option of the command line → what it permits.
PERMITS = {"from_scratch": lineage.FROM_SCRATCH, "accept_rollback": ROLLBACK}


@dataclass(frozen=True)
class MissingCommits:
    """Commits that the event log mentions but the store no longer has."""

    known: lineage.CommitRef  # the newest of them
    # The newest reachable commit in the store; None if there is none
    found: lineage.CommitRef | None
    permitted: bool  # whether a permit allows a start without the missing commits

    def describe(self) -> str:
        if self.found is None:
            has = "has no commit"
        else:
            has = f"has none newer than step {self.found.step}"
        return (
            f"the events know a commit of step {self.known.step} ({self.known.key}), and the "
            f"store {has}"
        )

    def to_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "key": self.known.key,
            "found_key": None if found is None else found.key,
            "found_step": 0 if found is None else found.step,
        }


def add_permits(parser: argparse.ArgumentParser) -> None:
    """Add the options that permit a job to continue although commits are lost.

    Only users may set these options.
    """
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="begin anew if no commit of the job can be restored",
    )
    parser.add_argument(
        "--accept-rollback",
        action="store_true",
        help="go on where the store has older commits than the job's events",
    )


def requested_permits(known: argparse.Namespace) -> list[str]:
    return [what for option, what in PERMITS.items() if getattr(known, option)]


def record_permits(job_store: Store, *whats: str) -> None:
    """Record permits that cover all generations of the job so far.

    `whats` are the kinds of permit: FROM_SCRATCH, ROLLBACK or both. Raises StoreError if the store
    cannot be read or written.
    """
    if not whats:
        return
    events = read_events(job_store)
    number = max(
        [lineage.newest_generation_number(job_store), *(event.generation for event in events)]
    )
    for what in whats:
        record = {"version": VERSION, "what": what, "generation": number, "t_wall": time.time()}
        job_store.put(permit_key(what, number), seal(record))


def find_missing_commits(job_store: Store, events: Sequence[Event]) -> MissingCommits | None:
    """Return which commits the store has lost, or None if it has lost none.

    Commits are lost if every commit in the store is older than the newest commit in the event log.

    This happens, for example, after the store was restored from a snapshot. Commits that retention
    deleted are not missing, because the store has newer commits. Unreadable commits are not missing
    either. Raises the errors of `newest_commits`.
    """
    known = _newest_known(events)
    if known is None or job_store.head(known.key) is not None:
        return None
    found = next(lineage.newest_commits(job_store), None)
    if found is not None and (found.generation, found.step) >= (known.generation, known.step):
        return None
    return MissingCommits(
        known, found, known.generation <= lineage.permitted_generation(job_store, ROLLBACK)
    )


def check_rollback(job_store: Store, events: Sequence[Event]) -> MissingCommits | None:
    """Check that a permit covers the missing commits, if there are any, and return them.

    Return None if no commit is missing.

    Raises RolledBack if commits are missing without a permit, and the errors of `newest_commits`.
    """
    missing = find_missing_commits(job_store, events)
    if missing is None or missing.permitted:
        return missing
    raise RolledBack(
        f"{job_store.uri}: {missing.describe()}; it was restored from an older snapshot, or "
        "commits were deleted; nothing was started; hint: bring the newer data back; to go on "
        "from the older commit and lose the steps between, start again with --accept-rollback"
    )


def newest_generation_in_events(events: Sequence[Event]) -> int:
    return max((event.generation for event in events), default=0)


def _newest_known(events: Sequence[Event]) -> lineage.CommitRef | None:
    """Return the last commit of the newest generation that the events record.

    If it made no commit, return the one it restored.
    """
    started = select_events(events, GenerationStartedPayload)
    if not started:
        return None
    newest = max(started, key=lambda event: (event.generation, event.t_wall))
    own = [event for event in events if event.generation == newest.generation]
    commits = [event.payload.key for event in select_events(own, CommitPayload)]
    restored = [event.payload.key for event in select_events(own, RestorePayload)]
    refs = sorted(filter(None, map(_ref, commits)), key=lambda ref: ref.step)
    return (refs or [None])[-1] or _ref((restored or [None])[-1]) or _ref(newest.payload.parent)


def _ref(key: object) -> lineage.CommitRef | None:
    try:
        if key:
            return lineage.CommitRef.from_key(str(key))
        return None
    except ValueError:
        return None

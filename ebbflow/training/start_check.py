"""Checks of a job's next start that a launcher makes before it pays for machines. Torch-free.

The ranks of a gang check all of this again, and also read every byte.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ebbflow.core.events import read_events
from ebbflow.core.layout import data_prefix
from ebbflow.core.signing_key import NAME_VARIABLE, signing_key_problem
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.lineage import (
    FROM_SCRATCH,
    NO_PARENT,
    CommitRef,
    choose_parent,
    is_readable_commit,
    newest_commits,
    nothing_to_restore_error,
    permitted_generation,
)
from ebbflow.training.checkpoint.manifest import Manifest
from ebbflow.training.checkpoint.rollback import check_rollback
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.checkpoint.verified_io import fetch_verified
from ebbflow.training.engine.guards.overrides import rewind_parent
from ebbflow.training.errors import CommitMismatch, DataError

_SHOWN = 2
# Name in a commit's extra data of the number of ranks, if it can be restored on no other number.
FITS_RANKS = "fits_ranks"


def check_start(
    job_store: Store,
    *,
    expected: Mapping[str, object] | None = None,
    ranks: int | None = None,
    signing_key_env: str | None = None,
) -> CommitRef | None:
    """Check that a start of the job can restore, and return the commit that it will restore.

    Without commits, return None. Prints a warning for each commit that a start passes over.

    Args:
        expected: values that the commit must have in its extra data: "seed", "data_fingerprint".
        ranks: number of ranks of the start; None if it is not decided yet.
        signing_key_env: as `checkpoint.signing_key_env`. If the key is not on this machine,
            signatures are not checked here.

    Raises:
        RolledBack: the store has older commits than the events.
        NothingToRestore: no commit can be restored, also because of a wrong signing key.
        DataError: the commit was trained with other data or another seed.
        CommitMismatch: the commit fits another number of ranks.
        StoreError: the store does not answer.
    """
    with _signing(signing_key_env):
        check_rollback(job_store, read_events(job_store))
        parent = rewind_parent(job_store)
        chosen = choose_parent(job_store, parent)
        if chosen is None or parent == NO_PARENT:
            return None
        found = _find_whole_commit(job_store, chosen, only=parent is not None)
    if found is None:
        return None
    ref, manifest = found
    extra = manifest.common.get("extra") or {}
    check_same_data(ref.key, expected or {}, extra)
    saved_ranks = extra.get(FITS_RANKS)
    if ranks is not None and saved_ranks not in (None, ranks):
        raise CommitMismatch(
            f"{ref.key} was saved by {saved_ranks} ranks and fits no other number, and this start "
            f"has {ranks}; fix: start {saved_ranks} ranks, or give this job another name"
        )
    return ref


def check_same_data(key: str, expected: Mapping[str, object], extra: Mapping[str, object]) -> None:
    """Raise DataError if the commit `key` was trained with other data or another seed."""
    for name, here in expected.items():
        # Imported weights lack both keys
        there = extra.get(name, here)
        if there != here:
            raise DataError(
                f"commit {key} was trained with {name} {there}, this run "
                f"has {here}: sample {extra.get('cursor')} would be another; "
                "fix: bring back the former data, workload_options, seed and tokenizers package, "
                "or start a new job"
            )


@contextmanager
def _signing(name: str | None) -> Iterator[None]:
    """Within the context, check signatures with the key in the variable `name`, if it is on this
    machine.
    """
    before = os.environ.get(NAME_VARIABLE)
    use_signing_key(None if name is None or signing_key_problem(name) else name)
    try:
        yield
    finally:
        use_signing_key(before)


def _find_whole_commit(
    job_store: Store, chosen: CommitRef, *, only: bool
) -> tuple[CommitRef, Manifest] | None:
    """Return the newest commit, from `chosen` on backwards, whose data objects are all complete.

    With `only`, consider no commit but `chosen`. If none is complete, return None if a permit
    allows a start from scratch, otherwise raise an error.
    """
    problem = ""
    for ref in [chosen] if only else newest_commits(job_store):
        if ref.step > chosen.step or (ref != chosen and not is_readable_commit(job_store, ref)):
            continue
        manifest = fetch_verified(job_store, ref.key, Manifest.from_bytes)
        cut = _find_cut_data(job_store, manifest)
        if not cut:
            if problem:
                print(
                    f"checkpoint: WARNING: {problem}; the start goes on from step {ref.step}",
                    file=sys.stderr,
                )
            return ref, manifest
        problem = problem or f"the commit of step {ref.step} is not whole: {cut}"
    if chosen.generation <= permitted_generation(job_store, FROM_SCRATCH):
        return None
    raise nothing_to_restore_error(job_store, f"no commit is whole: {problem}")


def _find_cut_data(job_store: Store, manifest: Manifest) -> str:
    """Describe the commit's data objects that are missing or truncated; return "" if there are
    none.
    """
    save = manifest.save
    sizes = {
        meta.key: meta.size for meta in job_store.list(data_prefix(save.generation, save.step))
    }
    problems = []
    for stored in manifest.data:
        size = sizes.get(stored.key)
        if size is None:  # a listing may lag
            meta = job_store.head(stored.key)
            size = None if meta is None else meta.size
        if size is None:
            problems.append(f"{stored.key} is missing")
        elif size != stored.size:
            problems.append(f"{stored.key} has {size:,} of {stored.size:,} bytes")
    more = len(problems) - _SHOWN
    return ", ".join([*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])

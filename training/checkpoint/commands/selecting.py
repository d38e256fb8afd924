"""Which commit is meant: what all commands have in common."""

from __future__ import annotations

import argparse
import json
import os

from ebbflow.infra.errors import ObjectNotFound
from ebbflow.infra.signing_key import NAME_PATTERN, NAME_VARIABLE, signing_key_problem
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.lineage import Traced, trace_lineage
from ebbflow.training.checkpoint.signing import signer, use_signing_key
from ebbflow.training.errors import CheckpointError


def add_uri(command: argparse.ArgumentParser, *, as_json: bool = True) -> None:
    command.add_argument(
        "uri", metavar="URI", help="STORE/jobs/JOB, s3://bucket/prefix/jobs/JOB, or runs/JOB on this machine"
    )
    command.add_argument(
        "--signing-key-env",
        metavar="NAME",
        help="variable with the signing key; default: as the job is configured",
    )
    if as_json:
        command.add_argument("--json", action="store_true", help="print JSON")


def choose_signing_key(store: Store, name: str | None, *, must_check: bool) -> None:
    """Check signatures as `name` says, else as the environment or the job's own configuration does.

    must_check: raise NoSigningKey where the configuration names a variable that is not set, instead of not checking.
    """
    name = name or os.environ.get(NAME_VARIABLE)
    if name is None and (named := _configured_name(store)):
        name = named if must_check or not signing_key_problem(named) else None
    use_signing_key(name)
    signer()


def _configured_name(store: Store) -> str | None:
    try:
        name = json.loads(store.get("config.json"))["config"]["checkpoint"]["signing_key_env"]
    except (ObjectNotFound, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and NAME_PATTERN.fullmatch(name) else None


def add_commit(command: argparse.ArgumentParser, *, default: str) -> None:
    command.add_argument("--commit", metavar="COMMIT", help=f"a step, a key, or the start of its hash; {default}")


def find(store: Store, wanted: str | None) -> Traced:
    """The one commit that `wanted` means, the newest that counts for None. Raises CheckpointError naming the others."""
    traced = trace_lineage(store)
    if wanted is None:
        found = [one for one in traced if one.unreachable_because is None][:1]
        if not found:
            raise CheckpointError(f"{store.uri}: no commit that counts; hint: `checkpoints list` says why not")
        return found[0]
    found = [one for one in traced if _means(one, wanted)]
    if len(found) > 1:  # of several at one step, the one that counts
        found = [one for one in found if one.unreachable_because is None] or found
    if len(found) != 1:
        among = found or traced
        keys = "".join(f"\n  {one.ref.key}" for one in among[:10])
        raise CheckpointError(f"{store.uri}: {wanted!r} is {len(found)} commits, not one; there are:{keys or ' none'}")
    return found[0]


def _means(traced: Traced, wanted: str) -> bool:
    ref = traced.ref
    if wanted.isdigit() and int(wanted) == ref.step:
        return True
    return wanted == ref.key or (len(wanted) >= 6 and ref.sha256.startswith(wanted))

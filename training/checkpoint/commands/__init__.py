"""``ebbflow checkpoints …``: a job's commits by hand. Only export and import load torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ebbflow.infra.errors import InfraError
from ebbflow.infra.known_jobs import known_job
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.commands import changing, looking, moving
from ebbflow.training.checkpoint.commands.selecting import choose_signing_key
from ebbflow.training.errors import TrainingError

_BAD_USAGE = 2
# These act on what they read, so they never go without the key of a job that has one; the others say what is unchecked.
_CHECKING = ("export", "pin", "prune", "sign")


def main(argv: list[str]) -> int:
    """Exit 0: done and sound; 1: something is bad, missing or could not be checked; 2: bad usage."""
    parser = argparse.ArgumentParser(prog="ebbflow checkpoints", description="a job's commits")
    commands = parser.add_subparsers(dest="command", required=True)
    for room in (looking, changing, moving):
        room.add_commands(commands)
    options = parser.parse_args(argv)
    try:
        fresh = options.command == "import"  # the only one that may make a job
        if not fresh and "://" not in options.uri and not Path(options.uri).is_dir():  # opening it would create it
            print(f"error: {options.uri}: no such folder; hint: it is STORE/jobs/JOB", file=sys.stderr)
            return _BAD_USAGE
        store = Store.open(options.uri if fresh else _place(options.uri))
        choose_signing_key(store, options.signing_key_env, must_check=options.command in _CHECKING)
        return options.run(store, options)
    except (TrainingError, InfraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _place(uri: str) -> str:
    """Of a folder that has only the job's reports, the store in which the job lies."""
    known = None if (Path(uri) / "commits").is_dir() else known_job(Path(uri))
    return uri if known is None else known.uri

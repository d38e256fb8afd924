"""``python -m training checkpoints list|verify URI``: a job's commits by hand. Torch-free."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from infra.errors import InfraError
from infra.known_jobs import known_job
from infra.store import Store
from training.checkpoint.lineage import Traced, trace_lineage
from training.checkpoint.reader import read_manifest
from training.checkpoint.verify import verify_commit
from training.errors import CheckpointError, TrainingError

_BAD_USAGE = 2


def main(argv: list[str]) -> int:
    """Exit 0: done and sound; 1: something is bad, missing or could not be checked; 2: bad usage."""
    parser = argparse.ArgumentParser(prog="python -m training checkpoints", description="a job's commits")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("list", "what is there, and what counts"), ("verify", "read and check every byte")):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "uri", metavar="URI", help="STORE/jobs/JOB, s3://bucket/prefix/jobs/JOB, or runs/JOB on this machine"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    try:
        if "://" not in options.uri and not Path(options.uri).is_dir():  # opening it would create it
            print(f"error: {options.uri}: no such folder; hint: it is STORE/jobs/JOB", file=sys.stderr)
            return _BAD_USAGE
        run = _list if options.command == "list" else _verify
        return run(Store.open(_place(options.uri)), options.json)
    except (TrainingError, InfraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _place(uri: str) -> str:
    """Of a folder that has only the job's reports, the store in which the job lies."""
    known = None if (Path(uri) / "commits").is_dir() else known_job(Path(uri))
    return uri if known is None else known.uri


def _list(store: Store, as_json: bool) -> int:
    rows = [_row(store, traced) for traced in trace_lineage(store)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"{store.uri}: no commits")
    for row in rows:
        standing = "counts" if row["reachable"] else f"does not count: {row['reason']}"
        size = "unknown size" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
        age = f"{row['age_seconds']:.0f} s old"
        ranks = "? ranks" if row["world_size"] is None else f"{row['world_size']} ranks"
        print(f"step {row['step']:>8}  generation {row['generation']:>4}  {ranks}  {size}  {age}  {standing}")
    return 0


def _row(store: Store, traced: Traced) -> dict[str, Any]:
    ref, reason = traced.ref, traced.unreachable_because
    row: dict[str, Any] = {
        "step": ref.step,
        "generation": ref.generation,
        "key": ref.key,
        "age_seconds": max(0.0, time.time() - traced.modified),
        "bytes": None,
        "world_size": None,
    }
    try:
        manifest = read_manifest(store, ref.key)
        row |= {"bytes": manifest.size, "world_size": manifest.save.world_size}
    except CheckpointError as error:
        reason = reason or str(error)
    return {**row, "reachable": reason is None, "reason": reason}


def _verify(store: Store, as_json: bool) -> int:
    rows = []
    for traced in trace_lineage(store):
        problems = verify_commit(store, traced.ref.key)
        rows.append({"step": traced.ref.step, "key": traced.ref.key, "sound": not problems, "problems": problems})
        if not as_json:
            print(f"step {traced.ref.step:>8}  {'sound' if not problems else 'BAD'}  {traced.ref.key}", flush=True)
            for problem in problems:
                print(f"    {problem}")
    if as_json:
        print(json.dumps(rows, indent=2))
    if not rows:
        print(f"{store.uri}: skipped, because there are no commits", file=sys.stderr)
    return 0 if rows and all(row["sound"] for row in rows) else 1

"""`ebbflow bench restore`: recovery split into its parts, beside the raw limit of reading the same
bytes.

One process and one rank. In each round every contestant reads all bytes once, one after the other:
    raw      ranges of 16 MiB of the same objects in several threads, into memory that is there, unchecked
    engine   Checkpointer.restore into a model and its AdamW, each byte checked
    dcp      torch's distributed checkpoint, which checks none (local folder only)
The raw limit is the fastest median of all ways to read. The page cache is warm for all of them
alike. Reading is the engine's download and verifying: what the raw reads do too, with sums; the
rest is finding, planning and settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.training.buckets import swift
from benchmarks.training.checkpoints import file_system
from benchmarks.training.tables import machine_line
from ebbflow.core.errors import InfraError, StoreError
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.store.ranges import read_blocks
from ebbflow.infra.instance import describe_machine
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.reader import read_manifest
from ebbflow.training.errors import TrainingError

_WIDTH = 2048
# Float32 weight, bias, and AdamW's two moments of each
_BYTES_PER_LAYER = 12 * (_WIDTH * _WIDTH + _WIDTH)
_RANGE_BYTES = 16 * 2**20
_LOCAL_THREADS = (1, 2, 4)
_REMOTE_THREADS = (4, 8, 16)
_Read = Callable[[], Any]


def main(arguments: list[str]) -> int:
    """0, or the exit code of the error that ended it, which is printed."""
    parser = argparse.ArgumentParser(prog="ebbflow bench restore", description="Measure recovery.")
    parser.add_argument("--megabytes", type=float, default=1000.0, help="of state (default 1000)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="of which medians are taken (default 7)"
    )
    parser.add_argument(
        "--store", help="folder, s3://bucket/prefix, or swift (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args(arguments)
    about = describe_machine()
    print(machine_line(about), flush=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder,
            _place(given.store, Path(folder)) as uri,
        ):
            figures = measure_restore(uri, Path(folder), given.megabytes, given.rounds)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code
    print(f"\n{restore_text(figures)}", flush=True)
    if given.json is not None:
        given.json.write_text(
            json.dumps({"kind": "measured", "machine": about, "restore": figures}, indent=1) + "\n"
        )
    return 0


@contextlib.contextmanager
def _place(store: str | None, folder: Path) -> Iterator[str]:
    """Where to write. Raises StoreError when Swift is asked for and is not here."""
    if store != "swift":
        yield store or str(folder)
        return
    with swift(folder) as place:
        if isinstance(place, str):
            raise StoreError(place)
        os.environ.update(place.environment)
        yield place.uri


def measure_restore(store_uri: str, folder: Path, megabytes: float, rounds: int) -> dict[str, Any]:
    """Seconds by contestant and round; what was written to a store that was given is deleted again."""
    job = Store.open(store_uri).sub(job_prefix(f"bench-restore-{time.time_ns()}"))
    model, optimizer = _state(megabytes)
    try:
        with Checkpointer(
            job.uri, generation=open_generation(job, run="bench", attempt=0)
        ) as checkpointer:
            checkpointer.save(1, model, optimizer, {"cursor": 1})
            commit = checkpointer.wait()
            assert commit is not None
            local = job.local_path(commit.key) is not None
            data = read_manifest(job, commit.key).data
            reads = _raw(job, [(item.key, item.size) for item in data], local=local)
            splits: list[dict[str, float]] = []
            reads["engine"] = lambda: splits.append(_restore(job, checkpointer, model, optimizer))
            if local:
                reads["dcp"] = _dcp(folder / "dcp", model, optimizer)
            seconds = _rounds(reads, rounds)
    finally:
        for meta in job.list():
            job.delete(meta.key)
    splits = splits[-rounds:]
    seconds["engine, its reading"] = [split["download"] + split["verify"] for split in splits]
    return {
        "bytes": sum(item.size for item in data),
        "store": f"{file_system(folder)} folder" if local else "s3",
        "rounds": rounds,
        "seconds": seconds,
        "split_seconds": {
            name: statistics.median(split[name] for split in splits) for name in splits[0]
        },
    }


def restore_text(figures: dict[str, Any]) -> str:
    """The table."""
    size = figures["bytes"]
    medians = {name: statistics.median(laps) for name, laps in figures["seconds"].items()}
    limit = min(seconds for name, seconds in medians.items() if name.startswith("raw"))
    lines = [
        f"restore of {size / 1e6:.0f} MB from {figures['store']}, medians of {figures['rounds']} "
        "rounds",
        f"{'':22}{'seconds':>9}{'MB/s':>8}{'of the raw limit':>18}",
    ]
    for name, seconds in medians.items():
        lines.append(f"{name:22}{seconds:9.3f}{size / seconds / 1e6:8.0f}{limit / seconds:18.2f}")
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in figures["split_seconds"].items())
    return "\n".join([*lines, f"engine's seconds: {parts}"])


def _state(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = max(1, round(1e6 * megabytes / _BYTES_PER_LAYER))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _restore(
    job: Store, checkpointer: Checkpointer, model: nn.Module, optimizer: Any
) -> dict[str, float]:
    began = time.monotonic()
    candidates = [ref.key for ref in reachable_commits(job)]
    listed = time.monotonic() - began
    restored = checkpointer.restore(candidates, model, optimizer)
    assert restored is not None
    split = asdict(restored.split)
    return {**split, "list": split["list"] + listed}


def _dcp(folder: Path, model: nn.Module, optimizer: Any) -> _Read:
    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    dcp.save(state(), checkpoint_id=folder, no_dist=True)

    def load() -> None:
        found = state()
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )

    return load


def _raw(job: Store, objects: list[tuple[str, int]], *, local: bool) -> dict[str, _Read]:
    """Ways to read the same bytes, by name."""
    ranges = [
        (key, start, min(_RANGE_BYTES, size - start))
        for key, size in objects
        for start in range(0, size, _RANGE_BYTES)
    ]
    target = memoryview(
        torch.ones(sum(length for _, _, length in ranges), dtype=torch.uint8).numpy()
    )
    places = []
    at = 0
    for _, _, length in ranges:
        places.append(target[at : at + length])
        at += length

    def one(number: int) -> None:
        key, start, length = ranges[number]
        if local:
            for _ in read_blocks(job, key, start, [places[number]], block_bytes=length):
                pass
        else:
            job.get_range(key, start, length)

    def reader(threads: int) -> _Read:
        def read() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(one, range(len(ranges))))

        return read

    return {
        f"raw, {count} threads": reader(count)
        for count in (_LOCAL_THREADS if local else _REMOTE_THREADS)
    }


def _rounds(reads: dict[str, _Read], rounds: int) -> dict[str, list[float]]:
    """A first round warms up. Each round begins with another contestant."""
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    names = list(reads)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            began = time.monotonic()
            reads[name]()
            if number:
                seconds[name].append(time.monotonic() - began)
    return seconds

"""`bench checkpoint`: the stall, the upload, how much an upload slows training, and a thousand
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import Any

from benchmarks.training.buckets import BucketPlace, null_sink, swift
from benchmarks.training.figures import checkpoint_figures
from benchmarks.training.many_ranks import bench_many_ranks, many_ranks_text
from benchmarks.training.ranks import run_ranks
from benchmarks.training.slow_down import bench_slow_down, slow_down_text
from benchmarks.training.tables import checkpoint_text
from benchmarks.training.uploads import bench_upload, upload_text
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.lineage import open_generation
from ebbflow.training.errors import DataError

PARTS = ("stall", "upload", "slowdown", "ranks")
_RANKS = 2
_STATE_BYTES_PER_PARAMETER = 12  # a float32 weight and AdamW's two moments
_STATE_LAYERS = 4


def bench_checkpoint(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures by part, each part told when it is measured.

    Raises DataError for a part that there is not.
    """
    wanted = given.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise DataError(
            f"--parts {given.parts}: there is no {', '.join(sorted(unknown))}; fix: "
            f"{', '.join(PARTS)}"
        )
    found: dict[str, Any] = {}
    if "stall" in wanted:
        found |= _bench_stall(given, folder)
        _say(checkpoint_text(found))
    if "upload" in wanted:
        found["upload"] = _bench_uploads(given, folder)
    if "slowdown" in wanted:
        found["slow_down"] = bench_slow_down(given, folder)
        _say(slow_down_text(found["slow_down"]))
    if "ranks" in wanted:
        found["many_ranks"] = bench_many_ranks(given.simulated_ranks, rounds=min(given.rounds, 5))
        _say(many_ranks_text(found["many_ranks"]))
    return found


def _say(text: str) -> None:
    """Each part as soon as it is measured: all of them take minutes."""
    print(f"\n{text}", flush=True)


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as ext4 or tmpfs; "unknown" if /proc/mounts
    does not list it.
    """
    path = str(folder.resolve())
    best = ""
    kind = "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, mounted, *_ = line.split()
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        # A later mount hides an earlier one on the same place
        if inside and len(mount) >= len(best):
            best = mount
            kind = mounted
    return kind


def _bench_stall(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every contestant writes below the same folder."""
    store = Store.open(str(folder / "store"))
    generation = open_generation(store.sub(job_prefix("bench")), run="bench", attempt=0)
    task = {
        "kind": "checkpoint",
        "config": sized_config(given.megabytes).model_dump(mode="json"),
        "store_uri": store.uri,
        "job": "bench",
        "generation": generation.number,
        "generation_id": generation.id,
        "rounds": given.rounds,
    }
    ranks = run_ranks(task, folder, ranks=_RANKS, deadline_seconds=given.deadline)
    about = {
        "ranks": _RANKS,
        "threads_per_rank": 1,
        "rounds": given.rounds,
        "file_system": file_system(folder),
    }
    return {**checkpoint_figures(ranks), **about}


def _bench_uploads(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """By name of the place; a text says why a place was left out."""
    task = {
        "config": sized_config(given.bucket_megabytes).model_dump(mode="json"),
        "rounds": given.rounds,
    }
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as servers:
        places: dict[str, BucketPlace | str] = {
            "null sink": servers.enter_context(null_sink()),
            "Swift": servers.enter_context(swift(folder)),
        }
        if given.store:
            places[given.store] = BucketPlace(given.store, given.store, {})
        for name, place in places.items():
            if isinstance(place, str):
                found[name] = place
                _say(f"upload to {name}: {place}")
                continue
            own = folder / f"upload-{len(found)}"
            own.mkdir()
            found[name] = bench_upload(place, task, own, ranks=_RANKS, deadline=given.deadline)
            _say(upload_text(name, found[name]))
    return found


def sized_config(megabytes: float) -> RunConfig:
    """The model whose weights and moments come nearest: a layer has about 12 × hidden² parameters."""
    parameters = 1e6 * megabytes / _STATE_BYTES_PER_PARAMETER
    hidden = max(16, 16 * round(math.sqrt(parameters / (12 * _STATE_LAYERS)) / 16))
    model = {
        "hidden_size": hidden,
        "num_layers": _STATE_LAYERS,
        "num_heads": 4,
        "sequence_length": 128,
    }
    return RunConfig(model=model)

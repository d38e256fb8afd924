"""Bytes per second and processor seconds of whole saves into a bucket, beside the limit that bare puts reach."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.buckets import BucketPlace
from benchmarks.training.figures import spread
from benchmarks.training.ranks import run_ranks
from ebbflow.infra.layout import job_prefix
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.lineage import open_generation

_RAW = ("raw_obstore", "raw_sockets")
_NAMES = {
    "raw_obstore": "bare puts, obstore's multipart",
    "raw_sockets": "bare puts, parts by 4 connections",
    "engine": "Ebbflow's save",
    "engine_upload": "  of which the upload",
    "dcp_s3torchconnector": "DCP + s3torchconnector",
    "dcp_s3fs": "DCP + s3fs",
}


def bench_upload(place: BucketPlace, task: dict[str, Any], folder: Path, *, ranks: int, deadline: float) -> Any:
    """task: config, rounds. Rivals that are not installed are named with the reason."""
    from benchmarks.training.rivals import installed

    with environment(place.environment):
        store = Store.open(place.uri)
        generation = open_generation(store.sub(job_prefix("bench")), run="bench", attempt=0)
        reasons = installed()
        full = {
            **task,
            "kind": "upload",
            "store_uri": place.uri,
            "job": "bench",
            "generation": generation.number,
            "generation_id": generation.id,
            "rivals": [name for name, reason in reasons.items() if not reason],
        }
        found = run_ranks(full, folder, ranks=ranks, deadline_seconds=deadline)
    figures = _figures(found)
    return {**figures, "ranks": ranks, "rounds": task["rounds"], "left_out": {n: r for n, r in reasons.items() if r}}


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """What processes that are started meanwhile find in theirs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _figures(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A lap lasts as long as its slowest rank's; processor seconds are those of all ranks and their uploaders.

    engine_upload: of the uploaders alone, from the command, with the bytes copied, to the durable index. It is what
    bare puts do too, with checksums and a deadline; a whole save has the copy before it and the commit after it.
    """
    size = sum(rank["bytes"] for rank in ranks)
    names = list(ranks[0]["laps"])
    seconds = {name: _over(ranks, name, "seconds", max) for name in names}
    limit = min((seconds[name] for name in _RAW), key=statistics.median)

    def row(laps: Sequence[float], cpu: Sequence[float]) -> dict[str, Any]:
        return {
            "bytes_per_second": spread([size / lap for lap in laps]),
            "over_raw_limit": spread([raw / lap for raw, lap in zip(limit, laps, strict=True)]),
            "cpu_seconds_per_gb": spread([1e9 * lap / size for lap in cpu]),
        }

    contestants = {}
    for name in names:
        cpu, carrier = _over(ranks, name, "cpu", sum), _over(ranks, name, "carrier_cpu", sum)
        contestants[name] = row(seconds[name], [a + b for a, b in zip(cpu, carrier, strict=True)])
        if name == "engine":
            contestants["engine_upload"] = row(_over(ranks, name, "carrier_seconds", max), carrier)
    return {"bytes": size, "contestants": contestants}


def _over(ranks: Sequence[dict[str, Any]], name: str, column: str, fold: Any) -> list[float]:
    laps = zip(*(rank["laps"][name] for rank in ranks), strict=True)
    return [fold(lap[column] for lap in of_ranks) for of_ranks in laps]


def upload_text(place: str, figures: dict[str, Any]) -> str:
    from benchmarks.training.tables import bracketed, table

    rows = []
    for name, found in figures["contestants"].items():
        rows.append(
            [
                _NAMES[name],
                f"{found['bytes_per_second']['median'] / 1e6:,.0f}",
                bracketed(found["over_raw_limit"]),
                bracketed(found["cpu_seconds_per_gb"]),
            ]
        )
    heads = ["whole saves", "MB/s", "÷ raw limit", "CPU s/GB"]
    left_out = "".join(f"\n{_NAMES[name]}: {reason}" for name, reason in figures["left_out"].items())
    about = (
        f"upload to {place}: measured · {figures['bytes'] / 1e6:.1f} MB over {figures['ranks']} ranks, medians of "
        f"{figures['rounds']} rounds\nraw limit: the faster of the bare puts; CPU: all ranks and uploaders, no server"
    )
    return f"{about}\n\n{table(heads, rows, text_columns=1)}{left_out}"

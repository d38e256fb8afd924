"""Bytes per second and processor seconds of whole saves into a bucket, beside the limit that bare
puts reach.

As a program it compares two clients that upload in parts with checksums, `core/store/multipart` and
`awscrt.s3`, on the strict S3 server of the tests: `python -m benchmarks.training.uploads
[--part-mib 256] [--parts 2] [--rounds 7]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.training.buckets import BucketPlace, strict_s3
from benchmarks.training.figures import spread
from benchmarks.training.ranks import run_ranks
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
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


def bench_upload(
    place: BucketPlace, task: dict[str, Any], folder: Path, *, ranks: int, deadline: float
) -> Any:
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
    return {
        **figures,
        "ranks": ranks,
        "rounds": task["rounds"],
        "left_out": {n: r for n, r in reasons.items() if r},
    }


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
    """A lap lasts as long as its slowest rank's; processor seconds are those of all ranks and their
    uploaders.

    engine_upload: of the uploaders alone, from the command, with the bytes copied, to the durable
    index. It is what bare puts do too, with checksums and a deadline; a whole save has the copy
    before it and the commit after it.
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
        cpu = _over(ranks, name, "cpu", sum)
        carrier = _over(ranks, name, "carrier_cpu", sum)
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
    left_out = "".join(
        f"\n{_NAMES[name]}: {reason}" for name, reason in figures["left_out"].items()
    )
    about = (
        f"upload to {place}: measured · {figures['bytes'] / 1e6:.1f} MB over {figures['ranks']} "
        f"ranks, medians of {figures['rounds']} rounds\nraw limit: the faster of the bare puts; "
        "CPU: all ranks and uploaders, no server"
    )
    return f"{about}\n\n{table(heads, rows, text_columns=1)}{left_out}"


_THREADS = 4
_SECONDS = 300.0


def compare_clients(part_bytes: int, parts: int, rounds: int) -> dict[str, Any]:
    """Upload one object by each client in turn, `rounds` times after a round that is not counted.

    Returns:
        For each client the laps as (wall seconds, processor seconds of this process); the server is
        another process.
    """
    size = part_bytes * parts
    with (
        strict_s3() as place,
        environment(place.environment),
        tempfile.NamedTemporaryFile(dir="/dev/shm") as file,
    ):
        file.write(os.urandom(size))
        file.flush()
        uploads = {
            "core/store/multipart": _multipart_upload(place.uri, Path(file.name), part_bytes),
            "awscrt.s3": _awscrt_upload(place, Path(file.name), part_bytes),
        }
        laps: dict[str, list[tuple[float, float]]] = {name: [] for name in uploads}
        for number in range(1 + rounds):
            for name, upload in sorted(uploads.items(), reverse=bool(number % 2)):
                began = time.monotonic()
                cpu_began = time.process_time()
                upload()
                if number:
                    laps[name].append((time.monotonic() - began, time.process_time() - cpu_began))
    return {"part_bytes": part_bytes, "parts": parts, "rounds": rounds, "laps": laps}


def _multipart_upload(uri: str, path: Path, part_bytes: int) -> Callable[[], object]:
    import mmap

    from awscrt import checksums

    from ebbflow.core.store.multipart.requests import Throttle
    from ebbflow.core.store.multipart.sinks import open_sink

    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    sink = open_sink(uri, Throttle())
    starts = range(0, len(data), part_bytes)

    def upload() -> None:
        begun = sink.begin("object", len(data), parts=len(starts), seconds=_SECONDS)

        def put(number: int, start: int) -> tuple[Any, int]:
            part = data[start : start + part_bytes]
            crc = checksums.crc64nvme(part)
            return sink.put_part(begun, number, start, part, crc, seconds=_SECONDS), crc

        with ThreadPoolExecutor(_THREADS) as pool:
            done = list(pool.map(put, range(1, len(starts) + 1), starts))
        whole = 0
        for (_, crc), start in zip(done, starts, strict=True):
            length = len(data[start : start + part_bytes])
            if start:
                whole = checksums.combine_crc64nvme(whole, crc, length)
            else:
                whole = crc
        sink.finish(
            begun, [part for part, _ in done], [crc for _, crc in done], whole, seconds=_SECONDS
        )

    return upload


def _awscrt_upload(place: BucketPlace, path: Path, part_bytes: int) -> Callable[[], object]:
    """The file is read by the C library itself, its fastest way in."""
    from awscrt import auth, http, s3

    bucket, _, prefix = place.uri.removeprefix("s3://").partition("/")
    keys = place.environment["AWS_ACCESS_KEY_ID"], place.environment["AWS_SECRET_ACCESS_KEY"]
    credentials = auth.AwsCredentialsProvider.new_static(*keys)
    region = place.environment["AWS_REGION"]
    signing = s3.create_default_s3_signing_config(region=region, credential_provider=credentials)
    client = s3.S3Client(
        region=region,
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        signing_config=signing,
        part_size=part_bytes,
        max_active_connections_override=_THREADS,
    )
    host = place.environment["AWS_ENDPOINT_URL"].removeprefix("http://")
    checksum = s3.S3ChecksumConfig(
        algorithm=s3.S3ChecksumAlgorithm.CRC64NVME, location=s3.S3ChecksumLocation.HEADER
    )

    def upload() -> None:
        headers = http.HttpHeaders([("host", host), ("content-length", str(path.stat().st_size))])
        request = http.HttpRequest("PUT", f"/{bucket}/{prefix}/object", headers)
        made = client.make_request(
            type=s3.S3RequestType.PUT_OBJECT,
            request=request,
            send_filepath=str(path),
            checksum_config=checksum,
        )
        made.finished_future.result(_SECONDS)

    return upload


def clients_text(figures: dict[str, Any]) -> str:
    """The comparison as a table: medians, with the smallest and the largest lap."""
    from benchmarks.training.tables import table

    def cell(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    rows = [
        [name, cell([wall for wall, _ in laps]), cell([cpu for _, cpu in laps])]
        for name, laps in figures["laps"].items()
    ]
    about = (
        f"one object in {figures['parts']} parts of {figures['part_bytes'] / 2**20:g} MiB with "
        f"CRC64NVME, {_THREADS} connections, strict S3 server on the same machine: measured, "
        f"medians of {figures['rounds']} rounds"
    )
    return f"{about}\n\n{table(['client', 'wall s', 'CPU s'], rows, text_columns=1)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.uploads")
    parser.add_argument("--part-mib", type=int, default=256)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    figures = compare_clients(given.part_mib * 2**20, given.parts, given.rounds)
    print(clients_text(figures))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

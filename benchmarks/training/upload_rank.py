"""One rank of the upload bench: the same state into a bucket by each contestant in turn, beside
bare parallel puts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import obstore
import torch
from obstore.store import S3Store

from benchmarks.training.laps import await_all
from benchmarks.training.rivals import BucketSaver
from benchmarks.training.savers import CommitSaver
from benchmarks.training.state import local_bytes, trained_state
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import S3Client, find_account
from ebbflow.training.checkpoint import Generation
from ebbflow.training.gang import Gang

_PART_BYTES = 32 * 2**20
_THREADS = 4
_SECONDS = 300.0
# A save is followed by the deletion of the one before, which is nobody else's to pay
_PAUSE_SECONDS = 0.3


class _Saver(Protocol):
    def save(self, step: int) -> None: ...

    def finish(self) -> None: ...


def measure_upload(task: dict[str, Any], gang: Gang) -> dict[str, Any]:
    """Wall and processor seconds by contestant and round, of this rank. Collective."""
    model, optimizer = trained_state(RunConfig.model_validate(task["config"]), gang)
    size = local_bytes(model, optimizer)
    uri = task["store_uri"]
    generation = Generation(task["generation"], task["generation_id"])
    job = Store.open(uri).sub(job_prefix(task["job"])).uri
    engine = CommitSaver(job, generation, model, optimizer, gang.rank)
    savers: dict[str, _Saver] = {"engine": engine}
    savers |= {name: BucketSaver(name, uri, model, optimizer) for name in task["rivals"]}
    raw = {
        "raw_obstore": _obstore_puts(uri, gang.rank, size),
        "raw_sockets": _socket_puts(uri, gang.rank, size),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*raw, *savers)}
    for number in range(1 + task["rounds"]):
        for name, put in raw.items():
            lap = _lap(put, engine)
            if number:
                found[name].append(lap)
        for name, saver in savers.items():
            lap = _lap(partial(_save, saver, number + 1), engine)
            if number:
                found[name].append(lap)
    engine.close()
    return {"laps": found, "bytes": size}


def _save(saver: _Saver, step: int) -> None:
    saver.save(step)
    saver.finish()


def _lap(work: Callable[[], object], engine: CommitSaver) -> dict[str, float]:
    """carrier_…: of the process that carries our bytes; the others have none."""
    time.sleep(_PAUSE_SECONDS)
    await_all()
    began = time.monotonic()
    cpu_began = time.process_time()
    carried = engine.carried()
    work()
    seconds = time.monotonic() - began
    cpu = time.process_time() - cpu_began
    after = engine.carried()
    carrier = {
        "carrier_cpu": after.cpu_seconds - carried.cpu_seconds,
        "carrier_seconds": after.seconds - carried.seconds,
    }
    return {"seconds": seconds, "cpu": cpu, **carrier}


def _obstore_puts(uri: str, rank: int, size: int) -> Callable[[], object]:
    """One multipart upload by the Rust library."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    options: dict[str, Any] = {
        "region": os.environ["AWS_REGION"],
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
    }
    client = {"timeout": f"{_SECONDS:g}s", "allow_http": True}
    store = S3Store(bucket, client_options=client, unsigned_payload=True, **options)
    data = memoryview(torch.ones(size, dtype=torch.uint8).numpy())
    return lambda: obstore.put(
        store,
        f"{prefix}/raw/{rank}",
        data,
        use_multipart=True,
        chunk_size=_PART_BYTES,
        max_concurrency=_THREADS,
    )


def _socket_puts(uri: str, rank: int, size: int) -> Callable[[], object]:
    """Plain puts of parts over kept connections, without checksums, retries or an index."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    requests = S3Client(bucket, find_account())
    data = memoryview(torch.ones(size, dtype=torch.uint8).numpy())
    starts = range(0, size, _PART_BYTES)
    pool = ThreadPoolExecutor(_THREADS)

    def put(start: int) -> None:
        part = data[start : start + _PART_BYTES]
        requests.send("PUT", f"{prefix}/raw/{rank}-{start}", body=part, seconds=_SECONDS)

    return lambda: list(pool.map(put, starts))

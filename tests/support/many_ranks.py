"""The protocol of a save at up to a thousand ranks: each uploader's requests to the store, by kind.

Ranks are simulated: threads of one process, that run the uploaders' own code against a store in
memory whose requests take a stated time. Data objects are of one small part. What is measured:
requests, sizes, processor time; what is simulated: the latency of the store, and when each rank's
upload ends.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from obstore.store import MemoryStore

from ebbflow.core.layout import commit_key, data_key, generation_key, index_key
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import UploadedPart
from ebbflow.training.checkpoint.commit import await_commit, commit_as_backup
from ebbflow.training.checkpoint.lineage import Generation, newest_commits, open_generation
from ebbflow.training.checkpoint.manifest import (
    VERSION,
    CheckpointId,
    IndexEntry,
    Manifest,
    RankIndex,
)
from ebbflow.training.checkpoint.part_uploader import PartSettings, PartUploader
from ebbflow.training.checkpoint.verified_io import Deadline, put_verified, seal, sha256_text

_REQUEST_SECONDS = 0.02
_SKEW_SECONDS = 2.0  # between the first rank whose upload ends and the last
_TENSORS = 300  # sharded over all ranks: 100 parameters with two moments each
_WORLDS = (16, 64, 256, 1024)
# What the job has before the save: each is more than a page of a listing
_PAST_GENERATIONS = 3000
_PAST_COMMITS = 5000
_DEADLINE_SECONDS = 120.0
_SHARD = bytes(4096)
_KINDS = ("put", "get", "head", "list")


class CountingStore(Store):
    """A store in memory that counts, and takes its time for each request."""

    def __init__(self, counts: _Counts) -> None:
        super().__init__(MemoryStore(), "memory://bench", None)
        self.counts = counts

    def put(self, key: str, data: Any, **options: Any) -> None:
        self.counts.add("put")
        super().put(key, data, **options)

    def get(self, key: str) -> bytes:
        self.counts.add("get")
        return super().get(key)

    def head(self, key: str) -> ObjectMeta | None:
        self.counts.add("head")
        return super().head(key)

    def pages(self, prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        for number, page in enumerate(super().pages(prefix, after=after)):
            self.counts.add_page(number + 1)
            yield page


def save_with_many_ranks(largest: int, *, rounds: int) -> dict[str, Any]:
    """Figures by number of ranks, up to `largest`."""
    worlds = [world for world in _WORLDS if world < largest] + [largest]
    found = {}
    for world in worlds:
        laps = [_save(world, number + 1) for number in range(rounds)]
        found[str(world)] = {
            name: statistics.median(lap[name] for lap in laps)
            for name in laps[0]
            if name != "finding"
        } | {"finding": laps[-1]["finding"]}
    about = {
        "request_seconds": _REQUEST_SECONDS,
        "skew_seconds": _SKEW_SECONDS,
        "tensors": _TENSORS,
    }
    past = {"past_generations": _PAST_GENERATIONS, "past_commits": _PAST_COMMITS}
    return {"worlds": found, "rounds": rounds, **about, **past}


@dataclass
class _Counts:
    """Requests by kind; each page of a listing is one."""

    kinds: Counter[str] = field(default_factory=Counter)
    longest_list: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str) -> None:
        with self.lock:
            self.kinds[kind] += 1
        time.sleep(_REQUEST_SECONDS)

    def add_page(self, number: int) -> None:
        """number: of the page, from 1, in its listing."""
        self.add("list")
        with self.lock:
            self.longest_list = max(self.longest_list, number)


class _CountingSink:
    """Takes parts and forgets them."""

    def __init__(self, counts: _Counts) -> None:
        self._counts = counts
        self._sizes: dict[str, int] = {}

    def begin(self, key: str, size: int, **_: Any) -> str:
        self._sizes[key] = size
        return key

    def put_part(
        self, _begun: str, number: int, _start: int, _body: Any, crc: int, **_: Any
    ) -> UploadedPart:
        self._counts.add("put")
        return UploadedPart(number, "", crc)

    def finish(self, _begun: str, _parts: Any, _crcs: Any, whole: int, **_: Any) -> int | None:
        return whole

    def abort(self, _begun: str, **_: Any) -> None:
        return None

    def size(self, key: str, **_: Any) -> tuple[int, int | None]:
        self._counts.add("head")
        return self._sizes[key], None

    def sweep(self, _prefix: str, **_: Any) -> list[str]:
        return []


def _save(world: int, seed: int) -> dict[str, Any]:
    """One save by `world` ranks, whose uploads end at random moments."""
    counts = _Counts()
    store = CountingStore(counts)
    _put_past(store)
    generation = open_generation(store, run="bench", attempt=0)
    save = CheckpointId(
        job="bench", generation=generation.name, step=_PAST_COMMITS + 1, world_size=world
    )
    uploader = PartUploader(_CountingSink(counts), PartSettings(parallel=64), Throttle())
    chance = random.Random(seed)
    delays = [chance.uniform(0.0, _SKEW_SECONDS) for _ in range(world)]
    counts.kinds.clear()
    durable = [0.0] * world
    done = threading.Event()
    committed = []

    def rank_of(rank: int) -> Callable[[], None]:
        def run() -> None:
            deadline = Deadline(_DEADLINE_SECONDS)
            time.sleep(delays[rank])
            data = uploader.upload(
                data_key(save.generation, save.step, rank), memoryview(_SHARD), deadline
            )
            items = tuple(_item(number, rank, world) for number in range(_TENSORS))
            index = RankIndex(
                save=save, rank=rank, data=data, items=items, common={} if rank == 0 else None
            )
            put_verified(store, index_key(save.generation, save.step, rank), index.to_bytes())
            durable[rank] = time.monotonic()
            if rank == 0:
                committed.append(await_commit(store, save, deadline))
                durable.append(time.monotonic())
                done.set()
            else:
                commit_as_backup(store, save, rank, deadline, done.wait)

        return run

    cpu_began = time.process_time()
    threads = [threading.Thread(target=rank_of(rank), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu = time.process_time() - cpu_began
    kinds = dict(counts.kinds)
    longest = counts.longest_list
    return {
        **{kind: kinds.get(kind, 0) for kind in _KINDS},
        "requests": sum(kinds.values()),
        "longest_list": longest,
        "commit_seconds": durable[-1] - max(durable[:world]),
        "cpu_seconds": cpu,
        "manifest_bytes": len(store.get(committed[0].commit.key)),
        "finding": _finding(store, counts, generation),
    }


def _put_past(store: Store) -> None:
    """A job that was started and has committed many times, put uncounted; of its commits there are
    the manifests.
    """
    step = 0
    parent = None
    for number in range(1, _PAST_GENERATIONS + 1):
        generation = Generation(number, f"{number:08x}", parent, step)
        about = {"generation": number, "id": generation.id, "parent": parent, "parent_step": step}
        Store.put(store, generation_key(number, generation.id), seal({"version": VERSION, **about}))
        while step < number * _PAST_COMMITS // _PAST_GENERATIONS:
            step += 1
            save = CheckpointId(job="bench", generation=generation.name, step=step, world_size=0)
            raw = Manifest(save=save, data=(), indexes=(), tensors={}).to_bytes()
            parent = commit_key(step, number, sha256_text(raw))
            Store.put(store, parent, raw)


def _finding(store: Store, counts: _Counts, generation: Generation) -> dict[str, int]:
    """What it takes to find the newest commit of the whole job."""
    counts.kinds.clear()
    counts.longest_list = 0
    assert next(newest_commits(store)).generation == generation.number
    return {
        "requests": sum(counts.kinds.values()),
        "pages_of_the_longest_list": counts.longest_list,
    }


def _item(number: int, rank: int, world: int) -> IndexEntry:
    boxes = {"shape": (world * 4,), "offsets": (rank * 4,), "sizes": (4,)}
    return IndexEntry(
        name=f"model.layers.{number}.weight",
        dtype="float32",
        start=number * 64 % 4032,
        length=16,
        **boxes,
    )

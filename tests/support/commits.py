"""Generations and commits without tensors, put into a store as a job would put them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from obstore.store import MemoryStore

from ebbflow.core.layout import commit_key, data_key, generation_key, index_key
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.training.checkpoint.lineage import CommitRef, Generation
from ebbflow.training.checkpoint.manifest import VERSION, CheckpointId, DataObject, Manifest
from ebbflow.training.checkpoint.verified_io import seal, sha256_text


class RecordingStore(Store):
    """A store in memory that records its requests, and lists `page_size` objects in each page.

    Attributes:
        now: The store's clock, by which it dates what is put.
        before_put: Called with the key before each put. It may raise, or do what another process
            does meanwhile.
        before_get, before_delete: The same for the other requests.
    """

    def __init__(self, *, page_size: int = 1000) -> None:
        super().__init__(MemoryStore(), "memory://jobs/test", None)
        self.page_size = page_size
        self.listings: list[tuple[str, str]] = []  # (prefix, after) of each listing
        self.pages_read = Counter[str]()  # by prefix
        self.got: list[str] = []
        self.put_keys: list[str] = []
        self.tags: dict[str, Any] = {}  # of the last put, by key
        self.deleted: list[str] = []
        self.now = 1000.0
        self.dates: dict[str, float] = {}
        self.before_put: Callable[[str], object] = lambda key: None
        self.before_get: Callable[[str], object] = lambda key: None
        self.before_delete: Callable[[str], object] = lambda key: None

    def pages(self, prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        self.listings.append((prefix, after))
        found = []
        for page in super().pages(prefix, after=after):
            for meta in page:
                found.append(self._dated(meta))
        for start in range(0, max(1, len(found)), self.page_size):
            self.pages_read[prefix] += 1
            yield found[start : start + self.page_size]

    def get(self, key: str) -> bytes:
        self.before_get(key)
        self.got.append(key)
        assert len(self.got) < 10_000, "the store is read without end"
        return super().get(key)

    def put(self, key: str, data: bytes, **options: Any) -> None:
        self.before_put(key)
        self.put_keys.append(key)
        self.tags[key] = options.get("tags")
        self.dates[key] = self.now
        super().put(key, data, **options)

    def head(self, key: str) -> ObjectMeta | None:
        meta = super().head(key)
        return meta and self._dated(meta)

    def delete(self, key: str) -> None:
        self.before_delete(key)
        self.deleted.append(key)
        super().delete(key)

    def forget(self) -> None:
        for requests in (self.listings, self.pages_read, self.got, self.put_keys, self.deleted):
            requests.clear()

    def _dated(self, meta: ObjectMeta) -> ObjectMeta:
        return replace(meta, modified=self.dates.get(meta.key, self.now))


def put_generation(
    store: Store,
    number: int,
    parent: CommitRef | None = None,
    *,
    generation_id: str = "aaaa",
    **changes: Any,
) -> Generation:
    """Put a generation's record.

    `changes` are fields of the record with other values than they should have.
    """
    if parent is None:
        parent_key = None
    else:
        parent_key = parent.key
    if parent is None:
        parent_step = 0
    else:
        parent_step = parent.step
    record = {
        "version": VERSION,
        "generation": number,
        "id": generation_id,
        "parent": parent_key,
        "parent_step": parent_step,
        **changes,
    }
    store.put(generation_key(number, generation_id), seal(record))
    return Generation(number, generation_id, parent_key, parent_step)


def put_commit(
    store: Store, generation: Generation, step: int, *, extra: dict[str, Any] | None = None
) -> CommitRef:
    """Put a commit without data.

    Commits of one step with different `extra` have different manifests.
    """
    save = CheckpointId(job="test", generation=generation.name, step=step, world_size=0)
    common = {"extra": extra or {}, "optimizer": None, "parent": None}
    return put_manifest(store, Manifest(save=save, data=(), indexes=(), tensors={}, common=common))


def put_whole_commit(
    store: Store,
    generation: Generation,
    step: int,
    *,
    size: int = 100,
    extra: dict[str, Any] | None = None,
) -> CommitRef:
    """Put a commit of one rank with its index and `size` zero bytes of data."""
    save = CheckpointId(job="test", generation=generation.name, step=step, world_size=1)
    key = data_key(generation.name, step, 0)
    store.put(key, bytes(size))
    store.put(index_key(generation.name, step, 0), b"{}")
    if size:
        chunks = ("0" * 16,)
    else:
        chunks = ()
    data = DataObject(key=key, size=size, crc64nvme="0" * 16, chunk_bytes=2**24, chunks=chunks)
    common = {"extra": extra or {}, "optimizer": None, "parent": None}
    return put_manifest(
        store, Manifest(save=save, data=(data,), indexes=("0",), tensors={}, common=common)
    )


def put_manifest(store: Store, manifest: Manifest) -> CommitRef:
    raw = manifest.to_bytes()
    key = commit_key(manifest.save.step, manifest.save.generation_number, sha256_text(raw))
    store.put(key, raw)
    return CommitRef.from_key(key)


def read_record(store: Store, generation: Generation) -> dict[str, Any]:
    record = json.loads(store.get(generation_key(generation.number, generation.id)))
    del record["seal"]
    return record

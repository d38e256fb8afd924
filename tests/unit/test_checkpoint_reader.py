"""Reading: whole chunks, each once, verified, into the memory where the bytes belong; against any layout of wishes."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebbflow.infra.errors import StoreError
from ebbflow.infra.ranges import read_blocks
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint import Checkpointer, CommitReader, open_generation
from ebbflow.training.checkpoint.manifest import DataObject
from ebbflow.training.checkpoint.reader import VerifiedReader, WantedRange, plan_chunks
from ebbflow.training.checkpoint.verified_io import crc_text
from ebbflow.training.errors import CorruptCommit

SIZE, CHUNK = 1000, 64


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, DataObject, bytes]:
    store = Store.open(str(tmp_path_factory.mktemp("reader")))
    raw = random.Random(1).randbytes(SIZE)
    store.put("object", raw)
    sums = tuple(crc_text(raw[start : start + CHUNK]) for start in range(0, SIZE, CHUNK))
    return store, DataObject(key="object", size=SIZE, crc64nvme="", chunk_bytes=CHUNK, chunks=sums), raw


class Remote(Store):
    """The same folder, seen as a store that is not on this machine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.uri = store.uri
        self.asked: list[tuple[int, int]] = []

    def local_path(self, key: str) -> None:
        return None

    def head(self, key: str):
        return self._store.head(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.asked.append((start, length))
        return self._store.get_range(key, start, length)


WISHES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 300)), max_size=12)


@pytest.mark.parametrize("remote", [False, True])
@settings(max_examples=150, deadline=None)
@given(wishes=WISHES)
def test_any_ranges_overlapping_or_not_come_as_they_are(
    stored: tuple[Store, DataObject, bytes], remote: bool, wishes: list[tuple[int, int]]
) -> None:
    store, data, raw = stored
    ranges = [(start, min(length, SIZE - start)) for start, length in wishes]
    targets = [bytearray(b"\xee" * length) for _, length in ranges]
    reader = VerifiedReader(Remote(store) if remote else store, [data], parallel=2)
    reader.read(WantedRange(0, start, memoryview(target)) for (start, _), target in zip(ranges, targets, strict=True))
    for (start, length), target in zip(ranges, targets, strict=True):
        assert bytes(target) == raw[start : start + length]
    needed = {
        number for start, length in ranges for number in range(start // CHUNK, -(-(start + length) // CHUNK)) if length
    }
    assert reader.figures.bytes == sum(min(CHUNK, SIZE - number * CHUNK) for number in needed), "each chunk once"


def test_more_pieces_than_one_read_takes(stored: tuple[Store, DataObject, bytes]) -> None:
    store, data, raw = stored
    target = bytearray(SIZE)
    VerifiedReader(store, [data]).read(WantedRange(0, at, memoryview(target)[at : at + 1]) for at in range(SIZE))
    assert bytes(target) == raw
    pieces = [memoryview(bytearray(1)) for _ in range(SIZE)]
    blocks = list(read_blocks(store, "object", 0, pieces, block_bytes=37))
    assert b"".join(pieces) == raw and max(sum(map(len, block)) for block in blocks) == 37


def test_what_lies_beyond_the_end_is_damage_and_what_is_not_asked_for_is_not_touched(
    stored: tuple[Store, DataObject, bytes],
) -> None:
    store, data, _ = stored
    with pytest.raises(CorruptCommit, match="bytes 990 to 1010 are beyond its 1000"):
        plan_chunks([WantedRange(0, 990, memoryview(bytearray(20)))], [data])
    with pytest.raises(StoreError, match="36 bytes at 964, expected 50: truncated"):
        list(read_blocks(store, "object", 964, [memoryview(bytearray(50))], block_bytes=2**20))


@pytest.mark.parametrize("faults", [1, 3, 4])
def test_a_store_in_trouble_is_asked_again_but_not_for_ever(
    stored: tuple[Store, DataObject, bytes], monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    store, data, raw = stored
    remote, target = Remote(store), bytearray(CHUNK)
    get_range = remote.get_range

    def fails_first(key: str, start: int, length: int) -> bytes:
        found = get_range(key, start, length)
        if len(remote.asked) <= faults:
            raise StoreError("503 SlowDown")
        return found

    monkeypatch.setattr(remote, "get_range", fails_first)
    reader = VerifiedReader(remote, [data])
    if faults < 4:
        reader.read([WantedRange(0, 0, memoryview(target))])
        assert bytes(target) == raw[:CHUNK]
    else:
        with pytest.raises(StoreError, match="503"):
            reader.read([WantedRange(0, 0, memoryview(target))])
    assert len(remote.asked) == min(faults + 1, 4)


def test_a_restore_says_where_its_time_went_and_reads_each_byte_once(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path / "jobs" / "job"))
    model = nn.Linear(300, 300)
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as checkpointer:
        checkpointer.save(1, model, None, {})
        key = checkpointer.wait().key
        restored = checkpointer.restore([key], nn.Linear(300, 300), None)
    split = restored.split
    assert sum(vars(split).values()) == pytest.approx(restored.seconds) and min(vars(split).values()) >= 0
    reader = CommitReader(job, key)
    assert restored.bytes_read == reader.manifest.size
    weight = torch.empty_like(model.weight)
    reader.read_into({"model.weight": weight})
    assert torch.equal(weight, model.weight)


class Temporary(TorchDispatchMode):
    """Counts the bytes of new tensors that are in use at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = list[weakref.ref[torch.Tensor]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            self.alive = [one for one in self.alive if one() is not None] + [weakref.ref(found)]
            self.most = max(self.most, sum(one.nbytes for ref in self.alive if (one := ref()) is not None))
        return found


def test_tensors_that_are_read_by_way_of_the_host_are_read_in_groups(tmp_path: Path) -> None:
    """The memory of a tensor of another layout, or on a GPU, is no destination for stored bytes."""
    job = Store.open(str(tmp_path / "jobs" / "job"))
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as checkpointer:
        checkpointer.save(1, model, None, {})
        key = checkpointer.wait().key
    size, progress = 100 * 100 * 4, list[int]()
    targets = {f"model.{name}": torch.zeros(100, 100).t() for name in model.state_dict()}
    reader = CommitReader(job, key, group_bytes=3 * size, progress=lambda: progress.append(0))
    with Temporary() as temporary:
        reader.read_into(targets)
    assert all(torch.equal(targets[f"model.{name}"], value) for name, value in model.state_dict().items())
    assert len(progress) == 3 and temporary.most <= 3 * size

"""Reading: whole chunks, each once, verified, into the memory where the bytes belong; against any
layout of wishes.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ebbflow
from ebbflow.core.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
    StoreTimeout,
    StoreUnavailable,
)
from ebbflow.core.layout import commit_key, data_key, index_key, index_prefix
from ebbflow.core.store import Store
from ebbflow.core.store.ranges import read_blocks
from ebbflow.training.checkpoint import Checkpointer, CommitReader, open_generation
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.manifest import (
    CheckpointId,
    DataObject,
    Manifest,
    RankIndex,
    TensorEntry,
    TensorPiece,
)
from ebbflow.training.checkpoint.reader import (
    ReadFigures,
    VerifiedReader,
    WantedRange,
    find_problem,
    find_problem_in_new_process,
    find_uncommitted,
    plan_chunks,
    read_manifest,
    verify_commit,
)
from ebbflow.training.checkpoint.reader import main as read_again
from ebbflow.training.checkpoint.verified_io import crc_text, sha256_text
from ebbflow.training.errors import CorruptCommit
from tests.support.commits import put_manifest

SIZE = 1000
CHUNK = 64

WISHES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 300)), max_size=12)

RETRIED = [StoreError, StoreUnavailable, ObjectNotFound]
FINAL = [StoreTimeout, StoreForbidden, StoreFull, StoreMisconfigured, ValueError, OSError]


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


class Temporary(TorchDispatchMode):
    """Counts the bytes of new tensors that are in use at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = list[weakref.ref[torch.Tensor]]()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            self.alive = [reference for reference in self.alive if reference() is not None] + [
                weakref.ref(found)
            ]
            self.most = max(
                self.most, sum(one.nbytes for ref in self.alive if (one := ref()) is not None)
            )
        return found


class SlowRemote(Remote):
    """A store of 1,000 chunks, whose second one is not readable.

    The read of the first chunk ends once no other has begun for 0.3 s, or half of them have.
    """

    def get_range(self, key: str, start: int, length: int) -> bytes:
        super().get_range(key, start, length)
        if start == 0:
            seen = 0
            while seen < len(self.asked) < 500:
                seen = len(self.asked)
                time.sleep(0.3)
        elif start == CHUNK:
            raise StoreForbidden("403")
        else:
            time.sleep(0.005)
        return bytes(length)


# A store in trouble


class Troubled(Remote):
    """A store whose first `times` reads of a range fail with `error`."""

    def __init__(self, store: Store, error: Exception, times: int) -> None:
        super().__init__(store)
        self._error = error
        self._times = times

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        if len(self.asked) <= self._times:
            raise self._error
        return data


# Another process


class Answer:
    """What a process that reads again has printed, and how it was started."""

    def __init__(self, printed: str | Exception) -> None:
        self.printed = printed
        self.command: list[str] = []
        self.options: dict[str, Any] = {}

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.command = command
        self.options = options
        if isinstance(self.printed, Exception):
            raise self.printed
        return subprocess.CompletedProcess(command, 0, stdout=self.printed)


class FakeLibrary:
    """The C library, which refuses to tie this process to its parent."""

    calls: ClassVar[list[tuple[int, ...]]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def prctl(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return -1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, DataObject, bytes]:
    store = Store.open(str(tmp_path_factory.mktemp("reader")))
    raw = random.Random(1).randbytes(SIZE)
    store.put("object", raw)
    sums = tuple(crc_text(raw[start : start + CHUNK]) for start in range(0, SIZE, CHUNK))
    return (
        store,
        DataObject(key="object", size=SIZE, crc64nvme="", chunk_bytes=CHUNK, chunks=sums),
        raw,
    )


@pytest.mark.parametrize("remote", [False, True])
@settings(max_examples=150, deadline=None)
@given(wishes=WISHES)
@pytest.mark.slow
def test_any_ranges_overlapping_or_not_come_as_they_are(
    stored: tuple[Store, DataObject, bytes], remote: bool, wishes: list[tuple[int, int]]
) -> None:
    store, data, raw = stored
    ranges = [(start, min(length, SIZE - start)) for start, length in wishes]
    targets = [bytearray(b"\xee" * length) for _, length in ranges]
    reader = VerifiedReader(Remote(store) if remote else store, [data], parallel=2)
    reader.read(
        WantedRange(0, start, memoryview(target))
        for (start, _), target in zip(ranges, targets, strict=True)
    )
    for (start, length), target in zip(ranges, targets, strict=True):
        assert bytes(target) == raw[start : start + length]
    needed = set()
    for start, length in ranges:
        needed |= {
            number for number in range(start // CHUNK, -(-(start + length) // CHUNK)) if length
        }
    assert reader.figures.bytes == sum(min(CHUNK, SIZE - number * CHUNK) for number in needed), (
        "each chunk once"
    )


def test_more_pieces_than_one_read_takes(stored: tuple[Store, DataObject, bytes]) -> None:
    store, data, raw = stored
    target = bytearray(SIZE)
    VerifiedReader(store, [data]).read(
        WantedRange(0, at, memoryview(target)[at : at + 1]) for at in range(SIZE)
    )
    assert bytes(target) == raw
    pieces = [memoryview(bytearray(1)) for _ in range(SIZE)]
    blocks = list(read_blocks(store, "object", 0, pieces, block_bytes=37))
    assert b"".join(pieces) == raw and max(sum(map(len, block)) for block in blocks) == 37


def test_a_reader_reports_bytes_beyond_the_end_and_reads_only_what_is_requested(
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
    remote = Remote(store)
    target = bytearray(CHUNK)
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


def test_a_restore_reports_its_timings_and_reads_each_byte_once(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path / "jobs" / "job"))
    model = nn.Linear(300, 300)
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as checkpointer:
        checkpointer.save(1, model, None, {})
        key = checkpointer.wait().key
        restored = checkpointer.restore([key], nn.Linear(300, 300), None)
    split = restored.split
    assert (
        sum(vars(split).values()) == pytest.approx(restored.seconds)
        and min(vars(split).values()) >= 0
    )
    reader = CommitReader(job, key)
    assert restored.bytes_read == reader.manifest.size
    weight = torch.empty_like(model.weight)
    reader.read_into({"model.weight": weight})
    assert torch.equal(weight, model.weight)


def test_tensors_that_are_read_by_way_of_the_host_are_read_in_groups(tmp_path: Path) -> None:
    """The memory of a tensor of another layout, or on a GPU, is no destination for stored bytes."""
    job = Store.open(str(tmp_path / "jobs" / "job"))
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as checkpointer:
        checkpointer.save(1, model, None, {})
        key = checkpointer.wait().key
    size = 100 * 100 * 4
    progress = list[int]()
    targets = {f"model.{name}": torch.zeros(100, 100).t() for name in model.state_dict()}
    reader = CommitReader(job, key, group_bytes=3 * size, progress=lambda: progress.append(0))
    with Temporary() as temporary:
        reader.read_into(targets)
    assert all(
        torch.equal(targets[f"model.{name}"], value) for name, value in model.state_dict().items()
    )
    assert len(progress) == 3 and temporary.most <= 3 * size


# Chunks and their destinations


def planned(
    wanted: list[tuple[int, int, int]], *sizes: int
) -> list[tuple[int, int, int, int, list[tuple[int, int]]]]:
    """Plan ranges (object, start, length) of objects in chunks of 64 bytes.

    Returns (object, number, start, length, [(offset in the chunk, length) of each part]) for each
    chunk.
    """
    objects = [
        DataObject(key=f"object {size}", size=size, crc64nvme="", chunk_bytes=64, chunks=())
        for size in sizes
    ]
    ranges = [
        WantedRange(place, start, memoryview(bytearray(length))) for place, start, length in wanted
    ]
    return [
        (
            chunk.object,
            chunk.number,
            chunk.start,
            chunk.length,
            [(part.at, len(part.view)) for part in chunk.parts],
        )
        for chunk in plan_chunks(ranges, objects)
    ]


@pytest.mark.parametrize(
    ("wanted", "chunks"),
    [
        ([], []),
        ([(0, 0, 0)], []),
        ([(0, 70, 0)], []),
        ([(0, 150, 0)], []),
        ([(0, 0, 1)], [(0, 0, 0, 64, [(0, 1)])]),
        ([(0, 63, 1)], [(0, 0, 0, 64, [(63, 1)])]),
        ([(0, 64, 1)], [(0, 1, 64, 64, [(0, 1)])]),
        ([(0, 0, 64)], [(0, 0, 0, 64, [(0, 64)])]),
        ([(0, 60, 5)], [(0, 0, 0, 64, [(60, 4)]), (0, 1, 64, 64, [(0, 1)])]),
        ([(0, 149, 1)], [(0, 2, 128, 22, [(21, 1)])]),
        (
            [(0, 10, 140)],
            [(0, 0, 0, 64, [(10, 54)]), (0, 1, 64, 64, [(0, 64)]), (0, 2, 128, 22, [(0, 22)])],
        ),
        (
            [(1, 5, 2), (0, 130, 3), (0, 9, 1), (0, 3, 4)],
            [(0, 0, 0, 64, [(3, 4), (9, 1)]), (0, 2, 128, 22, [(2, 3)]), (1, 0, 0, 20, [(5, 2)])],
        ),
    ],
)
def test_each_chunk_is_planned_once_with_the_parts_that_are_wanted_of_it(
    wanted: list[tuple[int, int, int]],
    chunks: list[tuple[int, int, int, int, list[tuple[int, int]]]],
) -> None:
    assert planned(wanted, 150, 20) == chunks


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (150, 1), (149, 2)])
def test_a_range_outside_its_object_is_damage(start: int, length: int) -> None:
    words = f"object 150: bytes {start} to {start + length} are beyond its 150"
    with pytest.raises(CorruptCommit, match=words):
        planned([(0, start, length)], 150)


@pytest.mark.parametrize(
    ("ranges", "is_disjoint"),
    [
        ([(0, 10), (10, 10)], True),
        ([(0, 11), (10, 10)], False),
        ([(0, 10), (20, 10), (29, 5)], False),
        ([(0, 10), (20, 10), (30, 5)], True),
        ([(0, 1), (0, 1)], False),
        ([(at, 1) for at in range(512)], True),
        # Above this, one copy is cheaper than many buffers
        ([(at, 1) for at in range(513)], False),
    ],
)
def test_one_scattered_read_fills_up_to_512_parts_that_do_not_overlap(
    ranges: list[tuple[int, int]], is_disjoint: bool
) -> None:
    data = DataObject(key="object", size=1024, crc64nvme="", chunk_bytes=1024, chunks=())
    wanted = [WantedRange(0, start, memoryview(bytearray(length))) for start, length in ranges]
    (chunk,) = plan_chunks(wanted, [data])
    assert chunk.disjoint is is_disjoint


@pytest.mark.parametrize(
    ("ranges", "lengths"),
    [
        ([(0, 64)], [64]),
        ([(0, 10), (10, 54)], [10, 54]),
        ([(1, 63)], [1, 63]),
        ([(0, 63)], [63, 1]),
        ([(5, 10), (20, 4)], [5, 10, 5, 4, 40]),
    ],
)
def test_the_buffers_of_a_chunk_cover_it_without_empty_ones(
    ranges: list[tuple[int, int]], lengths: list[int]
) -> None:
    data = DataObject(key="object", size=64, crc64nvme="", chunk_bytes=64, chunks=())
    targets = {start: memoryview(bytearray(length)) for start, length in ranges}
    (chunk,) = plan_chunks(
        [WantedRange(0, start, target) for start, target in targets.items()], [data]
    )
    gap = memoryview(bytearray(64))
    buffers = chunk.buffers(gap)
    assert [len(buffer) for buffer in buffers] == lengths
    raw = bytes(range(64))
    at = 0
    for buffer in buffers:
        buffer[:] = raw[at : at + len(buffer)]
        at += len(buffer)
    assert all(
        bytes(target) == raw[start : start + len(target)] for start, target in targets.items()
    )


# Reading


def put_object(
    store: Store, key: str, raw: bytes, *, chunk_bytes: int = CHUNK, signed: bool = False
) -> DataObject:
    store.put(key, raw)
    chunks = [raw[start : start + chunk_bytes] for start in range(0, len(raw), chunk_bytes)]
    return DataObject(
        key=key,
        size=len(raw),
        crc64nvme="",
        chunk_bytes=chunk_bytes,
        chunks=tuple(crc_text(chunk) for chunk in chunks),
        sha256=tuple(sha256_text(chunk) for chunk in chunks) if signed else (),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path))


def seen(store: Store, *, remote: bool) -> Store:
    if remote:
        return Remote(store)
    return store


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_a_read_fills_several_objects_and_counts_the_bytes_of_whole_chunks(
    folder: Store, remote: bool, signed: bool
) -> None:
    raws = [random.Random(seed).randbytes(size) for seed, size in ((1, 150), (2, 20))]
    objects = [
        put_object(folder, f"object {number}", raw, signed=signed)
        for number, raw in enumerate(raws)
    ]
    reader = VerifiedReader(seen(folder, remote=remote), objects)
    targets = [bytearray(90), bytearray(5)]
    reader.read(
        [WantedRange(0, 60, memoryview(targets[0])), WantedRange(1, 5, memoryview(targets[1]))]
    )
    assert [bytes(target) for target in targets] == [raws[0][60:150], raws[1][5:10]]
    assert reader.figures.bytes == 150 + 20
    assert list(reader.problems()) == []
    assert reader.figures.bytes == 2 * (150 + 20)


def test_overlapping_ranges_of_chunks_of_any_length_are_copied_out_of_scratch_memory(
    folder: Store,
) -> None:
    raws = [random.Random(size).randbytes(size) for size in (10, 64, 30)]
    objects = [put_object(folder, f"object {len(raw)}", raw) for raw in raws]
    targets = [[bytearray(len(raw)), bytearray(len(raw))] for raw in raws]
    wanted = []
    for number, pair in enumerate(targets):
        wanted += [WantedRange(number, 0, memoryview(target)) for target in pair]
    VerifiedReader(folder, objects, parallel=1).read(wanted)
    bytes_read = []
    for pair in targets:
        bytes_read.append([bytes(target) for target in pair])
    assert bytes_read == [[raw, raw] for raw in raws]


def test_a_reader_of_nothing_reads_nothing(folder: Store) -> None:
    reader = VerifiedReader(folder, [])
    reader.read([])
    assert list(reader.problems()) == []


@pytest.mark.parametrize(
    ("remote", "given", "expected"), [(False, None, 2), (True, None, 8), (True, 3, 3)]
)
def test_chunks_are_read_by_so_many_threads(
    folder: Store, monkeypatch: pytest.MonkeyPatch, remote: bool, given: int | None, expected: int
) -> None:
    data = put_object(folder, "object", bytes(CHUNK * 12))
    meeting = threading.Condition()
    names: list[str] = []
    most: list[int] = []

    def meet() -> None:
        """Wait until as many reads as expected have begun, then a little for one more, which must
        not come.
        """
        with meeting:
            names.append(threading.current_thread().name)
            meeting.notify_all()
            assert meeting.wait_for(lambda: len(names) >= expected, timeout=20)
            meeting.wait_for(lambda: len(names) > expected, timeout=0.1)
            most.append(len(names))

    store = seen(folder, remote=remote)
    if isinstance(store, Remote):
        get_range = store.get_range

        def get_range_together(key: str, start: int, length: int) -> bytes:
            meet()
            return get_range(key, start, length)

        monkeypatch.setattr(store, "get_range", get_range_together)
    else:
        preadv = os.preadv

        def preadv_together(*arguments: Any) -> int:
            meet()
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", preadv_together)
    VerifiedReader(store, [data], parallel=given).read(
        [WantedRange(0, 0, memoryview(bytearray(data.size)))]
    )
    assert most[0] == expected
    assert remote is False or all(name.startswith("read") for name in names)


def test_the_first_error_stops_the_reading_of_the_other_chunks(folder: Store) -> None:
    data = put_object(folder, "object", bytes(CHUNK * 1000))
    store = SlowRemote(folder)
    reader = VerifiedReader(store, [data], parallel=2)
    with pytest.raises(StoreForbidden, match="403"):
        reader.read([WantedRange(0, 0, memoryview(bytearray(data.size)))])
    assert len(store.asked) < 500


def test_a_verification_whose_result_is_no_longer_awaited_stops(folder: Store) -> None:
    data = put_object(folder, "object", bytes(CHUNK * 1000))
    store = SlowRemote(folder)
    damaged = replace(data, chunks=("?" * 16, *data.chunks[1:]))
    problems = VerifiedReader(store, [damaged], parallel=1).problems()
    assert "chunk 0 has CRC64NVME" in str(next(problems))
    problems.close()
    assert len(store.asked) < 500


@pytest.mark.parametrize("remote", [False, True])
def test_all_damaged_chunks_are_named_and_each_chunk_is_read(folder: Store, remote: bool) -> None:
    objects = [
        put_object(folder, f"object {number}", random.Random(number).randbytes(150))
        for number in range(3)
    ]
    for number, at in ((0, 70), (2, 149)):
        raw = bytearray(folder.get(f"object {number}"))
        raw[at] ^= 1
        folder.put(f"object {number}", raw)
    store = seen(folder, remote=remote)
    found = list(VerifiedReader(store, objects).problems())
    assert [(error.object_key, error.chunk) for error in found] == [
        ("object 0", 1),
        ("object 2", 2),
    ]
    assert re.fullmatch(
        r"object 0: chunk 1 has CRC64NVME \w{16}, saved was \w{16} \(fetched twice\)", str(found[0])
    )
    if isinstance(store, Remote):
        once = [(start, min(64, 150 - start)) for start in (0, 64, 128)]
        assert sorted(store.asked) == sorted([*once * 3, (64, 64), (128, 22)]), (
            "damaged ones are read twice"
        )


def test_a_verification_ends_with_the_error_of_a_store_that_cannot_be_read(folder: Store) -> None:
    data = put_object(folder, "object", bytes(CHUNK * 3))
    with pytest.raises(StoreForbidden, match="403"):
        list(VerifiedReader(SlowRemote(folder), [data]).problems())


@pytest.mark.parametrize("number", [0, 1])
def test_the_sha256_of_a_chunk_is_compared_as_well_as_its_crc(folder: Store, number: int) -> None:
    data = put_object(folder, "object", random.Random(3).randbytes(100), signed=True)
    for field in ("chunks", "sha256"):
        sums = list(getattr(data, field))
        sums[number] = "0" * len(sums[number])
        changed = replace(data, **{field: tuple(sums)})
        for store in (folder, Remote(folder)):
            with pytest.raises(CorruptCommit, match=f"chunk {number} has CRC64NVME and SHA-256"):
                VerifiedReader(store, [changed]).check("object", number)
            VerifiedReader(store, [changed]).check("object", 1 - number)


# One chunk alone


@pytest.mark.parametrize("number", [None, 0, 1])
def test_a_sound_chunk_or_object_passes_the_check(folder: Store, number: int | None) -> None:
    data = put_object(folder, "object", bytes(100))
    other = put_object(folder, "other", bytes(10))
    VerifiedReader(folder, [other, data]).check("object", number)
    remote = Remote(folder)
    VerifiedReader(remote, [other, data]).check("object", number)
    assert remote.asked == {None: [], 0: [(0, 64)], 1: [(64, 36)]}[number]


@pytest.mark.parametrize(
    ("key", "number", "problem", "chunk"),
    [
        ("elsewhere", 0, "elsewhere: is not part of this commit", None),
        ("missing", None, "missing: there is no such object", None),
        ("missing", 0, "missing: there is no such object", None),
        ("longer", 0, "longer: has 101 bytes, 100 were saved", None),
        ("shorter", 0, "shorter: has 99 bytes, 100 were saved", None),
        ("object", -1, "object: has no chunk -1", -1),
        ("object", 2, "object: has no chunk 2", 2),
    ],
)
def test_a_check_names_what_is_wrong_with_an_object(
    folder: Store, key: str, number: int | None, problem: str, chunk: int | None
) -> None:
    names = ("missing", "longer", "shorter", "object")
    objects = [put_object(folder, name, bytes(100)) for name in names]
    folder.delete("missing")
    folder.put("longer", bytes(101))
    folder.put("shorter", bytes(99))
    with pytest.raises(CorruptCommit) as error:
        VerifiedReader(folder, objects).check(key, number)
    assert str(error.value) == problem
    assert (error.value.object_key, error.value.chunk) == (key, chunk)


def test_a_chunk_is_checked_on_the_disk_and_not_in_the_page_cache(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = put_object(folder, "object", bytes(100))
    dropped: list[tuple[int, int, int]] = []
    opened: list[int] = []

    def record(descriptor: int, start: int, length: int, advice: int) -> None:
        opened.append(descriptor)
        dropped.append((start, length, advice))
        assert closed == []
        raise OSError("not supported here")

    monkeypatch.setattr(os, "posix_fadvise", record)
    close = os.close
    closed: list[int] = []

    def close_and_record(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "close", close_and_record)
    reader = VerifiedReader(folder, [data])
    for number in (0, 1):
        reader.check("object", number)
        assert closed[0] == opened[-1], "the file is closed before the chunk is read"
        closed.clear()
    assert dropped == [(0, 64, os.POSIX_FADV_DONTNEED), (64, 36, os.POSIX_FADV_DONTNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    reader.check("object", 0)


@pytest.mark.parametrize("kind", [*RETRIED, *FINAL])
def test_each_kind_of_error_is_retried_or_is_final(folder: Store, kind: type[Exception]) -> None:
    """After a timeout the abandoned read may still write into the destination, so only another
    process may retry.
    """
    data = put_object(folder, "object", bytes(10))
    store = Troubled(folder, kind("trouble"), times=1)
    wanted = [WantedRange(0, 0, memoryview(bytearray(10)))]
    if kind in RETRIED:
        VerifiedReader(store, [data]).read(wanted)
    else:
        with pytest.raises(kind, match="trouble"):
            VerifiedReader(store, [data]).read(wanted)
    assert len(store.asked) == (2 if kind in RETRIED else 1)


def test_a_local_read_that_hangs_ends_at_the_limit_of_a_request_and_is_not_retried(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = put_object(folder, "object", bytes(10))
    over = threading.Event()
    reads = list[int]()

    def hang(*_: Any) -> int:
        reads.append(1)
        over.wait(60)
        return 0

    monkeypatch.setattr(os, "preadv", hang)
    impatient = Store.open(folder.uri, request_timeout_seconds=0.2)
    with pytest.raises(
        StoreTimeout, match=r"get \S+/object: no answer from the file system within 0\.2 s"
    ):
        VerifiedReader(impatient, [data]).read([WantedRange(0, 0, memoryview(bytearray(10)))])
    over.set()
    assert len(reads) == 1


@pytest.mark.parametrize(
    "error", [StoreUnavailable("503"), StoreForbidden("403"), StoreError("truncated")]
)
@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (None, "object: there is no such object"),
        (bytes(9), "object: has 9 bytes, 10 were saved: truncated"),
        (bytes(11), "object: has 11 bytes, 10 were saved: truncated"),
    ],
)
def test_an_error_about_a_missing_or_truncated_object_is_damage(
    folder: Store, error: Exception, stored: bytes | None, problem: str
) -> None:
    data = put_object(folder, "object", bytes(10))
    folder.delete("object")
    if stored is not None:
        folder.put("object", stored)
    store = Remote(folder)

    def fail(key: str, start: int, length: int) -> bytes:
        store.asked.append((start, length))
        raise error

    store.get_range = fail
    with pytest.raises(CorruptCommit) as damage:
        VerifiedReader(store, [data]).read([WantedRange(0, 0, memoryview(bytearray(10)))])
    assert (str(damage.value), damage.value.object_key) == (problem, "object")
    assert len(store.asked) == 1


def test_an_error_of_the_program_about_a_missing_object_is_not_called_damage(folder: Store) -> None:
    data = put_object(folder, "object", bytes(10))
    store = Troubled(folder, ValueError("odd"), times=9)
    store.head = lambda key: None
    with pytest.raises(ValueError, match="odd"):
        VerifiedReader(store, [data]).read([WantedRange(0, 0, memoryview(bytearray(10)))])


def test_an_error_of_a_store_that_also_hides_its_objects_is_not_called_damage(
    folder: Store,
) -> None:
    data = put_object(folder, "object", bytes(10))
    store = Troubled(folder, StoreForbidden("403"), times=9)

    def fail(key: str) -> None:
        raise StoreForbidden("403 too")

    store.head = fail
    with pytest.raises(StoreForbidden, match=r"^403$"):
        VerifiedReader(store, [data]).read([WantedRange(0, 0, memoryview(bytearray(10)))])


@pytest.mark.parametrize(
    ("seconds_per_try", "tries"), [(20.0, 4), (50.0, 3), (59.8, 3), (60.2, 2), (121.0, 1)]
)
def test_the_tries_of_a_chunk_end_after_four_or_after_120_seconds(
    folder: Store, monkeypatch: pytest.MonkeyPatch, seconds_per_try: float, tries: int
) -> None:
    data = put_object(folder, "object", bytes(10))
    clock = [5000.0]
    pauses = list[tuple[float, float]]()
    store = Remote(folder)

    def fail(key: str, start: int, length: int) -> bytes:
        store.asked.append((start, length))
        clock[0] += seconds_per_try
        raise StoreUnavailable("503")

    def draw(generator: random.Random, low: float, high: float) -> float:
        pauses.append((low, high))
        return 0.1

    store.get_range = fail
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(random.Random, "uniform", draw)
    with pytest.raises(StoreUnavailable, match="503"):
        VerifiedReader(store, [data]).read([WantedRange(0, 0, memoryview(bytearray(10)))])
    assert len(store.asked) == tries
    assert pauses[0] == (0.025, 0.05)


# Figures


def ticks(monkeypatch: pytest.MonkeyPatch, *moments: float) -> None:
    """Let the clock that measures durations show these moments, one at each look."""
    left = iter(moments)
    monkeypatch.setattr(time, "perf_counter", lambda: next(left))


def test_the_figures_of_a_remote_read_split_its_time(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = put_object(folder, "object", bytes(10))
    reader = VerifiedReader(Remote(folder), [data])
    ticks(monkeypatch, 100.0, 101.0, 103.0, 107.0, 200.0, 208.0, 224.0, 256.0)
    for _ in range(2):
        reader.read([WantedRange(0, 0, memoryview(bytearray(10)))])
    figures = reader.figures
    assert (figures.download_seconds, figures.verify_seconds, figures.place_seconds) == (
        1 + 8,
        2 + 16,
        4 + 32,
    )
    assert figures.bytes == 20
    assert "lock" not in repr(figures)


@pytest.mark.parametrize(
    ("size", "moments", "seconds"),
    [
        (2**19, [100, 101, 103, 107], (1, 2, 4)),
        (2**19 + 1, [100, 101, 103, 107, 115, 131], (1 + 4, 2 + 8, 16)),  # in two blocks
    ],
)
def test_the_figures_of_a_local_read_split_its_time_by_blocks_of_512_kib(
    folder: Store,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    moments: list[float],
    seconds: tuple[float, float, float],
) -> None:
    data = put_object(folder, "object", bytes(size), chunk_bytes=2**20)
    reader = VerifiedReader(folder, [data])
    ticks(monkeypatch, *moments)
    reader.read([WantedRange(0, 0, memoryview(bytearray(size)))])
    figures = reader.figures
    assert (figures.download_seconds, figures.verify_seconds, figures.place_seconds) == seconds
    assert figures.bytes == size


def test_new_figures_are_zero() -> None:
    figures = ReadFigures()
    assert (
        figures.bytes,
        figures.download_seconds,
        figures.verify_seconds,
        figures.place_seconds,
    ) == (0, 0, 0, 0)
    figures.add(1, 2.0, 4.0, 8.0)
    figures.add(16, 32.0, 64.0, 128.0)
    assert (
        figures.bytes,
        figures.download_seconds,
        figures.verify_seconds,
        figures.place_seconds,
    ) == (17, 34, 68, 136)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ((), []),
        (("data/x",), ["data/x"]),
        (("data/x", 0), ["data/x", "0"]),
        (("data/x", 3), ["data/x", "3"]),
    ],
)
def test_another_process_is_given_the_part_to_read(
    monkeypatch: pytest.MonkeyPatch, part: tuple[Any, ...], words: list[str]
) -> None:
    monkeypatch.setenv("EBBFLOW_TEST", "inherited")
    answer = Answer('{"problem": "it is torn"}')
    monkeypatch.setattr(subprocess, "run", answer)
    assert find_problem_in_new_process("/store", "commits/x", *part) == "it is torn"
    program = [sys.executable, "-m", "ebbflow.training.checkpoint.reader"]
    assert answer.command == [*program, str(os.getpid()), "/store", "commits/x", *words]
    environment = answer.options.pop("env")
    assert environment == {**os.environ, "PYTHONPATH": environment["PYTHONPATH"]}
    assert str(Path(ebbflow.__file__).parents[1]) in environment["PYTHONPATH"].split(os.pathsep)
    assert answer.options == {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 120.0}


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("", "no second process could read it again: JSONDecodeError"),
        (
            OSError(12, "Cannot allocate memory"),
            r"no second process could read it again: OSError\(12",
        ),
        (
            subprocess.TimeoutExpired("python", 120.0),
            "no second process could read it again: TimeoutExpired",
        ),
        (
            '{"error": "the store is away"}',
            "a second process could not read it again: the store is away",
        ),
    ],
)
def test_a_process_without_a_result_leaves_the_question_open(
    monkeypatch: pytest.MonkeyPatch, printed: str | Exception, words: str
) -> None:
    monkeypatch.setattr(subprocess, "run", Answer(printed))
    with pytest.raises(StoreUnavailable, match=f"^/store/commits/x: {words}"):
        find_problem_in_new_process("/store", "commits/x")


def test_the_message_about_a_process_without_a_result_is_cut_at_500_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "run", Answer(OSError("x" * 1000)))
    with pytest.raises(StoreUnavailable) as error:
        find_problem_in_new_process("/store", "commits/x")
    assert len(str(error.value)) == 500


def commit_of(store: Store, *raws: bytes, **changes: Any) -> tuple[CommitRef, Manifest]:
    """A commit of step 7: one object in chunks of 64 bytes for each rank, and a tensor of all bytes
    of rank 0.
    """
    save = CheckpointId(job="job", generation="000001-aaaa", step=7, world_size=len(raws))
    objects = [
        put_object(store, data_key(save.generation, 7, rank), raw) for rank, raw in enumerate(raws)
    ]
    piece = TensorPiece(rank=0, offsets=(0,), sizes=(len(raws[0]),), start=0, length=len(raws[0]))
    tensor = TensorEntry(dtype="uint8", shape=piece.sizes, pieces=(piece,))
    indexes = []
    for rank, data in enumerate(objects):
        index = RankIndex(
            save=save, rank=rank, data=data, items=(), common={} if rank == 0 else None
        ).to_bytes()
        store.put(index_key(save.generation, 7, rank), index)
        indexes.append(sha256_text(index))
    manifest = Manifest(
        save=save, data=tuple(objects), indexes=tuple(indexes), tensors={"weight": tensor}
    )
    manifest = replace(manifest, **changes)
    return put_manifest(store, manifest), manifest


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], ""),
        (["{data}"], ""),
        (["{data}", "0"], ""),
        (["{data}", "1"], "chunk 1 has CRC64NVME"),
        (["elsewhere"], "elsewhere: is not part of this commit"),
    ],
)
def test_the_program_prints_the_problem_of_the_part_that_it_is_asked_about(
    folder: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", FakeLibrary)
    ref, manifest = commit_of(folder, bytes(100))
    key = manifest.data[0].key
    folder.put(key, bytes(99) + b"?")
    FakeLibrary.calls.clear()
    assert (
        read_again(
            [str(os.getppid()), folder.uri, ref.key, *(word.format(data=key) for word in words)]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["problem"]
    assert problem in answer["problem"]
    assert (answer["problem"] == "") == (problem == "")
    assert len(FakeLibrary.calls) == 1, "it ends with its parent"


@pytest.mark.parametrize("error", ["store", "version"])
def test_the_program_prints_an_error_if_it_cannot_answer(
    folder: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", FakeLibrary)
    ref, manifest = commit_of(folder, bytes(100))
    uri = "swift://bucket"
    words = "unknown kind"
    if error == "version":
        raw = manifest.to_bytes().replace(b'"version":1', b'"version":2')
        ref = replace(ref, key=commit_key(7, 1, sha256_text(raw)))
        folder.put(ref.key, raw)
        uri = folder.uri
        words = "this program reads version 1"
    assert read_again([str(os.getppid()), uri, ref.key]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["error"]
    assert words in answer["error"]


# Whole commits


def test_a_missing_commit_is_damage(folder: Store) -> None:
    key = commit_key(7, 1, "0" * 64)
    with pytest.raises(CorruptCommit, match=f"{key}: there is no such commit"):
        read_manifest(folder, key)
    assert find_problem(folder, key) == f"{key}: there is no such commit"


def test_a_problem_of_the_manifest_comes_before_one_of_its_objects(folder: Store) -> None:
    ref, manifest = commit_of(folder, bytes(100))
    assert find_problem(folder, ref.key) == ""
    assert find_problem(folder, ref.key, manifest.data[0].key, 1) == ""
    assert "is not part of this commit" in find_problem(folder, ref.key, "elsewhere")
    piece = replace(manifest.tensors["weight"].pieces[0], start=1)
    tensors = {"weight": replace(manifest.tensors["weight"], pieces=(piece,))}
    torn = put_manifest(folder, replace(manifest, tensors=tensors))
    assert (
        find_problem(folder, torn.key, "elsewhere")
        == f"{torn.key}: weight: bytes 1 to 101 of an object of 100"
    )


def test_a_sound_commit_has_no_problems(folder: Store) -> None:
    ref, _ = commit_of(folder, bytes(100), bytes(64), b"")
    assert verify_commit(folder, ref.key) == []


def test_each_object_of_a_commit_has_its_own_line_of_problems(folder: Store) -> None:
    ref, manifest = commit_of(folder, bytes(100), bytes(64), bytes(10), bytes(20))
    data = "data/000001-aaaa/000000000007"
    indexes = "index/000001-aaaa/000000000007"
    folder.put(f"{data}/00000.bin", bytes(99) + b"?")
    folder.delete(f"{data}/00001.bin")
    folder.put(f"{data}/00002.bin", bytes(11))
    folder.put(f"{data}/00003.bin", b"?" + bytes(19))
    folder.put(f"{data}/00004.bin", b"")
    folder.delete(f"{indexes}/00000.json")
    folder.put(f"{indexes}/00001.json", b"{}")
    folder.put(f"{indexes}/00002.json.old", b"{}")
    problems = verify_commit(folder, ref.key)
    assert [re.sub(r"\b[0-9a-f]{16}\b", "SUM", problem) for problem in problems] == [
        f"{indexes}/00000.json: there is no such object",
        f"{indexes}/00001.json: SHA-256 {sha256_text(b'{}')}, the manifest says "
        f"{manifest.indexes[1]}",
        f"{indexes}/00002.json.old: is no part of this commit",
        f"{data}/00001.bin: no such object, 64 bytes were saved",
        f"{data}/00002.bin: 11 bytes, 10 bytes were saved",
        f"{data}/00000.bin: chunk 1 has CRC64NVME SUM, saved was SUM (fetched twice)",
        f"{data}/00003.bin: chunk 0 has CRC64NVME SUM, saved was SUM (fetched twice)",
        f"{data}/00004.bin: is no part of this commit",
    ]


def test_a_commit_without_a_readable_manifest_has_this_one_problem(folder: Store) -> None:
    ref, manifest = commit_of(folder, bytes(100))
    folder.put(ref.key, b"{}")
    (problem,) = verify_commit(folder, ref.key)
    assert "the manifest's SHA-256 is" in problem
    piece = replace(manifest.tensors["weight"].pieces[0], length=99)
    tensors = {"weight": replace(manifest.tensors["weight"], pieces=(piece,))}
    torn = put_manifest(folder, replace(manifest, tensors=tensors))
    assert verify_commit(folder, torn.key) == [
        f"{torn.key}: weight: a piece of [100] uint8 cannot have 99 bytes"
    ]


def test_a_commit_that_names_the_object_of_another_rank_is_no_sound_one(folder: Store) -> None:
    _, manifest = commit_of(folder, bytes(64), bytes(64))
    swapped = put_manifest(folder, replace(manifest, data=manifest.data[::-1]))
    assert verify_commit(folder, swapped.key) == [
        f"{manifest.data[1].key}: is not the place of rank 0 of this commit",
        f"{manifest.data[0].key}: is not the place of rank 1 of this commit",
    ]


def put_index(store: Store, generation: str, step: int, rank: int, *, world_size: int = 2) -> None:
    save = CheckpointId(job="job", generation=generation, step=step, world_size=world_size)
    data = DataObject(key="data", size=0, crc64nvme="", chunk_bytes=64, chunks=())
    store.put(
        index_key(generation, step, rank),
        RankIndex(save=save, rank=rank, data=data, items=()).to_bytes(),
    )


def test_finished_saves_without_a_commit_are_found_and_no_others(folder: Store) -> None:
    name = "000001-aaaa"
    for rank in (0, 1):
        put_index(folder, name, 3, rank)
        put_index(folder, name, 6, rank)
        put_index(folder, "000002-aaaa", 7, rank)
    put_index(folder, name, 5, 0, world_size=1)
    put_index(folder, name, 1, 0)  # the index of rank 1 is missing
    put_index(folder, name, 2, 1)  # the index of rank 0 is missing
    folder.put(index_key(name, 4, 0), b"")  # unreadable
    folder.put(index_key(name, 4, 1), b"")
    for stray in (
        "index/000000-a/notes/00000.json",
        "index/notes/000000000001/00000.json",
        "index/0",
        "index/1/2/3/4",
    ):
        folder.put(stray, b"")
    folder.put("commits/notes.txt", b"")
    commit_of(folder, bytes(1), bytes(1))  # of step 7 of generation 1
    assert list(find_uncommitted(folder)) == [
        (3, index_prefix(name, 3)),
        (5, index_prefix(name, 5)),
        (6, index_prefix(name, 6)),
        (7, index_prefix("000002-aaaa", 7)),
    ]

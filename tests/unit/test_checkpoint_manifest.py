"""Index and manifest: their exact bytes, and every way in which a stored one can contradict itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ebbflow.core.layout import commit_key, data_key
from ebbflow.training.checkpoint.manifest import (
    CheckpointId,
    DataObject,
    IndexEntry,
    Manifest,
    RankIndex,
    TensorEntry,
    TensorPiece,
    dtype_bytes,
    merge_indexes,
)
from ebbflow.training.checkpoint.save_plan import TensorShard, lay_out
from ebbflow.training.checkpoint.verified_io import canonical_json, seal, sha256_text
from ebbflow.training.errors import CheckpointError, CorruptCommit, MisplacedCommit

SAVE = CheckpointId(job="job", generation="000012-ab", step=7, world_size=2)
COMMON = {"extra": {"cursor": 3}, "optimizer": None, "parent": None}
# Rows 0 and 1 of "weight" are rank 0's, row 2 is rank 1's. "bias" is rank 0's alone.
WEIGHT_TOP = IndexEntry(
    name="weight", dtype="float32", shape=(3, 2), offsets=(0, 0), sizes=(2, 2), start=64, length=16
)
WEIGHT_END = IndexEntry(
    name="weight", dtype="float32", shape=(3, 2), offsets=(2, 0), sizes=(1, 2), start=0, length=8
)
BIAS = IndexEntry(name="bias", dtype="bfloat16", shape=(), offsets=(), sizes=(), start=0, length=2)

# Exactly the object of rank 0
WHOLE_PIECE = TensorPiece(rank=0, offsets=(0,), sizes=(20,), start=0, length=80)


def data_of(rank: int, size: int, **changes: Any) -> DataObject:
    key = data_key(SAVE.generation, SAVE.step, rank)
    chunks = tuple(f"{number:016x}" for number in range(-(-size // 32)))
    return replace(
        DataObject(key=key, size=size, crc64nvme="c" * 16, chunk_bytes=32, chunks=chunks), **changes
    )


FIRST = RankIndex(save=SAVE, rank=0, data=data_of(0, 80), items=(BIAS, WEIGHT_TOP), common=COMMON)
SECOND = RankIndex(save=SAVE, rank=1, data=data_of(1, 8), items=(WEIGHT_END,))


def manifest_of(*indexes: RankIndex) -> Manifest:
    return merge_indexes(SAVE, [(index, index.to_bytes()) for index in indexes or (FIRST, SECOND)])


def key_of(raw: bytes, *, step: int = 7, generation: int = 12) -> str:
    return commit_key(step, generation, sha256_text(raw))


def parse(document: object) -> Manifest:
    """Parse a manifest that is stored under its own hash."""
    raw = json.dumps(document).encode()
    return Manifest.from_bytes(raw, key_of(raw))


def as_json(manifest: Manifest) -> dict[str, Any]:
    return json.loads(manifest.to_bytes())


def test_an_index_has_exactly_these_bytes_and_comes_back_equal() -> None:
    document = {
        "version": 1,
        "job": "job",
        "generation": "000012-ab",
        "step": 7,
        "world_size": 2,
        "rank": 0,
        "data": {
            "key": "data/000012-ab/000000000007/00000.bin",
            "size": 80,
            "crc64nvme": "c" * 16,
            "chunk_bytes": 32,
            "chunks": ["0" * 16, "0" * 15 + "1", "0" * 15 + "2"],
        },
        "items": [
            ["bias", "bfloat16", [], [], [], 0, 2],
            ["weight", "float32", [3, 2], [0, 0], [2, 2], 64, 16],
        ],
        "common": COMMON,
    }
    assert FIRST.to_bytes() == seal(document)
    assert SECOND.to_bytes() == seal(
        {
            **document,
            "rank": 1,
            "data": {**document["data"], "key": SECOND.data.key, "size": 8, "chunks": ["0" * 16]},
            "items": [["weight", "float32", [3, 2], [2, 0], [1, 2], 0, 8]],
            "common": None,
        }
    )
    signed_data = {**document["data"], "sha256": ["1", "2", "3"]}
    signed = replace(FIRST, data=replace(FIRST.data, sha256=("1", "2", "3")), hmac="feed")
    assert signed.to_bytes() == seal({**document, "data": signed_data, "hmac": "feed"})
    for index in (FIRST, SECOND, signed):
        assert RankIndex.from_bytes(index.to_bytes(), "index") == index


def test_a_manifest_has_exactly_these_bytes_and_comes_back_equal() -> None:
    manifest = manifest_of()
    expected = {
        "version": 1,
        "job": "job",
        "generation": "000012-ab",
        "step": 7,
        "world_size": 2,
        "data": [FIRST.data.to_json(), SECOND.data.to_json()],
        "indexes": [sha256_text(FIRST.to_bytes()), sha256_text(SECOND.to_bytes())],
        "tensors": {
            "bias": ["bfloat16", [], [[0, [], [], 0, 2]]],
            "weight": ["float32", [3, 2], [[0, [0, 0], [2, 2], 64, 16], [1, [2, 0], [1, 2], 0, 8]]],
        },
        "common": COMMON,
    }
    raw = manifest.to_bytes()
    assert raw == canonical_json(expected)
    assert Manifest.from_bytes(raw, key_of(raw)) == manifest
    assert manifest.size == 80 + 8
    assert manifest.save.generation_number == 12
    assert list(manifest.problems()) == []


def test_a_manifest_without_common_data_has_an_empty_dictionary() -> None:
    assert manifest_of(replace(FIRST, common=None), SECOND).common == {}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float64", 8),
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("int8", 1),
        ("bool", 1),
    ],
)
def test_the_bytes_of_a_dtype_are_in_its_name(dtype: str, size: int) -> None:
    assert dtype_bytes(dtype) == size


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("rank"),  # KeyError
        lambda document: document.update(items=5),  # TypeError
        lambda document: document["items"][0].pop(),  # ValueError
        lambda document: document.update(data=[]),  # AttributeError
    ],
)
def test_an_index_of_another_form_is_corrupt(change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(FIRST.to_bytes())
    del document["seal"]
    change(document)
    with pytest.raises(CorruptCommit, match="the index: not an index of version 1: "):
        RankIndex.from_bytes(seal(document), "the index")


@pytest.mark.parametrize("version", [0, "2", None, True])
def test_a_record_without_a_version_that_a_program_wrote_is_corrupt(version: object) -> None:
    words = f"not a record of any version: {version!r}"
    index = json.loads(FIRST.to_bytes())
    del index["seal"]
    with pytest.raises(CorruptCommit, match=words):
        RankIndex.from_bytes(seal({**index, "version": version}), "index")
    with pytest.raises(CorruptCommit, match=words):
        parse({**as_json(manifest_of()), "version": version})


def test_a_newer_version_is_an_error_and_no_damage() -> None:
    version = 2
    words = f"version {version}; this program reads version 1"
    index = json.loads(FIRST.to_bytes())
    del index["seal"]
    with pytest.raises(CheckpointError, match=words) as of_index:
        RankIndex.from_bytes(seal({**index, "version": version}), "index")
    with pytest.raises(CheckpointError, match=words) as of_manifest:
        parse({**as_json(manifest_of()), "version": version})
    assert not isinstance(of_index.value, CorruptCommit)
    assert not isinstance(of_manifest.value, CorruptCommit)


def test_a_manifest_with_another_hash_than_in_its_key_is_corrupt() -> None:
    raw = manifest_of().to_bytes()
    with pytest.raises(CorruptCommit, match=f"the manifest's SHA-256 is {sha256_text(raw)}"):
        Manifest.from_bytes(raw, commit_key(7, 12, "0" * 64))


@pytest.mark.parametrize("place", [{"step": 8}, {"generation": 13}])
def test_a_manifest_under_the_key_of_another_step_or_generation_is_misplaced(
    place: dict[str, int],
) -> None:
    raw = manifest_of().to_bytes()
    with pytest.raises(MisplacedCommit, match="its manifest is of step 7 of generation 000012-ab"):
        Manifest.from_bytes(raw, key_of(raw, **place))


def _make_division_overflow(document: dict[str, Any]) -> None:
    document["data"][0].update(size=10**400, chunk_bytes=1.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("common"),  # KeyError
        lambda document: document.update(data=5),  # TypeError
        lambda document: document["tensors"]["weight"][2][0].pop(),  # ValueError
        lambda document: document["tensors"]["weight"][2][0].append(0),  # ValueError
        lambda document: document.update(tensors=[]),  # AttributeError
        _make_division_overflow,  # ArithmeticError
    ],
)
def test_a_manifest_of_another_form_is_corrupt(change: Callable[[dict[str, Any]], object]) -> None:
    document = as_json(manifest_of())
    change(document)
    with pytest.raises(CorruptCommit, match="not a manifest of version 1: "):
        parse(document)


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_json_object_are_a_corrupt_manifest(raw: bytes) -> None:
    with pytest.raises(CorruptCommit, match="not a manifest of version 1: "):
        Manifest.from_bytes(raw, key_of(raw))


def test_the_message_of_a_corrupt_manifest_is_cut_at_500_characters() -> None:
    document = as_json(manifest_of())
    document["data"][0]["x" * 1000] = 1
    with pytest.raises(CorruptCommit) as error:
        parse(document)
    assert len(str(error.value)) == 500


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": (FIRST.data,)}, "1 data objects, 2 indexes, 2 ranks"),
        ({"indexes": ("a", "b", "c")}, "2 data objects, 3 indexes, 2 ranks"),
        ({"save": replace(SAVE, world_size=3)}, "2 data objects, 2 indexes, 3 ranks"),
    ],
)
def test_each_count_of_a_manifest_is_the_number_of_ranks(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CorruptCommit, match=problem):
        parse(as_json(replace(manifest_of(), **changes)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"size": 0, "chunks": ()}, None),
        ({"size": -1, "chunks": ()}, "-1 bytes in chunks of 32"),
        ({"size": 3, "chunk_bytes": 1, "chunks": ("1", "2", "3")}, None),
        ({"size": 0, "chunk_bytes": 0, "chunks": ()}, "0 bytes in chunks of 0"),
        ({"size": 0, "chunk_bytes": -1, "chunks": ()}, "0 bytes in chunks of -1"),
        ({"key": 5}, "5: 80 bytes in chunks of 32"),
        ({"size": 64, "chunks": ("1", "2")}, None),
        ({"size": 65, "chunks": ("1", "2")}, "2 sums for 65 bytes in chunks of 32"),
        ({"size": 64, "chunks": ("1", "2", "3")}, "3 sums for 64 bytes in chunks of 32"),
        ({"sha256": ("1", "2", "3")}, None),
        ({"sha256": ("1", "2")}, "2 SHA-256 for 3 chunks"),
        ({"sha256": ("1", "2", "3", "4")}, "4 SHA-256 for 3 chunks"),
    ],
)
def test_the_counts_of_a_data_object_agree_with_its_size(
    changes: dict[str, Any], problem: str | None
) -> None:
    manifest = manifest_of()
    changed = replace(manifest, data=(replace(FIRST.data, **changes), SECOND.data))
    if problem is None:
        assert parse(as_json(changed)) == changed
        return
    with pytest.raises(CorruptCommit, match=problem):
        parse(as_json(changed))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"rank": 1, "sizes": (2,), "length": 8}, None),
        ({"rank": -1}, "w: a piece is in the object of rank -1 of 2"),
        ({"rank": 2}, "w: a piece is in the object of rank 2 of 2"),
        ({"start": -1}, "w: bytes -1 to 79 of an object of 80"),
        ({"start": 4, "sizes": (19,), "length": 76}, None),
        ({"start": 4}, "w: bytes 4 to 84 of an object of 80"),
        ({"sizes": (21,), "length": 84}, "w: bytes 0 to 84 of an object of 80"),
        ({"sizes": (19,)}, r"w: a piece of \[19\] float32 cannot have 80 bytes"),
        ({"sizes": (2, 10)}, None),
        ({"length": 76}, r"w: a piece of \[20\] float32 cannot have 76 bytes"),
    ],
)
def test_a_piece_is_inside_its_object_and_has_the_bytes_of_its_shape(
    changes: dict[str, Any], problem: str | None
) -> None:
    entry = TensorEntry(dtype="float32", shape=(20,), pieces=(replace(WHOLE_PIECE, **changes),))
    found = list(replace(manifest_of(), tensors={"w": entry}).problems())
    if problem is None:
        assert found == []
    else:
        (description,) = found
        assert re.fullmatch(problem, description)


def test_pieces_in_a_data_object_start_at_multiples_of_64_bytes() -> None:
    tensors = {
        name: torch.zeros(size, dtype=torch.uint8)
        for name, size in (("a", 1), ("b", 64), ("c", 65), ("d", 1))
    }
    layout = lay_out(1, [TensorShard.of_whole(name, tensor) for name, tensor in tensors.items()])
    assert [entry.start for entry in layout.items] == [0, 64, 128, 256]


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (
            FIRST,
            replace(SECOND, save=replace(SAVE, step=6)),
            "the index of rank 1 is of rank 1 of .*step=6",
        ),
        (FIRST, replace(SECOND, rank=0), "the index of rank 1 is of rank 0 of "),
        (
            FIRST,
            replace(SECOND, data=FIRST.data),
            "the index of rank 1 names the data object 'data/000012-ab/000000000007/00000.bin', "
            "not .*/00001.bin",
        ),
        (
            FIRST,
            replace(SECOND, items=(replace(WEIGHT_END, dtype="float16"),)),
            r"weight is float16 \(3, 2\) on rank 1, else \('float32', \(3, 2\)\)",
        ),
        (
            FIRST,
            replace(SECOND, items=(replace(WEIGHT_END, shape=(2, 3)),)),
            r"weight is float32 \(2, 3\) on rank 1, else \('float32', \(3, 2\)\)",
        ),
        (
            FIRST,
            replace(SECOND, items=()),
            r"weight: its pieces hold 4 elements, its shape \[3, 2\] 6",
        ),
        (
            FIRST,
            replace(SECOND, items=(replace(WEIGHT_END, offsets=(1, 0), sizes=(2, 2)),)),
            r"weight: its pieces hold 8 elements, its shape \[3, 2\] 6",
        ),
    ],
)
def test_indexes_that_contradict_each_other_make_no_manifest(
    first: RankIndex, second: RankIndex, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        manifest_of(first, second)


def test_pieces_are_sorted_by_position_and_of_equal_ones_the_first_ranks_is_taken() -> None:
    top = replace(WEIGHT_TOP, start=0)
    end = replace(WEIGHT_END, start=16)
    first = replace(FIRST, items=(end, top))
    second = replace(SECOND, items=(replace(WEIGHT_TOP, start=32), replace(WEIGHT_END, start=48)))
    pieces = manifest_of(first, second).tensors["weight"].pieces
    assert [(piece.rank, piece.offsets, piece.start) for piece in pieces] == [
        (0, (0, 0), 0),
        (0, (2, 0), 16),
    ]

"""Overrides: the records that guards leave in the store, and what later starts conclude from them."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.layout import commit_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import open_generation
from ebbflow.training.checkpoint.lineage import NO_PARENT
from ebbflow.training.checkpoint.manifest import CheckpointId, Manifest
from ebbflow.training.checkpoint.verified_io import sha256_text
from ebbflow.training.engine.guards.overrides import (
    Overrides,
    read_overrides,
    record_rewind,
    record_split,
    rewind_parent,
)
from ebbflow.training.errors import CorruptOverride

NONE = Overrides(gradient_accumulation_steps=None, first_sample=0, rewinds=0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path))


def test_overrides_are_records_with_readable_keys(store: Store) -> None:
    record_split(store, generation=3, rank=1, accumulation=8)
    record_rewind(store, generation=12, rank=0, limit=6, first_sample=80, sound=True)
    record_rewind(store, generation=13, rank=0, limit=4, first_sample=0, sound=False)
    found = {meta.key: json.loads(store.get(meta.key)) for meta in store.list("overrides")}
    assert found == {
        "overrides/000003-1-split-8.json": {
            "action": "split",
            "generation": 3,
            "rank": 1,
            "accumulation": 8,
        },
        "overrides/000012-0-rewind-6-80-1.json": {
            "action": "rewind",
            "generation": 12,
            "rank": 0,
            "limit": 6,
            "first_sample": 80,
            "sound": 1,
        },
        "overrides/000013-0-rewind-4-0-0.json": {
            "action": "rewind",
            "generation": 13,
            "rank": 0,
            "limit": 4,
            "first_sample": 0,
            "sound": 0,
        },
    }
    text = store.get("overrides/000003-1-split-8.json")
    assert text == b'{"accumulation": 8, "action": "split", "generation": 3, "rank": 1}'


def test_overrides_pass_through_json_without_unknown_keys() -> None:
    assert Overrides() == NONE == Overrides.from_json({}) == Overrides.from_json({"unknown": 1})
    whole = Overrides(gradient_accumulation_steps=4, first_sample=80, rewinds=2)
    assert whole.to_json() == {"gradient_accumulation_steps": 4, "first_sample": 80, "rewinds": 2}
    assert Overrides.from_json(whole.to_json() | {"unknown": 1}) == whole
    assert Overrides.from_json({"rewinds": 1}) == Overrides(rewinds=1)


def test_overrides_are_given_by_name_and_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        Overrides(4)  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Overrides().rewinds = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("splits", "rewinds", "expected"),
    [
        ([], [], NONE),
        ([4, 8, 2], [], Overrides(gradient_accumulation_steps=8)),
        ([], [0], NONE),  # replicas with different weights skip no samples
        ([], [1], Overrides(first_sample=1, rewinds=1)),
        (
            [2],
            [80, 0, 120, 40],
            Overrides(gradient_accumulation_steps=2, first_sample=120, rewinds=3),
        ),
    ],
)
def test_every_record_counts_for_every_later_start(
    store: Store, splits: list[int], rewinds: list[int], expected: Overrides
) -> None:
    for generation, accumulation in enumerate(splits, start=1):
        record_split(store, generation=generation, rank=0, accumulation=accumulation)
    for generation, first_sample in enumerate(rewinds, start=1):
        record_rewind(
            store, generation=generation, rank=0, limit=1, first_sample=first_sample, sound=True
        )
    assert read_overrides(store) == expected


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b'{"action": "split"}', b'{"generation": 3}', b"\xff"]
)
def test_an_unreadable_override_is_an_error_that_names_it(store: Store, content: bytes) -> None:
    store.put("overrides/000003-1-split-8.json", content)
    for read in (read_overrides, rewind_parent):
        with pytest.raises(CorruptOverride) as caught:
            read(store)
        assert not caught.value.curable
        assert str(caught.value) == (
            f"{store.uri}/overrides/000003-1-split-8.json: is no record of what a guard ordered "
            f"({len(content)} bytes); fix: put it back as it was, or delete it, and what it "
            "ordered is not done"
        )


def put_commit(store: Store, step: int, *, torn: bool = False) -> str:
    """Put a commit of generation 1, and return its key."""
    save = CheckpointId(job="job", generation="000001-aa", step=step, world_size=0)
    content = Manifest(save=save, data=(), indexes=(), tensors={}).to_bytes()
    key = commit_key(step, 1, sha256_text(content))
    store.put(key, content[:-1] if torn else content)
    return key


@pytest.mark.parametrize(
    ("steps", "limit", "sound", "expected"),
    [
        ([], 6, True, None),
        ([], 6, False, None),
        ([4, 6, 8], 6, True, 6),
        ([4, 6, 8], 5, True, 4),
        ([4, 6, 8], 7, False, 6),
        ([4, 6, 8], 3, True, 4),  # nothing so early is kept: lose as few steps as possible
        ([4, 6, 8], 3, False, NO_PARENT),
    ],
)
def test_a_rewind_leads_to_the_newest_commit_up_to_its_limit(
    store: Store, steps: list[int], limit: int, sound: bool, expected: Any
) -> None:
    generation = open_generation(store, run="run", attempt=0)
    keys = {step: put_commit(store, step) for step in steps}
    assert rewind_parent(store) is None
    record_rewind(
        store, generation=generation.number, rank=0, limit=limit, first_sample=0, sound=sound
    )
    assert rewind_parent(store) == keys.get(expected, expected)


def test_a_rewind_past_a_torn_commit_at_its_limit_is_none_from_scratch(store: Store) -> None:
    """No later commit has wrong weights, so the start after it says what is lost."""
    generation = open_generation(store, run="run", attempt=0)
    put_commit(store, 6, torn=True)
    record_rewind(store, generation=generation.number, rank=0, limit=6, first_sample=0, sound=False)
    assert rewind_parent(store) is None


def test_a_rewind_holds_for_one_start_and_the_newest_one_counts(store: Store) -> None:
    first = open_generation(store, run="run", attempt=0)
    keys = {step: put_commit(store, step) for step in (2, 4, 6)}
    record_rewind(store, generation=first.number, rank=0, limit=2, first_sample=0, sound=True)
    record_split(store, generation=first.number, rank=0, accumulation=2)
    assert rewind_parent(store) == keys[2]
    second = open_generation(store, run="run", attempt=1)
    assert rewind_parent(store) is None
    record_rewind(store, generation=second.number, rank=0, limit=4, first_sample=0, sound=True)
    assert rewind_parent(store) == keys[4]

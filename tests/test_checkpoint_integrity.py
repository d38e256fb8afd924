"""What was stored and then changed is found, and the commit before it is used instead."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infra.errors import StoreAway, StoreError
from infra.ranges import read_blocks
from infra.store import Store
from training.checkpoint import Checkpointer, Generation, open_generation, reachable_commits
from training.checkpoint.commands import main as checkpoints
from training.checkpoint.dcp_reader import CommitReader
from training.errors import CheckpointError


def build(fill: float) -> nn.Module:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with commits of steps 1 and 2, each of two ranks, whose weights equal the step."""
    job = Store.open(str(tmp_path_factory.mktemp("pristine") / "jobs" / "job"))
    gang = {"generation": open_generation(job, run="r", attempt=0), "world_size": 2}
    with Checkpointer(job.uri, rank=0, **gang) as first, Checkpointer(job.uri, rank=1, **gang) as second:
        for step in (1, 2):
            second.save(step, build(step), None, {"cursor": step})
            first.save(step, build(step), None, {"cursor": step})
            assert first.wait() == second.wait()
    return Path(job.uri)


@pytest.fixture(scope="module")
def reader(pristine: Path) -> Iterator[tuple[Checkpointer, Path]]:
    """A checkpointer on a copy that the tests damage and mend."""
    job = pristine.parent / "copy"
    shutil.copytree(pristine, job)
    with Checkpointer(str(job), generation=Generation(2, "reader")) as checkpointer:
        yield checkpointer, job


@pytest.fixture
def damaged(reader: tuple[Checkpointer, Path], pristine: Path) -> tuple[Checkpointer, Path]:
    checkpointer, job = reader
    for folder in ("data", "index", "commits", "quarantine", "generations"):
        shutil.rmtree(job / folder, ignore_errors=True)
        if (pristine / folder).exists():
            shutil.copytree(pristine / folder, job / folder)
    return checkpointer, job


def files(job: Path, kind: str, step: int) -> list[Path]:
    folder = f"{10**12 - 1 - step:012d}" if kind == "commits" else f"{step:012d}"
    return sorted(path for path in (job / kind).rglob("*") if path.is_file() and folder in path.parts)


def flip(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def truncate(path: Path, seed: int) -> None:
    path.write_bytes(path.read_bytes()[: random.Random(seed).randrange(path.stat().st_size)])


def restore(checkpointer: Checkpointer, job: Path) -> tuple[int, float, list]:
    model = build(-1)
    candidates = [ref.key for ref in reachable_commits(Store.open(str(job)))]
    restored = checkpointer.restore(candidates, model, None)
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    assert len(values) == 1 and restored.extra == {"cursor": restored.step}
    return restored.step, values.pop(), restored.rejected


def assert_found_and_previous_used(checkpointer: Checkpointer, job: Path, capfd: pytest.CaptureFixture) -> None:
    assert checkpoints(["verify", str(job)]) == 1
    step, value, rejected = restore(checkpointer, job)
    assert (step, value) == (1, 1.0) and len(rejected) == 1
    assert "is damaged and will not be used" in capfd.readouterr().err
    assert [ref.step for ref in reachable_commits(Store.open(str(job)))] == [1], "the damaged one is quarantined"
    assert restore(checkpointer, job) == (1, 1.0, [])


def test_the_undamaged_copy_restores_the_newest(damaged: tuple[Checkpointer, Path]) -> None:
    assert restore(*damaged) == (2, 2.0, [])
    assert checkpoints(["verify", str(damaged[1])]) == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["data", "commits"])
@pytest.mark.parametrize("change", [flip, truncate])
def test_any_change_is_found(
    damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture, change: Callable, kind: str, seed: int
) -> None:
    change(random.Random(seed).choice(files(damaged[1], kind, step=2)), seed)
    assert_found_and_previous_used(*damaged, capfd)


def test_a_missing_data_object_is_found(damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture) -> None:
    files(damaged[1], "data", step=2)[1].unlink()
    assert_found_and_previous_used(*damaged, capfd)


def test_data_of_another_step_is_found(damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture) -> None:
    """Right size, sound bytes, wrong step: what a listing by name would take for whole."""
    earlier, later = (files(damaged[1], "data", step)[0] for step in (1, 2))
    shutil.copy(earlier, later)
    assert_found_and_previous_used(*damaged, capfd)


def test_shards_swapped_between_all_steps_leave_nothing_to_restore(damaged: tuple[Checkpointer, Path]) -> None:
    checkpointer, job = damaged
    earlier, later = (files(job, "data", step)[0] for step in (1, 2))
    swapped = earlier.read_bytes()
    earlier.write_bytes(later.read_bytes())
    later.write_bytes(swapped)
    with pytest.raises(CheckpointError, match="none of 2 commits verifies"):
        restore(checkpointer, job)


def test_a_manifest_of_another_step_is_found(damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture) -> None:
    """Sound under its own hash, but at a place that says another step."""
    checkpointer, job = damaged
    (earlier,), (later,) = files(job, "commits", 1), files(job, "commits", 2)
    shutil.copy(earlier, later.with_name(earlier.name))
    later.unlink()
    assert checkpoints(["verify", str(job)]) == 1
    assert "its manifest is of step 1" in capfd.readouterr().out
    for _ in range(2):  # its hash is that of a good commit, which must not be quarantined with it
        step, value, rejected = restore(checkpointer, job)
        assert (step, value, len(rejected)) == (1, 1.0, 1)
    assert open_generation(Store.open(str(job)), run="r", attempt=1).parent == str(earlier.relative_to(job))


@pytest.mark.parametrize("seed", range(5))
def test_the_index_is_checked_too_though_the_manifest_suffices(
    damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture, seed: int
) -> None:
    checkpointer, job = damaged
    index = files(job, "index", step=2)[seed % 2]
    if seed < 3:
        flip(index, seed)
    elif seed == 3:
        index.unlink()
    else:
        index.with_name("00007.json").write_text("{}")
    assert checkpoints(["verify", str(job)]) == 1
    assert f"index/{index.parent.parent.name}/{index.parent.name}/" in capfd.readouterr().out
    assert restore(checkpointer, job) == (2, 2.0, [])


def test_a_chunk_hurt_on_the_way_only_is_fetched_again(
    damaged: tuple[Checkpointer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def hurt_first(store: Store, key: str, *rest: Any, **options: Any) -> Iterator[list[memoryview]]:
        fetched.append(key)
        for block in read_blocks(store, key, *rest, **options):
            if fetched.count(key) == 1:
                largest = max(block, key=len)
                largest[len(largest) // 2] ^= 16
            yield block

    monkeypatch.setattr("training.checkpoint.reader.read_blocks", hurt_first)
    assert restore(*damaged) == (2, 2.0, [])
    assert len(fetched) == 4, "two objects, each fetched twice"


def test_an_unreadable_store_is_no_reason_for_quarantine(
    damaged: tuple[Checkpointer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, job = damaged

    def time_out(store: Store, key: str, *_: Any, **__: Any) -> None:
        raise StoreError(f"get {key}: timed out")

    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoint.reader.read_blocks", time_out)
        with pytest.raises(CheckpointError, match=r"says nothing of the commit itself: .*timed out"):
            restore(checkpointer, job)
    assert restore(checkpointer, job) == (2, 2.0, [])


def test_a_store_that_refuses_for_a_while_is_asked_again(
    damaged: tuple[Checkpointer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ended for it would take its generation along, and three of those would look like a crash loop."""
    asked: list[str] = []

    def refuse(store: Store, key: str) -> CommitReader:
        asked.append(key)
        if len(asked) <= 2:
            raise StoreAway(f"get {key}: 503 SlowDown")
        return CommitReader(store, key)

    monkeypatch.setattr("training.checkpoint.restore.CommitReader", refuse)
    assert restore(*damaged) == (2, 2.0, []) and len(asked) == 3


def test_list_says_what_counts_and_why_not(damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture) -> None:
    checkpointer, job = damaged
    flip(files(job, "data", step=2)[0], seed=1)
    restore(checkpointer, job)
    capfd.readouterr()
    assert checkpoints(["list", str(job), "--json"]) == 0
    rows = {row["step"]: row for row in json.loads(capfd.readouterr().out)}
    assert rows[1]["reachable"] and rows[1]["world_size"] == 2 and rows[1]["bytes"] > 64 * 64 * 4
    assert not rows[2]["reachable"] and "quarantine/" in rows[2]["reason"]
    assert checkpoints(["list", str(job)]) == 0
    assert "does not count: it is quarantined" in capfd.readouterr().out
    assert checkpoints(["verify", str(job / "nowhere")]) == 2 and not (job / "nowhere").exists()

"""Saving and committing: what a reader may rely on, whoever dies, whatever races."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from ebbflow.core.layout import commit_prefix, index_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import (
    Checkpointer,
    Generation,
    RetentionPolicy,
    open_generation,
    reachable_commits,
)
from ebbflow.training.checkpoint.commit import CommitWatch
from ebbflow.training.checkpoint.manifest import CheckpointId
from ebbflow.training.checkpoint.retention import Retention
from ebbflow.training.errors import CheckpointError, CommitMismatch

ROOT = Path(__file__).resolve().parents[2]


def build(seed: int = 0, width: int = 9) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 2))
    return model, torch.optim.AdamW([{"params": model.parameters(), "lr": 1 / 3}], betas=(0.8, 0.9))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Running or stopped; an ended process that nobody has collected yet is not alive."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def job(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "jobs" / "test"))


@pytest.mark.parametrize(("cap", "seconds"), [(None, 1.0), (4000.0, 16000 / 2000)])
def test_the_deadline_of_a_save_grows_with_its_bytes(
    job: Store, cap: float | None, seconds: float
) -> None:
    model = nn.Linear(4000, 1, bias=False)
    with Checkpointer(
        job.uri,
        generation=open_generation(job, run="r", attempt=0),
        deadline_seconds=1.0,
        upload_bytes_per_second=cap,
    ) as checkpointer:
        assert checkpointer._seconds_for(10 * 2**20 * 60) == (
            60.0 if cap is None else 10 * 2**20 * 60 / 2000
        )
        checkpointer.save(1, model, None, {})
        flight = checkpointer._saves.last
        assert flight is not None and flight.size > 16000
        assert seconds <= flight.deadline.seconds <= seconds * flight.size / 16000
        checkpointer.hurry()


def test_a_restored_run_continues_bit_equal(job: Store) -> None:
    events: list[tuple[str, dict]] = []
    model, optimizer = build()
    generation = open_generation(job, run="r", attempt=0)
    with Checkpointer(
        job.uri, generation=generation, emit=lambda name, **data: events.append((name, data))
    ) as checkpointer:
        train(model, optimizer, 3)
        stall = checkpointer.save(3, model, optimizer, {"cursor": 24, "money": 0.1 + 0.2})
        expected = [train(model, optimizer) for _ in range(3)]  # goes on while the uploader works
        commit = checkpointer.wait()
        assert checkpointer.save(3, model, optimizer, {}) == 0.0, "one step is saved once"
    assert stall > 0 and commit is not None and commit.step == 3
    assert [(name, data["step"]) for name, data in events] == [("staged", 3), ("commit", 3)]
    assert events[-1][1]["key"] == commit.key

    generation = open_generation(job, run="r", attempt=1)
    assert (generation.number, generation.parent, generation.parent_step) == (2, commit.key, 3)
    model, optimizer = build(seed=7)
    with Checkpointer(job.uri, generation=generation) as checkpointer:
        restored = checkpointer.restore(
            [ref.key for ref in reachable_commits(job)], model, optimizer
        )
        assert restored is not None and restored.step == 3 and restored.rng == "restored"
        assert restored.extra == {"cursor": 24, "money": 0.1 + 0.2}
        assert [train(model, optimizer) for _ in range(3)] == expected
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        differs = r"model\.0\.weight is float32 \[9, 4\] in the commit, float32 \[8, 4\]"
        with pytest.raises(CommitMismatch, match=differs):
            checkpointer.restore([commit.key], *build(width=8))
    assert len(reachable_commits(job)) == 1, "a mismatch is not a reason for quarantine"


def test_a_missing_rank_means_no_commit_and_an_error_that_names_it(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    gang = {"generation": generation, "world_size": 4, "deadline_seconds": 3.0}
    with (
        Checkpointer(job.uri, rank=0, **gang) as first,
        Checkpointer(job.uri, rank=2, **gang) as third,
    ):
        third.save(5, *build(), {})
        first.save(5, *build(), {})
        began = time.monotonic()
        with pytest.raises(
            CheckpointError,
            match=r"step 5 .* within [23][.\d]* s: no index from rank 1, 3 \(2 of 4 ranks",
        ):
            first.wait()
        assert time.monotonic() - began < 30
        assert first.last_commit is None and reachable_commits(job) == []


def test_losing_rank_0_cannot_block_a_commit(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    gang = {"generation": generation, "world_size": 2, "deadline_seconds": 10.0}
    with (
        Checkpointer(job.uri, rank=0, **gang) as first,
        Checkpointer(job.uri, rank=1, **gang) as second,
    ):
        first.save(5, *build(), {"cursor": 1})
        wait_until(lambda: job.head(index_key(generation.name, 5, 0)))
        os.kill(first.uploader_pid, signal.SIGKILL)
        second.save(5, *build(), {"cursor": 2})
        assert second.wait() == reachable_commits(job)[0]
        with pytest.raises(CheckpointError, match="rank 0: its uploader ended with exit code -9"):
            first.wait()


def test_racing_committers_write_the_same_bytes(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    gang = {"generation": generation, "world_size": 2}
    with (
        Checkpointer(job.uri, rank=0, **gang) as first,
        Checkpointer(job.uri, rank=1, **gang) as second,
    ):
        first.save(5, *build(), {"cursor": 1})
        second.save(5, *build(), {"cursor": 1})
        commit = second.wait()
        assert commit == first.wait()
    written = job.get(commit.key)
    job.delete(commit.key)
    save = CheckpointId(job="test", generation=generation.name, step=5, world_size=2)
    with ThreadPoolExecutor(8) as pool:
        attempts = list(pool.map(lambda _: CommitWatch(Store.open(job.uri), save).look(), range(8)))
    assert {attempt.commit for attempt in attempts} == {commit}
    assert [meta.key for meta in job.list(commit_prefix(5, 1))] == [commit.key]
    assert job.get(commit.key) == written


def test_a_store_that_refuses_is_named_and_two_failures_end_the_gang(
    job: Store, capfd: pytest.CaptureFixture
) -> None:
    generation = open_generation(job, run="r", attempt=0)
    Path(job.uri, "data").write_text("a file where a folder has to be")
    events: list[str] = []
    with Checkpointer(
        job.uri,
        generation=generation,
        deadline_seconds=0.5,
        emit=lambda name, **_: events.append(name),
    ) as checkpointer:
        state = build()
        checkpointer.save(1, *state, {})
        gave_up = r"rank 0: put data/000001-\w+/0+1/00000.bin: gave up after \d+ tries"
        with pytest.raises(CheckpointError, match=gave_up):
            checkpointer.wait()
        checkpointer.save(2, *state, {})  # one failure is survived
        with pytest.raises(CheckpointError, match="2 saves in a row have failed"):
            checkpointer.save(3, *state, {})
    assert [name for name in events if name != "staged"] == ["commit_failed", "commit_failed"]
    assert "gave up" in capfd.readouterr().err


def test_a_frozen_uploader_is_replaced_at_the_deadline(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    with Checkpointer(job.uri, generation=generation, deadline_seconds=0.5) as checkpointer:
        state = build()
        frozen = checkpointer.uploader_pid
        os.kill(frozen, signal.SIGSTOP)
        checkpointer.save(1, *state, {})
        with pytest.raises(CheckpointError, match=r"gave no answer within 0\.5 s"):
            checkpointer.wait()
        checkpointer.save(2, *state, {})
        assert checkpointer.wait().step == 2
        assert checkpointer.uploader_pid != frozen and not alive(frozen)


def test_signals_to_the_group_do_not_stop_a_save_but_the_trainers_death_does(
    tmp_path: Path,
) -> None:
    out = tmp_path / "pid"
    uri = str(tmp_path / "jobs" / "held")
    script = str(ROOT / "tests" / "support" / "checkpoint_rank.py")
    trainer = subprocess.Popen(
        [sys.executable, script, "hold", "4000000", uri, str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until(lambda: out.exists() and out.read_text(), 30)
        uploader = int(out.read_text())
        wait_until(lambda: Store.open(uri).list("index"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(uploader, number)
        wait_until(lambda: Store.open(uri).list("commits"))
        assert alive(uploader)
    finally:
        trainer.kill()
    trainer.wait()
    wait_until(lambda: not alive(uploader), 3)


def test_retention_keeps_k_whole_ones_and_never_the_torn_instead(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    state = build()
    with Checkpointer(
        job.uri, generation=generation, retention=RetentionPolicy(keep_last=2)
    ) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, *state, {})
            checkpointer.wait()
    assert [ref.step for ref in reachable_commits(job)] == [5, 4]
    for prefix in ("data", "index"):
        assert {meta.key.split("/")[2].lstrip("0") for meta in job.list(prefix)} == {"4", "5"}
    newest = Path(job.uri, f"data/{generation.name}/{5:012d}/00000.bin")
    newest.write_bytes(newest.read_bytes()[:-1])
    Retention(RetentionPolicy(keep_last=1)).run(
        job, CheckpointId(job="test", generation=generation.name, step=5, world_size=1)
    )
    assert 4 in [ref.step for ref in reachable_commits(job)], "the last whole commit was deleted"


def test_the_torch_free_parts_load_no_torch() -> None:
    modules = ["lineage", "uploader", "commands", "retention", "reader", "commit", "rollback"]
    code = (
        f"import sys, {', '.join('ebbflow.training.checkpoint.' + m for m in modules)}; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.lower()) is False


def test_steps_only_go_forward_within_a_generation(job: Store) -> None:
    with Checkpointer(job.uri, generation=Generation(1, "a")) as checkpointer:
        checkpointer.save(2, *build(), {})
        with pytest.raises(CheckpointError, match="a rewind needs a new generation"):
            checkpointer.save(1, *build(), {})
        with pytest.raises(CheckpointError, match="cannot be kept as JSON"):
            checkpointer.save(3, *build(), {"loss": float("nan")})

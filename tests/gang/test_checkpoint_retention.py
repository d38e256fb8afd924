"""What is kept and what goes: by policy, by pin, by a full store; and never the last whole commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.errors import StoreFull
from ebbflow.core.layout import (
    commit_key,
    data_key,
    generation_key,
    index_key,
    secret_key,
    signature_key,
)
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import (
    Generation,
    RetentionPolicy,
    open_generation,
    reachable_commits,
    trace_lineage,
)
from ebbflow.training.checkpoint.commands import find
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.manifest import CheckpointId, DataObject, Manifest
from ebbflow.training.checkpoint.retention import Retention, WholeCommit, choose_commits
from ebbflow.training.checkpoint.verified_io import sha256_text
from ebbflow.training.errors import CheckpointError, DamagedLineage, GenerationSuperseded

ROOT = Path(__file__).resolve().parents[2]
DAY = 24 * 3600.0

KEPT = st.lists(
    st.tuples(st.integers(1, 200), st.integers(0, 50), st.none() | st.floats(0, 9), st.booleans()),
    min_size=1,
    max_size=20,
    unique_by=lambda row: row[0],
)


@pytest.fixture
def job(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "jobs" / "test"))


def put_commit(
    job: Store, generation: Generation, step: int, *, loss: float | None = None, size: int = 100
) -> str:
    save = CheckpointId(job="test", generation=generation.name, step=step, world_size=1)
    key = data_key(save.generation, step, 0)
    job.put(key, bytes(size))
    job.put(index_key(save.generation, step, 0), b"{}")
    data = DataObject(key=key, size=size, crc64nvme="0" * 16, chunk_bytes=2**24, chunks=("0" * 16,))
    if loss is None:
        extra = {}
    else:
        extra = {"metrics": {"held_out_loss": loss, "step": step}}
    manifest = Manifest(
        save=save, data=(data,), indexes=("0",), tensors={}, common={"extra": extra}
    )
    raw = manifest.to_bytes()
    commit = commit_key(step, generation.number, sha256_text(raw))
    job.put(commit, raw)
    return commit


def steps(job: Store) -> list[int]:
    return sorted(ref.step for ref in reachable_commits(job))


def run(job: Store, generation: Generation, **policy: object) -> list[int]:
    save = CheckpointId(job="test", generation=generation.name, step=0, world_size=1)
    return sorted(ref.step for ref in Retention(RetentionPolicy(**policy)).run(job, save))


def age(job: Store, prefix: str, seconds: float, step: int | None = None) -> None:
    for meta in job.list(prefix):
        if step is None or f"/{step:012d}/" in meta.key:
            moment = time.time() - seconds
            os.utime(job.local_path(meta.key), (moment, moment))


def test_last_every_best_and_pinned_are_kept_and_nothing_else(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: float("nan"), 50: 2.0, 60: 3.0, 70: 9.0, 80: 8.0}
    keys = {
        step: put_commit(job, generation, step, loss=None if loss != loss else loss)
        for step, loss in losses.items()
    }
    assert checkpoints(["pin", job.uri, "10"]) == 0
    policy = {"keep_last": 2, "keep_every_steps": 25, "keep_best": 2}
    assert run(job, generation, **policy) == [40, 60]
    # last: 70, 80. every 25 steps, the first at or after: 30, 50, 80 (of 75). best: 20 (1.0), 50
    # (2.0). pinned: 10.
    assert steps(job) == [10, 20, 30, 50, 70, 80]
    assert run(job, generation, **policy) == [], "a choice once made stands"
    assert {meta.key.split("/")[2].lstrip("0") for meta in job.list("data")} == {
        "10",
        "20",
        "30",
        "50",
        "70",
        "80",
    }
    assert job.list("tombstones") == []
    assert checkpoints(["unpin", job.uri, keys[10]]) == 0
    assert run(job, generation, **policy) == [10]


def test_a_loss_of_another_step_is_not_this_commits(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    save = CheckpointId(job="test", generation=generation.name, step=1, world_size=0)
    stale = {"extra": {"metrics": {"held_out_loss": 0.1, "step": 0}}}
    raw = Manifest(save=save, data=(), indexes=(), tensors={}, common=stale).to_bytes()
    job.put(commit_key(1, 1, sha256_text(raw)), raw)
    for step in (2, 3):
        put_commit(job, generation, step, loss=float(step))
    assert run(job, generation, keep_last=1, keep_best=1) == [1]


def test_the_cap_takes_the_least_valued_first_and_never_the_newest_or_pinned(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    for step in range(1, 9):
        put_commit(job, generation, step, loss=float(step))
    assert checkpoints(["pin", job.uri, "2"]) == 0
    rules = {"keep_last": 3, "keep_every_steps": 4, "keep_best": 1}
    # 4 by steps; 8 is among the last too
    assert run(job, generation, **rules, max_total_bytes=500) == [3, 4, 5]
    assert run(job, generation, **rules, max_total_bytes=400) == [1]  # the best
    assert run(job, generation, **rules, max_total_bytes=200) == [6, 7]
    assert run(job, generation, **rules, max_total_bytes=1) == []
    assert steps(job) == [2, 8]


@given(
    KEPT,
    st.integers(1, 5),
    st.none() | st.integers(1, 60),
    st.integers(0, 4),
    st.none() | st.integers(0, 400),
)
def test_whatever_the_policy_the_newest_and_the_pinned_stay(
    rows: list, last: int, every: int | None, best: int, cap: int | None
) -> None:
    rows = sorted(rows, reverse=True)
    commits = [
        WholeCommit(sha256=str(s), step=s, size=size, metric=m, pinned=pin)
        for s, size, m, pin in rows
    ]
    policy = RetentionPolicy(
        keep_last=last, keep_every_steps=every, keep_best=best, max_total_bytes=cap
    )
    kept = choose_commits(commits, policy)
    bound = {commit.sha256 for commit in commits if commit.pinned} | {commits[0].sha256}
    assert bound <= set(kept)
    total = sum(commit.size for commit in commits if commit.sha256 in kept)
    if cap is None:
        assert {commit.sha256 for commit in commits[:last]} <= set(kept)
    else:
        assert total <= cap or set(kept) == bound
    survivors = [commit for commit in commits if commit.sha256 in kept]
    if cap is None:
        assert set(choose_commits(survivors, policy)) == set(kept), (
            "what was kept once is kept again"
        )


def test_orphans_and_what_does_not_count_go_when_they_are_old(job: Store) -> None:
    zombie = open_generation(job, run="r", attempt=0)
    put_commit(job, zombie, 10)
    generation = open_generation(job, run="r", attempt=1)
    put_commit(job, zombie, 40)  # late: 10 is where its successor began
    put_commit(job, generation, 20)
    for step, name in ((15, zombie.name), (30, generation.name), (31, generation.name)):
        job.put(data_key(name, step, 0), bytes(50))
        job.put(index_key(name, step, 0), b"{}")
    age(job, "data", 2 * DAY)
    age(job, "index", 2 * DAY)
    age(job, "index", 60.0, step=31)  # one young object: its save may be under way
    age(job, "commits", DAY / 2)
    assert run(job, generation, keep_last=5) == []
    assert {meta.key.split("/")[2].lstrip("0") for meta in job.list("data")} == {
        "10",
        "20",
        "40",
        "31",
    }
    put_commit(job, generation, 50)
    age(job, "commits", 2 * DAY, step=10**12 - 1 - 40)
    assert run(job, generation, keep_last=5) == [40]
    assert {traced.ref.step for traced in trace_lineage(job)} == {10, 20, 50}


def test_signatures_and_secrets_that_nothing_needs_go_when_they_are_old(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    needed = signature_key(CommitRef.from_key(put_commit(job, generation, 10)).sha256)
    old = {signature_key("0" * 64), secret_key("run", 0)}
    for key in (needed, *old):
        job.put(key, b"{}")
    age(job, "signatures", 2 * DAY)
    age(job, "secrets", 2 * DAY)
    young = {signature_key("1" * 64), secret_key("run", 1)}
    for key in young:
        job.put(key, b"{}")
    assert checkpoints(["prune", job.uri]) == 0
    left = set()
    for prefix in ("signatures", "secrets"):
        left |= {meta.key for meta in job.list(prefix)}
    assert left == {
        needed,
        *young,
    }


def test_a_deleted_record_of_the_running_generation_is_put_back_with_a_warning(
    job: Store,
) -> None:
    generation = open_generation(job, run="r", attempt=0)
    save = CheckpointId(job="test", generation=generation.name, step=0, world_size=1)
    warnings: list[str] = []
    retention = Retention(RetentionPolicy(keep_last=1), warnings.append)
    late = Retention(RetentionPolicy())
    put_commit(job, generation, 1)
    assert retention.run(job, save) == []
    key = generation_key(generation.number, generation.id)
    record = job.get(key)
    job.delete(key)
    put_commit(job, generation, 2)
    with pytest.raises(DamagedLineage, match="was deleted while the job is running"):
        late.run(job, save)  # it has never seen the record
    assert [ref.step for ref in retention.run(job, save)] == [1]
    assert job.get(key) == record
    assert len(warnings) == 1 and key in warnings[0] and "has been put back" in warnings[0]
    assert late.run(job, save) == [] and steps(job) == [2]


@pytest.mark.parametrize("writable", [True, False])
def test_the_age_of_orphans_is_by_the_stores_own_clock(
    job: Store, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    """The last that was put is a save without a commit: where nothing more can be put, nobody knows
    how old it is.
    """
    generation = open_generation(job, run="r", attempt=0)
    put_commit(job, generation, 10)
    for prefix in ("data", "index", "commits"):
        age(job, prefix, 3 * DAY)
    for key in (data_key(generation.name, 20, 0), index_key(generation.name, 20, 0)):
        job.put(key, b"{}")
        age(job, key.rpartition("/")[0], 2 * DAY)
    put = Store.put

    def refuse(self: Store, key: str, data: bytes, **options: Any) -> None:
        if not writable:
            raise StoreFull(f"put {key}: no room")
        put(self, key, data, **options)

    monkeypatch.setattr(Store, "put", refuse)
    # What this machine takes the time to be does not matter
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert run(job, generation, keep_last=5, orphan_seconds=1.5 * DAY) == []
    left = {meta.key.split("/")[2].lstrip("0") for meta in job.list("data")}
    assert left == ({"10"} if writable else {"10", "20"})
    assert job.list("clock") == []


def test_a_zombie_deletes_nothing_and_a_deletion_cut_short_is_finished(
    job: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = open_generation(job, run="r", attempt=0)
    for step in (1, 2, 3):
        put_commit(job, zombie, step)
    opened: list[Generation] = []
    put = Store.put

    def open_meanwhile(self: Store, key: str, data: bytes, **options: Any) -> None:
        put(self, key, data, **options)
        if key.startswith("tombstones/") and not opened:
            opened.append(Generation(0, ""))
            opened[0] = open_generation(job, run="r", attempt=1)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", open_meanwhile)
        with pytest.raises(GenerationSuperseded):
            run(job, zombie, keep_last=1)
    assert steps(job) == [1, 2, 3] and job.list("tombstones") == []

    def dies(self: Store, key: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", dies)
        with pytest.raises(KeyboardInterrupt):
            run(job, opened[0], keep_last=2)
    assert steps(job) == [2, 3], "the tombstone is enough"
    run(job, opened[0], keep_last=2)
    assert {meta.key.split("/")[2].lstrip("0") for meta in job.list("data")} == {"2", "3"}
    assert job.list("tombstones") == []


def test_no_gang_restores_a_commit_that_is_being_deleted(
    job: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_generation(job, run="r", attempt=0)
    key = put_commit(job, first, 1)
    put = Store.put

    def bury(self: Store, name: str, data: bytes) -> None:
        put(self, name, data)
        if name.startswith("generations/"):
            put(self, f"tombstones/{CommitRef.from_key(key).sha256}.json", b"{}")

    monkeypatch.setattr(Store, "put", bury)
    with pytest.raises(CheckpointError, match="is being deleted"):
        open_generation(job, run="r", attempt=1, parent=key)
    assert len(job.list("generations")) == 1, "its record is withdrawn"


def test_the_prune_command_shows_its_plan_before_it_deletes(
    job: Store, capfd: pytest.CaptureFixture
) -> None:
    generation = open_generation(job, run="r", attempt=0)
    for step in (1, 2, 3):
        put_commit(job, generation, step)
    for dry in (["--dry-run"], []):
        assert checkpoints(["prune", job.uri, "--keep-last", "1", "--json", *dry]) == 0
        document = json.loads(capfd.readouterr().out)
        assert [row["step"] for row in document["deleted"]] == [1, 2]
        assert [(row["step"], row["because"]) for row in document["kept"]] == [(3, "last")]
        assert steps(job) == ([1, 2, 3] if dry else [3])
    assert checkpoints(["prune", job.uri, "--keep-last", "0"]) == 1


def test_a_full_disk_is_answered_by_retention_and_then_by_a_clear_stop(tmp_path: Path) -> None:
    """A real file system of 12 MB, where eight saves of 2 MB are to be kept."""
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(
            "skipped, because this machine lets no user mount a file system in a namespace of "
            "its own"
        )
    folder = tmp_path / "disk"
    out = tmp_path / "out.json"
    folder.mkdir()
    script = [
        sys.executable,
        str(ROOT / "tests" / "support" / "full_disk.py"),
        str(folder),
        str(out),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["unshare", "-rm", *script],
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["committed"] == list(range(1, 9)), "every save found room"
    assert found["kept"][0] == 8 and found["problems"] == []
    assert "commits deleted to make room: 1, 2" in done.stderr
    assert (found["stopped_at"], found["curable"]) == (9, False), "all that is left is pinned"
    assert "No space left" in found["message"] and "hint: free space" in found["message"]
    assert found["left"] == found["kept"] and found["restored"] == 8 and found["equal"]


def test_a_disk_without_inodes_is_answered_like_a_full_one(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("skipped, because this machine lets no user mount a file system")
    out = tmp_path / "out.json"
    (tmp_path / "disk").mkdir()
    script = str(ROOT / "tests" / "support" / "full_disk.py")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, script, str(tmp_path / "disk"), str(out), "inodes"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["committed"] == list(range(1, 25)), "every save found room"
    assert found["kept"][0] == 24 and "commits deleted to make room: " in done.stderr


def test_two_records_of_one_save_count_once_and_share_their_data(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    for step in (1, 2, 3):
        put_commit(job, generation, step)
    put_commit(job, generation, 3, loss=1.0)  # the same data under another manifest
    assert run(job, generation, keep_last=2) == [1]
    assert steps(job) == [2, 3, 3]
    assert len(job.list("data")) == 2
    put_commit(job, generation, 4)
    run(job, generation, keep_last=1)
    assert steps(job) == [4] and len(job.list("data")) == 1


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_list_marks_the_best_commit_and_export_takes_it(
    job: Store, capfd: pytest.CaptureFixture[str], mode: str, best: int
) -> None:
    generation = open_generation(job, run="r", attempt=0)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, None)):
        put_commit(job, generation, step, loss=loss)
    rule = {"metric": "held_out_loss", "mode": mode, "count": 1}
    job.put("config.json", json.dumps({"config": {"checkpoint": {"keep_best": rule}}}).encode())
    assert checkpoints(["list", job.uri, "--json"]) == 0
    rows = {row["step"]: row for row in json.loads(capfd.readouterr().out)}
    assert [step for step, row in rows.items() if row["best"]] == [best]
    assert (rows[2]["metrics"], rows[4]["metrics"]) == ({"held_out_loss": 1.0}, {})
    assert checkpoints(["list", job.uri]) == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "  best" in line]
    assert f"step        {best}" in line and "held_out_loss" in line
    assert find(job, "best").ref.step == best


def test_best_of_commits_without_an_evaluation_is_refused_with_the_fix(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    put_commit(job, generation, 1)
    with pytest.raises(CheckpointError, match=r"none of 1 commits has the metric held_out_loss"):
        find(job, "best")

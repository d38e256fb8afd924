"""What was stored and then changed is found, and the commit before it is used instead."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow.training.checkpoint.restore as restoring
from ebbflow.core.config.load import violations
from ebbflow.core.config.schema import CheckpointConfig, RunConfig
from ebbflow.core.errors import Outcome, StoreError, StoreUnavailable
from ebbflow.core.layout import data_key, index_key, signature_key
from ebbflow.core.preflight import PreflightContext
from ebbflow.core.signing_key import NAME_VARIABLE
from ebbflow.core.store import Store
from ebbflow.core.store.ranges import read_blocks
from ebbflow.infra.checks.environment import check_signing_key
from ebbflow.training import worker
from ebbflow.training.checkpoint import (
    Checkpointer,
    CommitRef,
    Generation,
    open_generation,
    reachable_commits,
)
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.commit import CommitWatch
from ebbflow.training.checkpoint.dcp_reader import CommitReader
from ebbflow.training.checkpoint.manifest import CheckpointId, DataObject, RankIndex
from ebbflow.training.checkpoint.reader import VerifiedReader, read_manifest
from ebbflow.training.checkpoint.retention import Retention, RetentionPolicy
from ebbflow.training.checkpoint.signing import signed_index_bytes
from ebbflow.training.checkpoint.verified_io import canonical_json, crc_text, sha256_text
from ebbflow.training.errors import (
    CheckpointError,
    CorruptCommit,
    GangError,
    NoSigningKey,
    NothingToRestore,
)
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import WorkerSpec
from tests.support.gangs import endless_gang

KEY = "a key of these tests, which no object may hold"


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
    with (
        Checkpointer(job.uri, rank=0, **gang) as first,
        Checkpointer(job.uri, rank=1, **gang) as second,
    ):
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
    if kind == "commits":
        folder = f"{10**12 - 1 - step:012d}"
    else:
        folder = f"{step:012d}"
    return sorted(
        path for path in (job / kind).rglob("*") if path.is_file() and folder in path.parts
    )


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
    values = set()
    for parameter in model.parameters():
        values.update(parameter.flatten().tolist())
    assert len(values) == 1 and restored.extra == {"cursor": restored.step}
    return restored.step, values.pop(), restored.rejected


def assert_found_and_previous_used(
    checkpointer: Checkpointer, job: Path, capfd: pytest.CaptureFixture
) -> None:
    assert checkpoints(["verify", str(job)]) == 1
    step, value, rejected = restore(checkpointer, job)
    assert (step, value) == (1, 1.0) and len(rejected) == 1
    assert "is damaged and will not be used" in capfd.readouterr().err
    assert [ref.step for ref in reachable_commits(Store.open(str(job)))] == [1], (
        "the damaged one is quarantined"
    )
    assert restore(checkpointer, job) == (1, 1.0, [])


def test_the_undamaged_copy_restores_the_newest(damaged: tuple[Checkpointer, Path]) -> None:
    assert restore(*damaged) == (2, 2.0, [])
    assert checkpoints(["verify", str(damaged[1])]) == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["data", "commits"])
@pytest.mark.parametrize("change", [flip, truncate])
def test_any_change_is_found(
    damaged: tuple[Checkpointer, Path],
    capfd: pytest.CaptureFixture,
    change: Callable,
    kind: str,
    seed: int,
) -> None:
    change(random.Random(seed).choice(files(damaged[1], kind, step=2)), seed)
    assert_found_and_previous_used(*damaged, capfd)


def test_a_missing_data_object_is_found(
    damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture
) -> None:
    files(damaged[1], "data", step=2)[1].unlink()
    assert_found_and_previous_used(*damaged, capfd)


def test_data_of_another_step_is_found(
    damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture
) -> None:
    """Right size, sound bytes, wrong step: what a listing by name would take for whole."""
    earlier, later = (files(damaged[1], "data", step)[0] for step in (1, 2))
    shutil.copy(earlier, later)
    assert_found_and_previous_used(*damaged, capfd)


def test_shards_swapped_between_all_steps_leave_nothing_to_restore(
    damaged: tuple[Checkpointer, Path],
) -> None:
    checkpointer, job = damaged
    earlier, later = (files(job, "data", step)[0] for step in (1, 2))
    swapped = earlier.read_bytes()
    earlier.write_bytes(later.read_bytes())
    later.write_bytes(swapped)
    with pytest.raises(CheckpointError, match="none of 2 commits verifies"):
        restore(checkpointer, job)


def test_a_manifest_of_another_step_is_found(
    damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture
) -> None:
    """Sound under its own hash, but at a place that says another step."""
    checkpointer, job = damaged
    (earlier,) = files(job, "commits", 1)
    (later,) = files(job, "commits", 2)
    shutil.copy(earlier, later.with_name(earlier.name))
    later.unlink()
    assert checkpoints(["verify", str(job)]) == 1
    assert "its manifest is of step 1" in capfd.readouterr().out
    for _ in range(2):  # its hash is that of a good commit, which must not be quarantined with it
        step, value, rejected = restore(checkpointer, job)
        assert (step, value, len(rejected)) == (1, 1.0, 1)
    assert open_generation(Store.open(str(job)), run="r", attempt=1).parent == str(
        earlier.relative_to(job)
    )


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

    def hurt_first(
        store: Store, key: str, *rest: Any, **options: Any
    ) -> Iterator[list[memoryview]]:
        fetched.append(key)
        for block in read_blocks(store, key, *rest, **options):
            if fetched.count(key) == 1:
                largest = max(block, key=len)
                largest[len(largest) // 2] ^= 16
            yield block

    monkeypatch.setattr("ebbflow.training.checkpoint.reader.read_blocks", hurt_first)
    assert restore(*damaged) == (2, 2.0, [])
    assert len(fetched) == 4, "two objects, each fetched twice"


def test_an_unreadable_store_is_no_reason_for_quarantine(
    damaged: tuple[Checkpointer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, job = damaged

    def time_out(store: Store, key: str, *_: Any, **__: Any) -> None:
        raise StoreError(f"get {key}: timed out")

    with monkeypatch.context() as patch:
        patch.setattr("ebbflow.training.checkpoint.reader.read_blocks", time_out)
        with pytest.raises(
            CheckpointError, match=r"says nothing about the commit itself: .*timed out"
        ):
            restore(checkpointer, job)
    assert restore(checkpointer, job) == (2, 2.0, [])


def test_a_store_that_refuses_for_a_while_is_asked_again(
    damaged: tuple[Checkpointer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ended for it would take its generation along, and three of those would look like
    a crash loop.
    """
    asked: list[str] = []

    def refuse(store: Store, key: str, **_: object) -> CommitReader:
        asked.append(key)
        if len(asked) <= 2:
            raise StoreUnavailable(f"get {key}: 503 SlowDown")
        return CommitReader(store, key)

    monkeypatch.setattr("ebbflow.training.checkpoint.restore.CommitReader", refuse)
    assert restore(*damaged) == (2, 2.0, []) and len(asked) == 3


def test_checkpoint_list_shows_which_commits_count_and_why_others_do_not(
    damaged: tuple[Checkpointer, Path], capfd: pytest.CaptureFixture
) -> None:
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


def use_key(monkeypatch: pytest.MonkeyPatch, value: str | None = KEY) -> None:
    monkeypatch.setenv(NAME_VARIABLE, "EBBFLOW_TEST_KEY")
    if value is None:
        monkeypatch.delenv("EBBFLOW_TEST_KEY", raising=False)
    else:
        monkeypatch.setenv("EBBFLOW_TEST_KEY", value)


def save_steps(job: Store, *steps: int) -> None:
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as saver:
        for step in steps:
            saver.save(step, build(step), None, {"cursor": step})
            assert saver.wait().step == step


@pytest.fixture(scope="module")
def signed_pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = Store.open(str(tmp_path_factory.mktemp("signed") / "jobs" / "job"))
    with pytest.MonkeyPatch.context() as patch:
        use_key(patch)
        save_steps(job, 1, 2)
    return Path(job.uri)


@pytest.fixture
def signed(signed_pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    use_key(monkeypatch)
    folder = tmp_path / "jobs" / "job"
    shutil.copytree(signed_pristine, folder)
    return Store.open(str(folder))


def steps_that_count(job: Store) -> list[int]:
    return [ref.step for ref in reachable_commits(job)]


def newest(job: Store) -> str:
    return job.list("commits")[0].key


def forge(job: Store, change: Callable[[dict], None]) -> str:
    """Put the newest manifest, changed, under its own new hash; returns the key."""
    key = newest(job)
    document = json.loads(job.get(key))
    change(document)
    raw = canonical_json(document)
    forged = f"{key.rsplit('/', 1)[0]}/{sha256_text(raw)}.json"
    job.put(forged, raw)
    job.delete(key)
    return forged


def load(job: Store, candidates: list[str]) -> tuple[int, float]:
    with Checkpointer(job.uri, generation=Generation(9, "reader")) as checkpointer:
        model = build(-1)
        restored = checkpointer.restore(candidates, model, None)
        return restored.step, next(model.parameters())[0][0].item()


def test_signed_commits_restore_and_no_object_holds_the_key(
    signed: Store, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_that_count(signed) == [2, 1]
    assert load(signed, [ref.key for ref in reachable_commits(signed)]) == (2, 2.0)
    assert open_generation(signed, run="r", attempt=1).parent_step == 2
    assert checkpoints(["verify", signed.uri]) == 0
    assert "sound  signed  commits/" in capfd.readouterr().out
    secrets = [KEY.encode(), hashlib.sha256(KEY.encode()).hexdigest().encode()]
    for meta in signed.list(""):
        assert not any(secret in signed.get(meta.key) for secret in secrets), meta.key
    monkeypatch.delenv(NAME_VARIABLE)
    assert load(signed, [newest(signed)]) == (2, 2.0), (
        "a reader that checks no signatures reads signed commits"
    )


def test_a_forged_commit_with_its_own_hash_is_refused_and_left_alone(
    signed: Store, capfd: pytest.CaptureFixture
) -> None:
    forged = forge(signed, lambda document: document["common"]["extra"].update(cursor=99))
    assert steps_that_count(signed) == [1]
    Retention(RetentionPolicy(keep_last=1, orphan_seconds=0.0)).prune(signed)
    assert signed.head(forged) is not None and steps_that_count(signed) == [1]
    assert open_generation(signed, run="r", attempt=1).parent_step == 1
    assert f"{forged}: is refused, because it is not signed" in capfd.readouterr().err
    # A rank that is given it all the same goes on to the next one, and quarantines nothing.
    older = reachable_commits(signed)[0].key
    assert load(signed, [forged, older]) == (1, 1.0)
    assert "is refused and will not be used" in capfd.readouterr().err
    assert signed.list("quarantine") == []
    assert checkpoints(["verify", signed.uri]) == 1
    assert checkpoints(["export", signed.uri, f"{signed.uri}/out.pt", "--commit", forged]) == 1


def index_of(save: CheckpointId, rank: int, key: str = "", sha256: str = "5" * 64) -> RankIndex:
    own = data_key(save.generation, save.step, rank)
    data = DataObject(
        key=key or own,
        size=1,
        crc64nvme="0" * 16,
        chunk_bytes=1,
        chunks=("0" * 16,),
        sha256=(sha256,),
    )
    if rank == 0:
        common = {"extra": {}, "optimizer": None, "parent": None}
    else:
        common = None
    return RankIndex(save=save, rank=rank, data=data, items=(), common=common)


def test_a_forged_index_is_not_signed_into_a_commit(
    signed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer of the store puts rank 1's index before rank 1 does: the index counts as missing."""
    save = CheckpointId(
        job="job", generation=open_generation(signed, run="r", attempt=1).name, step=3, world_size=2
    )
    before = len(signed.list("commits"))
    (first, second) = [index_key(save.generation, 3, rank) for rank in (0, 1)]
    signed.put(first, signed_index_bytes(signed, first, index_of(save, 0)))
    other_step = signed.list("index")[0].key
    moved = replace(
        index_of(save, 1, sha256="6" * 64), hmac=json.loads(signed.get(other_step))["hmac"]
    )
    with monkeypatch.context() as patch:
        use_key(patch, KEY + "!")
        other_key = signed_index_bytes(signed, second, index_of(save, 1, sha256="6" * 64))
    forgeries = [
        index_of(save, 1, key="data/elsewhere/00001.bin").to_bytes(),
        index_of(save, 1, sha256="6" * 64).to_bytes(),
        signed_index_bytes(signed, first, index_of(save, 1, sha256="6" * 64)),
        moved.to_bytes(),
        other_key,
        replace(index_of(save, 1), hmac="\ud800").to_bytes(),
    ]
    for forged in forgeries:
        signed.put(second, forged)
        found = CommitWatch(signed, save).look()
        assert found.commit is None and found.missing_ranks == [1] and "its HMAC is" in found.cause
    assert len(signed.list("commits")) == before
    watch = CommitWatch(signed, save)
    assert watch.look().commit is None
    signed.put(second, signed_index_bytes(signed, second, index_of(save, 1)))
    committed = watch.look().commit  # a forged index is not remembered
    assert committed is not None
    assert [data_object.sha256 for data_object in read_manifest(signed, committed.key).data] == [
        ("5" * 64,)
    ] * 2


def test_an_index_names_its_own_ranks_data_object(tmp_path: Path) -> None:
    """Signed or not."""
    job = Store.open(str(tmp_path / "jobs" / "job"))
    save = CheckpointId(job="job", generation="000001-x", step=3, world_size=1)
    key = index_key(save.generation, 3, 0)
    job.put(key, signed_index_bytes(job, key, index_of(save, 0, key="data/elsewhere/00000.bin")))
    with pytest.raises(
        CheckpointError, match="index of rank 0 names the data object 'data/elsewhere/"
    ):
        CommitWatch(job, save).look()
    assert job.list("commits") == []


def test_weights_forged_to_the_same_crc_are_refused(signed: Store) -> None:
    """A CRC can be met on purpose; the signed SHA-256 cannot.

    Here the CRC is simply given the forger's value.
    """
    key = newest(signed)
    (data,) = read_manifest(signed, key).data
    raw = signed.get(data.key)
    changed = bytes([raw[0] ^ 1]) + raw[1:]
    forged = replace(data, chunks=(crc_text(changed),))
    signed.put(data.key, changed)
    with pytest.raises(CorruptCommit, match="SHA-256"):
        VerifiedReader(signed, [forged]).check(data.key, 0)
    VerifiedReader(signed, [replace(forged, sha256=())]).check(data.key, 0)


@pytest.mark.parametrize("to", ["another job", "another step", "a commit of its own"])
def test_a_signature_that_was_moved_is_refused(signed: Store, tmp_path: Path, to: str) -> None:
    if to == "another job":
        moved = tmp_path / "jobs" / "other"
        shutil.copytree(signed.uri, moved)
        assert steps_that_count(Store.open(str(moved))) == []
        with pytest.raises(NothingToRestore, match="signature is wrong"):
            open_generation(Store.open(str(moved)), run="r", attempt=1)
    elif to == "another step":
        first, second = (CommitRef.from_key(meta.key) for meta in signed.list("commits"))
        signed.put(signature_key(first.sha256), signed.get(signature_key(second.sha256)))
        assert steps_that_count(signed) == [1]
    else:
        old = signed.get(signature_key(CommitRef.from_key(newest(signed)).sha256))
        forged = forge(signed, lambda document: document["common"]["extra"].update(cursor=99))
        signed.put(signature_key(CommitRef.from_key(forged).sha256), old)
        assert steps_that_count(signed) == [1]


@pytest.mark.parametrize(
    "damage", [b"", b"[" * 2000, b'{"data":[1],"hmac":"x"}', b'{"data":null,"hmac":7}', b"\xff"]
)
def test_whatever_is_in_place_of_a_signature_is_refused(signed: Store, damage: bytes) -> None:
    signed.put(signature_key(CommitRef.from_key(newest(signed)).sha256), damage)
    assert steps_that_count(signed) == [1]


def test_another_key_is_refused_and_a_missing_one_is_an_error_of_the_configuration(
    signed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, KEY + "!")
    assert steps_that_count(signed) == []
    with pytest.raises(
        NothingToRestore, match="signature is wrong: it was made with another key"
    ) as refused:
        open_generation(signed, run="r", attempt=1)
    assert refused.value.outcome.exit_code == 9 and KEY not in str(refused.value)
    assert signed.list("quarantine") == [] and len(signed.list("commits")) == 2
    for value in (None, "", "short"):
        use_key(monkeypatch, value)
        with pytest.raises(NoSigningKey, match="EBBFLOW_TEST_KEY") as missing:
            steps_that_count(signed)
        assert missing.value.outcome is Outcome.CONFIG and not missing.value.curable


def test_commits_from_before_signing_are_refused_until_they_are_signed(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pristine, tmp_path / "jobs" / "job")
    job = Store.open(str(tmp_path / "jobs" / "job"))
    assert job.list("signatures") == [] and steps_that_count(job) == [2, 1]
    use_key(monkeypatch)
    with pytest.raises(NothingToRestore) as refused:
        open_generation(job, run="r", attempt=1)
    line = f"ebbflow checkpoints sign {job.uri} --signing-key-env EBBFLOW_TEST_KEY"
    assert line in str(refused.value) and "--from-scratch" in str(refused.value)
    monkeypatch.delenv(NAME_VARIABLE)
    assert checkpoints(line.split()[2:]) == 0
    use_key(monkeypatch)
    assert steps_that_count(job) == [2, 1] and load(job, [newest(job)]) == (2, 2.0)
    assert all(
        len(data_object.sha256) == 1 for data_object in read_manifest(job, newest(job)).data
    ), "they come with the signature"


def test_pruning_removes_the_signature(signed: Store) -> None:
    Retention(RetentionPolicy(keep_last=1)).prune(signed)
    assert steps_that_count(signed) == [2]
    assert [meta.key for meta in signed.list("signatures")] == [
        signature_key(CommitRef.from_key(newest(signed)).sha256)
    ]


def test_preflight_finds_a_missing_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBBFLOW_TEST_KEY", raising=False)
    config = RunConfig(checkpoint=CheckpointConfig(signing_key_env="EBBFLOW_TEST_KEY"))
    context = PreflightContext(config=config, config_path=None, project_root=Path.cwd())
    assert check_signing_key(context).status == "failed"
    monkeypatch.setenv("EBBFLOW_TEST_KEY", KEY)
    found = check_signing_key(context)
    assert found.status == "passed" and KEY not in found.detail
    pasted = RunConfig(checkpoint=CheckpointConfig(signing_key_env="c0ffee" * 10))
    (violation,) = violations(pasted)
    assert "must be the name" in violation.message and "c0ffee" not in violation.message + (
        violation.hint or ""
    )


def test_a_missing_key_ends_agents_and_ranks_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, None)
    sections = {
        "survival": {"standby": False},
        "checkpoint": {"signing_key_env": "EBBFLOW_TEST_KEY"},
    }
    spec = replace(endless_gang(tmp_path, **sections), nodes=1)
    with pytest.raises(GangError, match="EBBFLOW_TEST_KEY") as error:
        LocalGang(spec, tmp_path / "gang", tmp_path / "output.log").wait(60)
    assert (error.value.outcome, error.value.curable) == (Outcome.CONFIG, False)
    own = {
        "job": "job",
        "run": "r",
        "attempt": 0,
        "node": 0,
        "generation": 1,
        "generation_id": "g",
        "candidates": [],
    }
    rank = WorkerSpec(**own, config=spec.config, store_uri=spec.store_uri, prepared={})
    monkeypatch.setattr(worker, "connect", lambda **_: pytest.fail("the rank joined a gang"))
    with pytest.raises(NoSigningKey, match="EBBFLOW_TEST_KEY"):
        worker._train(rank, None)


@pytest.mark.parametrize(
    ("kinds", "outcome", "named"),
    [
        (
            ["sound", "refused"],
            "error",
            "rank 1 on h1 refuses what the others accept: another key there?",
        ),
        (
            ["refused", "mismatch", "refused"],
            "error",
            "rank 0 on h0, rank 2 on h2 refuse what the others accept",
        ),
        (["refused", "refused"], "refused", "rank 0: not signed"),
        (["refused", "corrupt"], "refused", "rank 0: not signed"),
        (["sound", "refused", "away"], "away", "rank 2: not signed"),
    ],
)
def test_a_signature_that_only_some_ranks_refuse_is_an_error_that_names_them(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], outcome: str, named: str
) -> None:
    rows = [
        {"kind": kind, "reason": "not signed", "host": f"h{rank}"}
        for rank, kind in enumerate(kinds)
    ]
    monkeypatch.setattr(restoring, "_gather", lambda row, world_size: rows)
    own = restoring._Reader(
        0,
        len(kinds),
        0,
        lambda *_: pytest.fail("read again"),
        lambda *_: None,
        lambda: None,
        lambda stage: None,
    )
    verdict = restoring._agree_on_verdict(restoring._Verdict(kind=kinds[0]), "commits/x", own)
    assert verdict.kind == outcome and verdict.reason.startswith(named)

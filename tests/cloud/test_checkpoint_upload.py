"""The uploader process and what the trainer knows of it: caps, deadlines, a real bucket, many
ranks.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from awscrt.checksums import crc64nvme
from torch import nn

from ebbflow.core.layout import data_key, index_key
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.commit import CommitWatch, commit_as_backup
from ebbflow.training.checkpoint.manifest import CheckpointId, RankIndex
from ebbflow.training.checkpoint.part_uploader import PartSettings, PartUploader
from ebbflow.training.checkpoint.verified_io import Deadline
from ebbflow.training.errors import CheckpointError
from tests.support.many_ranks import save_with_many_ranks
from tests.support.swift import Swift
from tests.support.swift import swift as swift  # a fixture is found by its name here

MIB = 2**20


def model_of(megabytes: float) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(256, round(megabytes * MIB / 4 / 257))


def test_a_capped_upload_takes_its_time_and_hurries_on_request(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path / "jobs" / "capped"))
    model = model_of(16)
    with Checkpointer(
        job.uri,
        generation=open_generation(job, run="r", attempt=0),
        upload_bytes_per_second=4 * MIB,
    ) as saver:
        saver.prepare(model, None)
        assert saver.expected_seconds is None, "nothing is known before the first save"
        stall = saver.save(1, model, None, {})
        began = time.monotonic()
        assert saver.busy
        waited = saver.save(2, model, None, {})
        assert waited > 2.0, "at most one save is under way: the second waits for the first"
        assert time.monotonic() - began > 2.0 > stall
        assert saver.expected_seconds == pytest.approx(8, rel=0.5), (
            "4 s for one that is under way, 4 s for another"
        )
        saver.hurry()
        began = time.monotonic()
        assert saver.wait().step == 2
        assert time.monotonic() - began < max(3.0, 0.75 * waited)
        step, seconds = saver.last_durable
        assert step == 2 and seconds < 60
    size = 2 * 16 * MIB
    cpu_seconds = saver.upload_cost[1]
    assert saver.upload_cost[0] == pytest.approx(size, rel=0.01) and cpu_seconds > 0


def test_a_save_with_a_short_deadline_fails_in_time_with_a_reason(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path / "jobs" / "late"))
    generation = open_generation(job, run="r", attempt=0)
    with Checkpointer(job.uri, generation=generation, upload_bytes_per_second=MIB) as saver:
        began = time.monotonic()
        saver.save(1, model_of(8), None, {}, deadline_seconds=1.0)
        with pytest.raises(CheckpointError, match="rank 0: "):
            saver.wait()
        assert time.monotonic() - began < 7.5, "8 s at 1 MiB per second"
    assert reachable_commits(job) == []


def test_the_plan_is_kept_until_a_tensor_is_another_one(tmp_path: Path) -> None:
    """What was replaced behind the plan's back must be saved, not what was there before."""
    job = Store.open(str(tmp_path / "jobs" / "plan"))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected: dict[int, dict[str, Any]] = {}
    generation = open_generation(job, run="r", attempt=0)
    with (
        Checkpointer(job.uri, generation=generation) as saver,
        Checkpointer(job.uri, generation=generation) as reader,
    ):
        for step in range(1, 7):
            if step == 2:  # the optimizer gets its state
                model(torch.randn(5, 3)).sum().backward()
                optimizer.step()
            elif step == 3:
                model[0].weight.data = torch.randn(4, 3)  # the same parameter, other memory
            elif step == 4:
                model[0].weight = nn.Parameter(torch.randn(4, 3))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            elif step == 5:
                model[1].register_buffer("running_mean", torch.full((4,), 5.0))
            elif step == 6:
                model[1].running_mean.add_(1.0)
            saver.save(step, model, optimizer, {})
            commit = saver.wait()
            expected[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            reader.restore([commit.key], other, None)
            for name, tensor in other.state_dict().items():
                assert torch.equal(tensor, expected[step][name]), (step, name)


def test_a_backup_rank_commits_when_all_lower_ranks_are_gone(tmp_path: Path) -> None:
    """Ranks 0 to 39 die as soon as their indexes are durable: one of the others sees to the commit."""
    store = Store.open(str(tmp_path))
    generation = open_generation(store, run="r", attempt=0)
    save = CheckpointId(job=tmp_path.name, generation=generation.name, step=3, world_size=50)
    for rank in range(50):
        _durable(store, save, rank, tmp_path)
    never = threading.Event()
    commit_as_backup(store, save, 49, Deadline(8.0), never.wait)
    assert [ref.step for ref in reachable_commits(store)] == [3]
    assert CommitWatch(store, save).look().commit == reachable_commits(store)[0]
    began = time.monotonic()
    never.set()  # something better to do
    commit_as_backup(store, save, 49, Deadline(60.0), never.wait)
    assert time.monotonic() - began < 10.0, "of 60 s"


def test_requests_of_a_save_grow_with_the_ranks_and_not_with_their_square() -> None:
    figures = save_with_many_ranks(96, rounds=1)["worlds"]
    for world, measured in figures.items():
        assert measured["requests"] / int(world) < 9, (world, measured)
        assert measured["finding"] == {
            "requests": measured["finding"]["requests"],
            "pages_of_the_longest_list": 1,
        }
    assert figures["96"]["manifest_bytes"] < 7 * figures["16"]["manifest_bytes"]


def test_a_real_bucket_gets_parts_keeps_commits_and_is_left_clean(
    swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    bucket = swift.new_bucket()
    job = Store.open(f"s3://{bucket}/store/jobs/real")
    model = model_of(70)
    with Checkpointer(
        job.uri, generation=open_generation(job, run="r", attempt=0), deadline_seconds=60
    ) as saver:
        for step in (1, 2):
            saver.save(step, model, None, {"cursor": step})
            assert saver.wait().step == step
        other = nn.Linear(256, model.weight.shape[0])
        restored = saver.restore([ref.key for ref in reachable_commits(job)], other, None)
    assert restored.extra == {"cursor": 2} and torch.equal(other.weight, model.weight)
    assert checkpoints(["verify", job.uri]) == 0
    sink = open_sink(job.uri, Throttle())
    begun = sink.begin("data/left", 70 * MIB, parts=3, seconds=10)
    sink.put_part(begun, 1, 0, bytes(5 * MIB), crc64nvme(bytes(5 * MIB)), seconds=10)
    other_job = open_sink(f"s3://{bucket}/store/jobs/other", Throttle())
    assert other_job.sweep("data/", older_than_seconds=-5, seconds=10) == [], (
        "another job's uploads are not ours"
    )
    assert sink.sweep("data/", older_than_seconds=600, seconds=10) == [], "too young"
    assert sink.sweep("data/", older_than_seconds=-5, seconds=10) == ["store/jobs/real/data/left"]


def _durable(store: Store, save: CheckpointId, rank: int, folder: Path) -> None:
    throttle = Throttle()
    uploader = PartUploader(open_sink(str(folder), throttle), PartSettings(), throttle)
    data = uploader.upload(
        data_key(save.generation, save.step, rank), memoryview(b"x" * 10), Deadline(10)
    )
    if rank == 0:
        common = {"extra": {}, "optimizer": None, "parent": None}
    else:
        common = None
    index = RankIndex(save=save, rank=rank, data=data, items=(), common=common)
    store.put(index_key(save.generation, save.step, rank), index.to_bytes())

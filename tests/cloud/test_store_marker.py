"""The marker of a store in a bucket: an emptied bucket, and one of the same name elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from ebbflow.core.errors import JobNotInStore, WrongStore
from ebbflow.core.layout import KnownJob, job_prefix, remember_job
from ebbflow.core.store import Store
from ebbflow.core.store.identity import adopt_store
from ebbflow.core.store.marker import VARIABLE
from ebbflow.training.checkpoint import Checkpointer, open_generation
from ebbflow.training.errors import CheckpointError
from tests.support.swift import Swift

JOB = "job"


def empty(swift: Swift, bucket: str) -> None:
    for meta in swift.client().list_objects_v2(Bucket=bucket)["Contents"]:
        swift.client().delete_object(Bucket=bucket, Key=meta["Key"])


@pytest.mark.parametrize("prefix", ["", "/team/runs"])
def test_a_bucket_that_was_emptied_takes_no_save_and_no_new_start(
    swift: Swift, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prefix: str
) -> None:
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(VARIABLE, "")
    bucket = swift.new_bucket()
    uri = f"s3://{bucket}{prefix}"
    runs = tmp_path / "runs"
    marker = adopt_store(uri, JOB, runs)
    remember_job(runs, KnownJob(JOB, uri, marker))
    keys = [meta["Key"] for meta in swift.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == [f"{prefix}/_store/{marker}.json".lstrip("/")]
    job_store = Store.open(uri).sub(job_prefix(JOB))
    generation = open_generation(job_store, run="r", attempt=0)
    model = nn.Linear(4, 4)
    torch.manual_seed(1)
    with Checkpointer(job_store.uri, generation=generation) as saver:
        saver.save(1, model, None, {})
        saver.wait()
        empty(swift, bucket)
        saver.save(2, model, None, {})
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="is not the store that this job began in"):
            saver.wait()
        assert time.monotonic() - began < 30.0, "a save has 120 s, and this one need not wait"
    with pytest.raises(WrongStore):
        open_generation(job_store, run="r", attempt=1)
    assert "Contents" not in swift.client().list_objects_v2(Bucket=bucket), "nothing was written"
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(JobNotInStore, match="--from-scratch"):
        adopt_store(uri, JOB, runs)

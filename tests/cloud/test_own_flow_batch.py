"""A step with `@ebbflow` in AWS Batch, on the local stand-in: its machine is taken away, a retry goes on.

The job, its commits and its result are in the bucket; the flow's other steps run on this machine.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ebbflow.core.store import Store
from tests.support.batch.flow import ON_DEMAND, account
from tests.support.own_flow import SOURCES, OwnFlow
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]
_WAIT_SECONDS = 300.0


def await_remote_commit(store: Store) -> None:
    limit = time.monotonic() + _WAIT_SECONDS
    while not any("/commits/" in meta.key for meta in store.list("jobs")):
        assert time.monotonic() < limit, "no commit came"
        time.sleep(0.5)


def test_a_step_in_batch_survives_the_loss_of_its_machine_and_ends_equal(
    tmp_path: Path, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (SOURCES / "single.py").read_text()
    text = text.replace("import FlowSpec", "import batch, FlowSpec")
    text = text.replace("    @ebbflow", f'    @batch(queue="{ON_DEMAND}", cpu=1)\n    @ebbflow')
    bucket = swift.new_bucket()
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    image = {"STEP_SECONDS": "0.5", "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "4"}
    with account(tmp_path / "batch", swift, image=image) as batch:
        environment = batch.environment(bucket, swift.environment())
        flow = OwnFlow(tmp_path / "flow", "single", text=text, **environment)
        launcher = flow.start("run")
        await_remote_commit(Store.open(f"s3://{bucket}/metaflow/ebbflow"))
        [job] = [job for job in batch.jobs() if job["status"] == "RUNNING"]
        batch.reclaim(job["jobId"], notice=False)
        done = flow.finish(launcher)
        assert done.exit_code == 0, done.output
        model = flow.model(done)
    undisturbed = OwnFlow(tmp_path / "undisturbed", "single")
    clean = undisturbed.model(undisturbed.succeed("run"))
    assert (model.outcome, model.steps, model.interruptions) == ("completed", 24, 1)
    assert model.weights_sha256 == clean.weights_sha256
    assert model.store == f"s3://{bucket}/metaflow/ebbflow"
    assert model.price_kind.startswith("recorded")
    assert model.usd > 0

"""Steps with `@ebbflow` in AWS Batch, on the local stand-in: a machine is taken away, a retry goes on.

The jobs, their commits and their results are in the bucket; the flows' other steps run on this
machine.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ebbflow.core.store import Store
from tests.support.batch.flow import ON_DEMAND, account
from tests.support.long_tests import mark_long
from tests.support.own_flow import SOURCES, OwnFlow
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1500)]
_WAIT_SECONDS = 600.0  # on a machine with other work
_SLOW = {"STEP_SECONDS": "0.5"}  # `@environment` of the launcher goes before the image's
_RETRIED = ("--with", "retry:times=2,minutes_between_retries=0")  # for steps without @retry


def await_remote_commit(store: Store) -> None:
    limit = time.monotonic() + _WAIT_SECONDS
    while not any("/commits/" in meta.key for meta in store.list("jobs")):
        assert time.monotonic() < limit, "no commit came"
        time.sleep(0.5)


def on_batch(folder: Path, name: str, environment: dict[str, str]) -> OwnFlow:
    text = (SOURCES / f"{name}.py").read_text()
    text = text.replace("from metaflow import ", "from metaflow import batch, ", 1)
    where = f'    @batch(queue="{ON_DEMAND}", cpu=1)\n'
    text = text.replace("    @ebbflow", f"{where}    @ebbflow", 1)
    return OwnFlow(folder, name, text=text, **environment)


@pytest.mark.parametrize(
    "name", mark_long(["single", "gang", "configured"], ["single", "configured"])
)
def test_a_step_in_batch_survives_the_loss_of_a_machine_and_ends_equal(
    name: str, tmp_path: Path, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = OwnFlow(tmp_path / "undisturbed", name)
    clean = undisturbed.model(undisturbed.succeed("run"))
    bucket = swift.new_bucket()
    for variable, value in swift.environment().items():
        monkeypatch.setenv(variable, value)
    image = {"EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "4", **_SLOW}
    with account(tmp_path / "batch", swift, image=image) as batch:
        environment = batch.environment(bucket, swift.environment())
        flow = on_batch(tmp_path / "flow", name, environment)
        launcher = flow.start("run", *_RETRIED, **_SLOW)
        await_remote_commit(Store.open(f"s3://{bucket}/metaflow/ebbflow"))
        [job] = [job for job in batch.jobs() if job["status"] == "RUNNING"]
        batch.reclaim(job["jobId"], node=1 if name == "gang" else 0, notice=False)
        done = flow.finish(launcher, seconds=_WAIT_SECONDS)
        assert done.exit_code == 0, done.output
        model = flow.model(done)
        if name == "configured":
            assert flow.artifacts(done, "train", "plain")[0][0].outcome == "completed"
    assert (model.outcome, model.steps, model.interruptions) == ("completed", clean.steps, 1)
    assert model.weights_sha256 == clean.weights_sha256
    assert model.store == f"s3://{bucket}/metaflow/ebbflow"
    assert model.price_kind.startswith("recorded")
    assert model.usd > 0

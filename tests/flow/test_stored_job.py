"""A job that an earlier version of the program stored, and whose machine was killed, goes on under
this one.

`stored_job.tar.gz` was written by commit 99596e7, the last before the package was renamed to
`ebbflow`: a job of 16 steps on two nodes that was killed after the commit of step 8 (`runs/`), its
text (`texts/`), and what the same program reached without an interruption (`weights.safetensors`,
`expected.json`).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from ebbflow.training.checkpoint.commands import main as checkpoints
from tests.support.flow import FlowRunner

ARCHIVE = Path(__file__).with_name("stored_job.tar.gz")


def test_a_job_stored_by_an_earlier_version_resumes_and_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    config = tmp_path / "runs" / "jobs" / "stored" / "config.json"
    # The text moved too
    config.write_text(config.read_text().replace("/srv/job/part/texts", str(tmp_path / "texts")))
    expected = json.loads((tmp_path / "expected.json").read_text())
    flow = FlowRunner(tmp_path)
    settings = {
        "model__hidden_size": 8,
        "model__num_layers": 1,
        "model__num_heads": 2,
        "model__sequence_length": 16,
        "training__batch_size": 4,
        "training__max_steps": 16,
        "training__evaluation_interval_steps": 16,
        "checkpoint__interval": "steps",
        "checkpoint__interval_steps": 4,
        "checkpoint__when_busy": "wait",
        "checkpoint__keep_last": 1,
        "data__path": tmp_path / "texts",
        "data__suffixes": '[".txt"]',
        "data__held_out_fraction": 0.3,
        "data__held_out_samples": 4,
        # A deadline counts from the first start, of a day long past
        "cost__deadline_hours": "null",
    }
    done = flow.run("run", "--job", "stored", *flow.options(**settings))
    assert done.exit_code == 0, done.output
    events = [event for event in flow.events() if event.get("generation") == 2]
    assert {event["step"] for event in events if event["name"] == "restore"} == {8}
    losses = {
        event["step"]: event["data"]["loss"]
        for event in events
        if (event["name"], event["rank"]) == ("step", 0)
    }
    assert list(losses) == list(range(9, 17)), "each step once, from the stored commit on"
    assert all(abs(loss - expected["losses"][str(step)]) < 1e-5 for step, loss in losses.items())
    weights = tmp_path / "reached.safetensors"
    assert (
        checkpoints(
            ["export", str(tmp_path / "runs" / "jobs" / "stored"), str(weights), "--weights-only"]
        )
        == 0
    )
    reached = load_file(weights)
    stored = load_file(tmp_path / "weights.safetensors")
    assert reached.keys() == stored.keys()
    assert all(torch.allclose(reached[name], stored[name], rtol=0, atol=1e-5) for name in stored)
    if (torch.__version__, torch.backends.cpu.get_cpu_capability()) == (
        expected["torch"],
        expected["cpu"],
    ):
        assert done.report["weights_sha256"] == expected["weights_sha256"], (
            "the same kernels: bit for bit"
        )

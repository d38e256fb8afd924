"""Five kinds of users' scripts, each with its commits in a bucket: killed, told to leave, and with a lost node.

pytest -n 0 -s tests/soak/soak_script_matrix.py
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.support.attached_scripts import attached, commits, events_of, finish, interrupt, output, start
from tests.support.flow import FlowRunner, assert_ledger_adds_up
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]

_TRAINER = ("accelerate", "peft", "transformers.trainer")
# script: (file, arguments, libraries, steps on one rank)
SCRIPTS = {
    "nanoGPT-style": ("nano_gpt", [], (), 24),
    "ResNet with BatchNorm": ("resnet", [], (), 24),
    "HF Trainer": ("hugging_face", [], _TRAINER, 24),
    "HF Trainer with LoRA": ("hugging_face", ["--lora"], _TRAINER, 24),
    "Lightning": ("lightning_mlp", [], ("lightning.pytorch",), 30),
}
_DDP = 'torch.distributed.init_process_group("gloo")\n{0}model = nn.parallel.DistributedDataParallel(model)\n{0}'
# What a script needs for two ranks, and that only rank 0 writes the final weights.
TWO_RANKS = {
    "nano_gpt": [
        ("optimizer = torch", _DDP.format("") + "torch.manual_seed(torch.distributed.get_rank())\noptimizer = torch")
    ],
    "resnet": [
        ("optimizer = torch", _DDP.format("    ") + "optimizer = torch"),
        (
            "    loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=2)",
            "    images, rank = Images(), int(os.environ['RANK'])\n"
            "    order = torch.utils.data.DistributedSampler(images, 2, rank)\n"
            "    loader = DataLoader(images, batch_size=8, sampler=order, num_workers=2)",
        ),
        ("import random\n", "import os\nimport random\n"),
    ],
    "hugging_face": [("torch.save(", "trainer.args.process_index or torch.save(")],
    "lightning_mlp": [
        ("    max_epochs=3,", "    max_epochs=3,\n    num_nodes=2 // LOCAL,\n    devices=LOCAL,"),
        ("import random\n", 'import os\nimport random\nLOCAL = int(os.environ["LOCAL_WORLD_SIZE"])\n'),
        ("torch.save(", "trainer.global_rank or torch.save("),
    ],
}


def _weights(script: Path) -> object:
    """Return the tensors that the script has saved at its end, or the digest of those of its job."""
    if (script.parent / "final.pt").exists():
        return {name: value.tolist() for name, value in torch.load(script.parent / "final.pt").items()}
    return [one.data["weights_sha256"] for one in events_of(script) if one.name == "outcome"][-1]


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM"])
def test_a_signal_and_an_empty_disk(
    kind: str, fault: str, tmp_path: Path, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, words, libraries, steps = SCRIPTS[kind]
    whole, stopped, fresh = (attached(tmp_path / one, name) for one in ("whole", "stopped", "fresh"))
    finish(start(whole, "0", *words, libraries=libraries), whole)
    expected = _weights(whole)
    for variable, value in {**swift.environment(), "EBBFLOW__STORE": f"s3://{swift.new_bucket()}/p"}.items():
        monkeypatch.setenv(variable, value)
    processes, number = start(stopped, "0.1", *words, libraries=libraries), signal.Signals[fault]
    interrupt(processes, stopped, 5, number)
    finish(processes, stopped, 75 if fault == "SIGTERM" else -number)
    assert not (stopped.parent / "runs").exists()
    shutil.rmtree(stopped.parent)
    before = commits(fresh)[-1]
    finish(start(fresh, "0", *words, libraries=libraries), fresh)
    events = [event for event in events_of(fresh) if event.name == "step"]
    assert {event.step for event in events} == set(range(1, steps + 1)) and "goes on from step" in output(fresh)
    assert _weights(fresh) == expected
    assert fault == "SIGKILL" or len(events) == steps, "a script that was told to leave saves its last step"
    print(f"\n| {kind} | {fault}, empty disk | goes on from step {before} of {steps} | bit-equal |")


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_lost_node_of_two(kind: str, tmp_path: Path, swift: Swift) -> None:
    name, words, libraries, _ = SCRIPTS[kind]
    whole, lost = attached(tmp_path / "whole", name), attached(tmp_path / "lost", name)
    for script in (whole, lost):
        for before, after in TWO_RANKS[name]:
            assert script.read_text().count(before) == 1
            script.write_text(script.read_text().replace(before, after))
    finish(start(whole, "0", *words, ranks=2, libraries=libraries), whole)
    runner = FlowRunner(tmp_path / "flow", store=f"s3://{swift.new_bucket()}/p", environment=swift.environment())
    settings = {"script": json.dumps(str(lost)), "script_args": json.dumps(["0.1", *words]), "store": runner.store}
    settings |= {"checkpoint.interval": "steps", "checkpoint.interval_steps": 4, "cluster.nodes": 2}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run = runner.run("run", *options, "--rehearse", "node-loss@step:9:node=1", timeout=600)
    assert run.exit_code == 0, run.output
    report = run.report
    assert report["outcome"] == "completed" and report["interruptions"] == 1, report
    assert_ledger_adds_up(report)
    final = runner.folder / "final.pt"
    found = _weights(final.with_name("script.py")) if final.exists() else report["weights_sha256"]
    assert found == _weights(whole)
    print(f"\n| {kind} | node loss, 2 ranks | {report['redone_steps']} redone steps | bit-equal |")

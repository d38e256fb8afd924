"""Five kinds of users' scripts, each with its commits in a bucket: killed, told to leave, and with
a lost node.

Each script records the samples of each optimizer step. The history that survives, of the last
process that trained each step, must have the samples of an undisturbed run, each as often.

pytest -n 0 -s tests/soak/soak_script_matrix.py
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.attached_scripts import (
    attached,
    commits,
    events_of,
    finish,
    interrupt,
    output,
    start,
)
from tests.support.flow import FlowRunner, assert_ledger_adds_up
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]

_TRAINER = ("accelerate", "peft", "transformers.trainer")
# script: (file, arguments, libraries, steps on one rank, epochs; 0: samples are drawn with
# replacement)
SCRIPTS = {
    "nanoGPT-style": ("nano_gpt", [], (), 24, 0),
    "ResNet with BatchNorm": ("resnet", [], (), 24, 4),
    "HF Trainer": ("hugging_face", [], _TRAINER, 24, 3),
    "HF Trainer with LoRA": ("hugging_face", ["--lora"], _TRAINER, 24, 3),
    "Lightning": ("lightning_mlp", [], ("lightning.pytorch",), 30, 3),
}
_DDP = (
    'torch.distributed.init_process_group("gloo")\n{0}model = '
    "nn.parallel.DistributedDataParallel(model)\n{0}"
)
# What a script needs for two ranks, and that only rank 0 writes the final weights.
TWO_RANKS = {
    "nano_gpt": [
        (
            "optimizer = torch",
            _DDP.format("") + "torch.manual_seed(torch.distributed.get_rank())\noptimizer = torch",
        )
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
        (
            "import random\n",
            'import os\nimport random\nLOCAL = int(os.environ["LOCAL_WORLD_SIZE"])\n',
        ),
        ("torch.save(", "trainer.global_rank or torch.save("),
    ],
}

# How a script tells the samples that it trains on. None of it changes a weight.
SAMPLES = {
    "nano_gpt": [
        (
            "(batch_size,)).tolist()\n",
            "(batch_size,)).tolist()\n    model.training and record(starts)\n",
        )
    ],
    "resnet": [
        ("self.labels[index]", "self.labels[index] + 4 * index"),
        (
            "labels in loader:\n",
            "labels in loader:\n            labels = record(labels // 4) or labels % 4\n",
        ),
    ],
    "hugging_face": [
        # the loss skips the first label
        (
            "        return {",
            "        labels = torch.cat([torch.tensor([index]), ids[1:]])\n        return {",
        ),
        ('"labels": ids', '"labels": labels'),
        (
            "args = T",
            "model.register_forward_pre_hook(lambda _, __, named: record(named['labels'][:, 0]), "
            "with_kwargs=True)\nargs = T",
        ),
    ],
    "lightning_mlp": [
        ("keepdim=True)", "keepdim=True), torch.arange(80)"),
        (
            "        features, targets = batch",
            "        features, targets, samples = batch\n        record(samples)",
        ),
    ],
}
_RECORD = """
def record(samples):
    pending.extend(map(int, samples))


def write_samples(*_):
    import ebbflow.training.attach.loop as attached, json, os, time
    if pending:
        rank, step = int(os.environ.get("RANK", 0)), attached.current.step + 1
        with open({folder!r} + f"/{{os.getpid()}}.jsonl", "a") as file:
            file.write(json.dumps([time.time(), os.getpid(), rank, step, pending]) + "\\n")
        pending.clear()


from torch.optim.optimizer import register_optimizer_step_post_hook

pending = []
register_optimizer_step_post_hook(write_samples)
"""


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM"])
def test_a_signal_and_an_empty_disk(
    kind: str, fault: str, tmp_path: Path, swift: Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, words, libraries, steps, epochs = SCRIPTS[kind]
    quiet = tmp_path / "quiet"
    disturbed = tmp_path / "disturbed"
    whole = _recorded(attached(tmp_path / "whole", name), name, quiet)
    stopped, fresh = (
        _recorded(attached(tmp_path / copy, name), name, disturbed) for copy in ("stopped", "fresh")
    )
    finish(start(whole, "0", *words, libraries=libraries), whole)
    expected = _weights(whole)
    for variable, value in {
        **swift.environment(),
        "EBBFLOW__STORE": f"s3://{swift.new_bucket()}/p",
    }.items():
        monkeypatch.setenv(variable, value)
    processes = start(stopped, "0.1", *words, libraries=libraries)
    number = signal.Signals[fault]
    interrupt(processes, stopped, 5, number)
    finish(processes, stopped, 75 if fault == "SIGTERM" else -number)
    assert not (stopped.parent / "runs").exists()
    shutil.rmtree(stopped.parent)
    before = commits(fresh)[-1]
    finish(start(fresh, "0", *words, libraries=libraries), fresh)
    events = [event for event in events_of(fresh) if event.name == "step"]
    assert {event.step for event in events} == set(
        range(1, steps + 1)
    ) and "goes on from step" in output(fresh)
    assert _weights(fresh) == expected
    assert fault == "SIGKILL" or len(events) == steps, (
        "a script that was told to leave saves its last step"
    )
    samples = _compare_samples(quiet, disturbed, epochs)
    print(
        f"\n| {kind} | {fault}, empty disk | goes on from step {before} of {steps} | bit-equal | "
        f"{samples} |"
    )


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_lost_node_of_two(kind: str, tmp_path: Path, swift: Swift) -> None:
    name, words, libraries, _, epochs = SCRIPTS[kind]
    quiet = tmp_path / "quiet"
    disturbed = tmp_path / "disturbed"
    whole = _recorded(attached(tmp_path / "whole", name), name, quiet)
    lost = _recorded(attached(tmp_path / "lost", name), name, disturbed)
    for script in (whole, lost):
        for before, after in TWO_RANKS[name]:
            assert script.read_text().count(before) == 1
            script.write_text(script.read_text().replace(before, after))
    finish(start(whole, "0", *words, ranks=2, libraries=libraries), whole)
    runner = FlowRunner(
        tmp_path / "flow", store=f"s3://{swift.new_bucket()}/p", environment=swift.environment()
    )
    settings = {
        "script": json.dumps(str(lost)),
        "script_args": json.dumps(["0.1", *words]),
        "store": runner.store,
    }
    settings |= {"checkpoint.interval": "steps", "checkpoint.interval_steps": 4, "cluster.nodes": 2}
    options = []
    for key, value in settings.items():
        options.extend(("--set", f"{key}={value}"))
    run = runner.run("run", *options, "--rehearse", "node-loss@step:9:node=1", timeout=600)
    assert run.exit_code == 0, run.output
    # By the trial before the plan
    assert f"{name}.py: " in run.output and "steps: measured on the CPU" in run.output
    report = run.report
    assert report["outcome"] == "completed" and report["interruptions"] == 1, report
    assert_ledger_adds_up(report)
    final = runner.folder / "final.pt"
    if final.exists():
        found = _weights(final.with_name("script.py"))
    else:
        found = report["weights_sha256"]
    assert found == _weights(whole)
    samples = _compare_samples(quiet, disturbed, epochs)
    print(
        f"\n| {kind} | node loss, 2 ranks | {report['redone_steps']} redone steps | bit-equal | "
        f"{samples} |"
    )


def _recorded(script: Path, name: str, folder: Path) -> Path:
    """Let a script write the samples of each step to a file of its process in `folder`."""
    folder.mkdir(exist_ok=True)
    text = script.read_text()
    for before, after in [
        *SAMPLES[name],
        ("import torch\n", "import torch\n" + _RECORD.format(folder=str(folder))),
    ]:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    script.write_text(text)
    return script


def _history(folder: Path) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Return the samples of each rank and step that survive, and how many were trained in vain."""
    lines = []
    for path in folder.glob("*.jsonl"):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    lines.sort()
    survives: dict[tuple[int, int], list[int]] = {}
    begun: set[int] = set()
    for _, process, rank, step, samples in lines:
        if process not in begun:  # what it resumes from has the steps before, and no later one
            begun.add(process)
            survives = {
                key: value for key, value in survives.items() if key[0] != rank or key[1] < step
            }
        assert (rank, step) not in survives, f"rank {rank} trained step {step} twice in one history"
        survives[rank, step] = samples
    return survives, sum(len(line[-1]) for line in lines) - sum(map(len, survives.values()))


def _compare_samples(quiet: Path, disturbed: Path, epochs: int) -> str:
    """Check the samples of a disturbed run, and return their number as cells of a table."""
    (expected, none) = _history(quiet)
    (found, again) = _history(disturbed)
    assert none == 0 and expected and found.keys() == expected.keys(), sorted(
        expected.keys() ^ found.keys()
    )
    counts = Counter(itertools.chain.from_iterable(found.values()))
    wanted = Counter(itertools.chain.from_iterable(expected.values()))
    lost = (wanted - counts).total()
    twice = (counts - wanted).total()
    assert found == expected and not lost and not twice, (lost, twice)
    assert not epochs or set(counts.values()) == {epochs}, "each sample once in each epoch"
    return f"{counts.total()} samples of {len(counts)}, {lost} lost, {twice} twice, {again} redone"


def _weights(script: Path) -> object:
    """Return the tensors that the script has saved at its end, or the digest of those of its job."""
    if (script.parent / "final.pt").exists():
        return {
            name: value.tolist() for name, value in torch.load(script.parent / "final.pt").items()
        }
    return [event.data["weights_sha256"] for event in events_of(script) if event.name == "outcome"][
        -1
    ]

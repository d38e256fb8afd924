"""Users' scripts, at length: the flow loses a node, commits are in a bucket, and the doctor meets
planted bugs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.attached_scripts import ROOT, SCRIPTS, attached, events_of, finish, start
from tests.support.batch.flow import PREFIX, BatchRunner, account
from tests.support.flow import FlowRunner, assert_ledger_adds_up
from tests.support.planted_resume_bugs import OTHERS, PLANTED, plant
from tests.support.swift import Swift

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]

# Planted bugs for which the doctor knows no repair, or none of one statement
_WITHOUT_REPAIR = {
    "batches",
    "epoch",
    "statistics",
    "sampler",
    "nothing",
    "DDP epoch",
    "DDP random states",
}
# Counts that nothing uses, planted into a sound script: before the loop, and in each of its steps.
_UNUSED = """    import time
    began, class_of = time.time(), type("Meter", (), {"__module__": __name__})
    meter = class_of()
    meter.n = meter.wall = seen_since_start = saves = last_log = 0
"""
_COUNTED = """            meter.n += 2
            meter.wall = int((time.time() - began) * 1e6)
            seen_since_start += 8
            saves += 1 if global_step % 3 == 1 else 0
            if global_step - last_log >= 2:
                print(f"{seen_since_start} of {saves}", meter.n)
                last_log = global_step
"""


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_script_in_the_flow_loses_a_node_and_ends_bit_equal(
    place: str, tmp_path: Path, swift: Swift
) -> None:
    whole = attached(tmp_path / "whole", "ddp")
    lost = attached(tmp_path / "lost", "ddp")
    finish(start(whole, ranks=2), whole)
    if place == "bucket":
        bucket = {"store": f"s3://{swift.new_bucket()}/p", "environment": swift.environment()}
    else:
        bucket = {}
    runner = FlowRunner(tmp_path / "flow", **bucket)
    settings = {"script": json.dumps(str(lost)), "script_args": '["0.05"]', "store": runner.store}
    settings |= {"checkpoint.interval": "steps", "checkpoint.interval_steps": 5, "cluster.nodes": 2}
    words = []
    for key, value in settings.items():
        words.extend(("--set", f"{key}={value}"))
    run = runner.run("run", *words, "--rehearse", "node-loss@step:12:node=1")
    assert run.exit_code == 0, run.output
    report = run.report
    assert (
        report["outcome"] == "completed"
        and report["interruptions"] == 1
        and report["redone_steps"] > 0
    )
    assert report["weights_sha256"] == _weights(whole)
    assert report["events"]["promise"]["level"] == "bit for bit" and report["plan"]["steps"] == 30
    assert_ledger_adds_up(report)


def test_a_script_and_its_folder_are_sent_to_batch_and_a_killed_rank_is_replaced(
    tmp_path: Path, swift: Swift
) -> None:
    """x"""
    whole = attached(tmp_path / "whole", "nano_gpt")
    sent = attached(tmp_path / "sent", "nano_gpt")
    finish(start(whole), whole)
    sent.write_text(
        sent.read_text().replace("import ebbflow\n", "import ebbflow\nimport utils.helper\n")
    )
    (sent.parent / "utils").mkdir()
    (sent.parent / "utils" / "helper.py").write_text("print('helped in', __file__, flush=True)\n")
    with account(tmp_path / "batch", swift) as batch:
        runner = BatchRunner(tmp_path / "flow", swift, batch)
        own = {
            "script": json.dumps(str(sent)),
            "script_args": '["0.05"]',
            "checkpoint__interval": "steps",
        }
        options = runner.options(**own, checkpoint__interval_steps=5)
        run = runner.run(
            "run", "--with", "batch", *options, "--rehearse", "rank-kill@step:12", timeout=900
        )
        assert run.exit_code == 0, run.output
        assert run.report["weights_sha256"] == _weights(whole) and run.report["interruptions"] == 1
        assert any(key.startswith(f"{PREFIX}/scripts/") for key in runner.keys(PREFIX))


def test_a_script_that_hangs_is_named_and_started_again(tmp_path: Path) -> None:
    script = attached(tmp_path, "ddp")
    command = [
        sys.executable,
        "-m",
        "ebbflow",
        "run",
        "ddp.py",
        "--ranks",
        "2",
        "--rehearse",
        "sleep@step:12:rank=1",
    ]
    command += [
        "--set",
        "survival.hang_floor_seconds=3",
        "--set",
        "checkpoint.interval_steps=5",
        "--",
        "0.02",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "at step 12 in forward, training/rehearse.py" in done.stdout, (
        done.stdout
    )
    assert "completed at step 30" in done.stdout
    assert [
        event.data["reason"] for event in events_of(script) if event.name == "generation_ended"
    ] == [
        "hang",
        "completed",
    ]


@pytest.mark.parametrize("name", ["hugging_face", "lightning_mlp"])
def test_a_trainer_commits_without_a_changed_line(name: str, tmp_path: Path) -> None:
    found = []
    for fault in ([], ["--rehearse", "rank-kill@step:12"]):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        shutil.copy(SCRIPTS / f"{name}.py", folder)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5",
        }
        pause = "0.3"  # so that the commit of step 5 is durable before step 12
        words = [sys.executable, "-m", "ebbflow", "run", f"{name}.py", *fault, "--", pause]
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(torch.load(folder / "final.pt"))
    assert "goes on from step" in done.stdout
    assert found[0].keys() == found[1].keys() and all(
        torch.equal(found[0][key], found[1][key]) for key in found[0]
    )


@pytest.mark.parametrize("name", PLANTED | OTHERS)
def test_the_doctor_finds_a_planted_bug(name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    if name in OTHERS:
        source = OTHERS[name][0]
    else:
        source = "resumable"
    script.write_text(plant((SCRIPTS / f"{source}.py").read_text(), name))
    code, text = _doctor(script)
    assert code == 1 and (PLANTED | OTHERS)[name][-1] in text, text
    assert ("fix (tried: train.py then resumes exactly)" in text) == (name not in _WITHOUT_REPAIR)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", "resumes exactly, bit for bit"),
        (
            'in ("model", "optimizer", "scheduler"):',
            'in ("model", "scheduler"):',
            "self.optimizer (Adam): its state is",
        ),
        (
            "self.epoch, self.step = state",
            "_, self.step = state",
            "self.epoch: the count starts anew",
        ),
    ],
)
def test_the_doctor_looks_into_the_classes_of_a_script(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    text = (SCRIPTS / "own_trainer.py").read_text()
    assert not old or text.count(old) == 1
    (tmp_path / "train.py").write_text(text.replace(old, new) if old else text)
    code, text = _doctor(tmp_path / "train.py")
    assert code == int(bool(old)) and says in text, text


@pytest.mark.parametrize(
    "name",
    ["resumable", "plain", "resumable_ema", "resumable_ddp", "nano_gpt", "resnet", "accelerated"],
)
def test_the_doctor_raises_no_false_alarm(name: str, tmp_path: Path) -> None:
    if name == "plain" or name.startswith("resumable"):
        script = tmp_path / "train.py"
        text = (SCRIPTS / f"{name if name != 'plain' else 'resumable'}.py").read_text()
        if name == "plain":  # what it does not restore is never drawn from
            text = text.replace("nn.Dropout(0.2), ", "").replace("0.1 * random.random()", "0.1")
            text = text.replace('        torch.set_rng_state(checkpoint["rng"])\n', "")
            text = text.replace('        random.setstate(checkpoint["random"])\n', "")
        script.write_text(text)
    else:
        script = attached(tmp_path, name)
    code, text = _doctor(script)
    assert code == 0 and "resumes exactly, bit for bit" in text and "remark" not in text, text


@pytest.mark.parametrize("bug", ["", "step"])
def test_the_doctor_only_remarks_on_counts_that_nothing_uses(bug: str, tmp_path: Path) -> None:
    text = (SCRIPTS / "resumable.py").read_text()
    if bug:
        text = plant(text, bug)
    for before, new in (
        ("    shuffle = torch.Generator()\n", _UNUSED),
        ("            global_step += 1\n", _COUNTED),
    ):
        assert text.count(before) == 1
        text = text.replace(before, before + new)
    (tmp_path / "train.py").write_text(text)
    code, said = _doctor(tmp_path / "train.py")
    assert code == bool(bug) and ("global_step: the count starts anew" in said) == bool(bug), said
    remark = "remark: not restored, and no weight depends on it in these steps: "
    assert (
        f"{remark}seen_since_start at train.py:" in said and f"{remark}meter.n at train.py:" in said
    ), said
    assert "wall" not in said, said


def _weights(script: Path) -> str:
    return next(
        event.data["weights_sha256"] for event in events_of(script) if event.name == "outcome"
    )


def _doctor(script: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ebbflow", "doctor", script.name, "--kills", "1", "--", *words]
    done = subprocess.run(
        command,
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=400,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    return done.returncode, done.stdout + done.stderr

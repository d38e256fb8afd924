"""A user's own script, attached: killed, told to leave, resumed, and equal bit for bit to an undisturbed run."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.support.forked_scripts import (
    SCRIPTS,
    attached,
    commits,
    events_of,
    final_state,
    finish,
    interrupt,
    output,
    preload,
    start,
)

PAUSE = "0.02"  # per step, so that a signal comes in mid-job
# script: (ranks, steps, lines that a user may change)
CORPUS = {"ddp": (2, 30, 3), "fsdp2": (2, 24, 3), "nano_gpt": (1, 24, 4), "resnet": (1, 24, 3)}


# script: (libraries, steps, lines that a user may change)
LIBRARIES = {
    "hugging_face": (("accelerate", "transformers.trainer"), 24, 4),
    "lora": (("accelerate", "peft", "transformers.trainer"), 24, 4),
    "lightning_mlp": (("lightning.pytorch",), 30, 4),
}


@pytest.mark.parametrize("name", CORPUS | LIBRARIES)
def test_the_patch_of_a_script_is_as_small_as_promised(name: str) -> None:
    lines = [line for line in (SCRIPTS / f"{name}.patch").read_text().splitlines() if line[:3] not in ("---", "+++")]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    assert 0 < max(added, removed) <= (CORPUS | LIBRARIES)[name][2]


@pytest.mark.parametrize("name", CORPUS)
def test_a_script_that_is_killed_and_told_to_leave_ends_bit_equal(tmp_path: Path, name: str) -> None:
    ranks, steps, _ = CORPUS[name]
    whole, stopped = attached(tmp_path / "whole", name), attached(tmp_path / "stopped", name)
    undisturbed = start(whole, ranks=ranks)
    processes = start(stopped, PAUSE, ranks=ranks)
    interrupt(processes, stopped, 5, signal.SIGKILL)
    finish(processes, stopped, -signal.SIGKILL)
    processes = start(stopped, PAUSE, ranks=ranks)
    interrupt(processes, stopped, 10, signal.SIGTERM, ranks=[0])  # the other ranks leave with rank 0
    finish(processes, stopped, 75)
    finish(start(stopped, ranks=ranks), stopped)
    finish(undisturbed, whole)
    assert final_state(stopped, steps) == final_state(whole, steps)
    events = events_of(stopped)
    assert [event.data["outcome"] for event in events if event.name == "outcome"] == ["interrupted", "completed"]
    assert {event.step for event in events if event.name == "step"} == set(range(1, steps + 1))
    assert output(stopped).count("goes on from step") == 2
    steps_of = [(event.generation, event.step) for event in events if event.name == "step" and event.rank == 0]
    last = max(step for generation, step in steps_of if generation == 2 and step)
    assert (3, last + 1) in steps_of and (3, last) not in steps_of, (
        "a script that was told to leave saves its last step"
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_script_of_a_library_resumes_on_an_empty_disk(tmp_path: Path, name: str) -> None:
    libraries, steps, _ = LIBRARIES[name]
    for package in (library.partition(".")[0] for library in libraries):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (requirements-dev.txt)")
    preload(*libraries)
    whole, stopped = attached(tmp_path / "whole", name), attached(tmp_path / "stopped", name)
    undisturbed = start(whole)
    for step, number, code in ((5, signal.SIGKILL, -signal.SIGKILL), (10, signal.SIGTERM, 75)):
        processes = start(stopped, "0.05")
        interrupt(processes, stopped, step, number)
        finish(processes, stopped, code)
        for folder in ("output", "ebbflow-checkpoints"):
            shutil.rmtree(stopped.parent / folder, ignore_errors=True)
    finish(start(stopped), stopped)
    finish(undisturbed, whole)
    ours, expected = (torch.load(script.parent / "final.pt") for script in (stopped, whole))
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in ours)
    events = events_of(stopped)
    assert [event.data["outcome"] for event in events if event.name == "outcome"] == ["interrupted", "completed"]
    assert {event.step for event in events if event.name == "step"} == set(range(1, steps + 1))
    assert commits(stopped)[-1] == steps and output(stopped).count("goes on from step") == 2

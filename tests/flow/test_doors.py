"""The code of README's four doors runs as it is printed: a configuration, a script, a flow's step and
a model of Hugging Face.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.attached_scripts import commits, finish, start
from tests.support.gangs import run_ranks
from tests.support.own_flow import OwnFlow

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.flow

SCRIPT = """
import torch
from torch import nn

import ebbflow

loader = torch.utils.data.DataLoader(torch.randn(32, 6), batch_size=8)
model = nn.Linear(6, 1)
optimizer = torch.optim.AdamW(model.parameters())

def training_step(model, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    return loss

"""
FLOW = """
from metaflow import FlowSpec, current, ebbflow, retry, step

class DoorFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train)

{train}
        self.next(self.end)

    @step
    def end(self):
        self.steps = self.model.steps

if __name__ == "__main__":
    DoorFlow()
"""


def block(language: str, words: str) -> str:
    """Return README's only block of a language with these words."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    [chosen] = [text for text in blocks if words in text]
    return chosen


def train(folder: Path, text: str, settings: dict[str, object]) -> list[str]:
    """Train a configuration for two steps on the CPU, and return the commits of the job `door`."""
    file = folder / "my.yaml"
    file.write_text(text)
    words = [str(file), "--job", "door"]
    shorter = {"training.max_steps": 2, "cluster.device": "cpu", "store": folder / "store"}
    for key, value in {**settings, **shorter}.items():
        words += ["--set", f"{key}={value}"]
    run_ranks(1, ["-m", "ebbflow.training", *words])
    return os.listdir(folder / "store" / "jobs" / "door" / "commits")


def test_the_configuration_trains(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Sing, goddess, the anger of Peleus' son Achilles. " * 4000)
    text = block("yaml", "book.txt").replace("book.txt", str(book))
    assert train(tmp_path, text, {"training.batch_size": 4, "data.held_out_samples": 2})


def test_the_script_commits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + block("python", "ebbflow.attach"))
    finish(start(script), script)
    assert commits(script)[-1] == 16


def test_the_step_of_a_flow_trains(tmp_path: Path) -> None:
    lines = block("python", "@ebbflow").splitlines()
    step = "\n".join(f"    {line}".rstrip() for line in lines)
    flow = OwnFlow(tmp_path, "door", text=FLOW.format(train=step))
    done = flow.succeed("run")
    assert flow.artifacts(done, "end", "steps") == [[24]]


def test_the_named_model_is_tuned(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    from tests.gang.test_hugging_face import TIED, random_model

    folder = tmp_path / "qwen"
    random_model(TIED, folder)
    text = block("yaml", "HuggingFace").replace("models/qwen", str(folder))
    text = text.replace("rows.jsonl", str(tmp_path / "data.jsonl"))
    assert train(tmp_path, text, {"model.sequence_length": 32, "parallel.mode": "ddp"})

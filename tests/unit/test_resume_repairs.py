"""Repairs that the doctor tries: what is edited, and what is never proposed."""

import ast

import pytest

from ebbflow.tryout.resume_findings import LostState
from ebbflow.tryout.resume_patches import Places, explain
from ebbflow.tryout.resume_repairs import apply_repairs, propose_repairs
from tests.support.attached_scripts import SCRIPTS
from tests.support.planted_resume_bugs import PLANTED, plant

SCRIPT = """\
import torch

def save(state):
    torch.save({"model": state}, "c.pt")

if resumes:
    ckpt = torch.load("c.pt")
    model.load_state_dict(ckpt["model"])
    start = ckpt["epoch"]
for epoch in range(start, 3):
    save(model.state_dict())
"""
PLACES = Places("train.py", save="train.py:4", load="train.py:7")


def repaired(*findings: LostState, source: str = SCRIPT, places: Places = PLACES) -> list[str]:
    trials = propose_repairs({"train.py": source}, findings, places)
    texts = [apply_repairs({"train.py": source}, trial)["train.py"] for trial in trials]
    for text in texts:
        ast.parse(text)
    return texts


def test_a_lost_object_is_saved_too_and_restored_after_the_block_that_loads() -> None:
    (text,) = repaired(LostState("SGD", "optimizer"))

    assert 'torch.save(dict({"model": state}, optimizer=optimizer.state_dict()), "c.pt")' in text
    assert (
        "    start = ckpt[\"epoch\"]\n    optimizer.load_state_dict(ckpt['optimizer'])\nfor" in text
    )


def test_what_is_saved_already_is_only_restored() -> None:
    source = SCRIPT.replace('"model": state', '"model": state, "optimizer": state')

    (text,) = repaired(LostState("SGD", "optimizer"), source=source)

    assert text.count("optimizer") == 3 and "dict(" not in text.replace("state_dict(", "")


def test_what_the_script_restores_already_is_never_proposed_again() -> None:
    source = SCRIPT.replace("start = ckpt", "epoch = ckpt")

    texts = repaired(LostState("counter", "epoch"), source=source)

    assert [text.splitlines()[8].strip() for text in texts] == [
        'epoch = ckpt["epoch"] + 1',
        'epoch = ckpt["epoch"] - 1',
    ]


def test_an_addition_to_a_restored_number_is_taken_back_first() -> None:
    source = SCRIPT.replace('ckpt["epoch"]', 'ckpt["epoch"] + 1')

    trials = propose_repairs({"train.py": source}, [LostState("data", "")], PLACES)

    assert trials[0][0].lines == ("line 9: start = ckpt['epoch']",)
    assert 'ckpt["epoch"] + 1 - 1' in repaired(LostState("data", ""), source=source)[0]


def test_a_generator_is_saved_and_restored_by_its_own_state() -> None:
    (text,) = repaired(LostState("Generator", "shuffle"))

    assert "shuffle=shuffle.get_state())" in text
    assert "shuffle.set_state(ckpt['shuffle'])" in text


@pytest.mark.parametrize("kind", ["start", "weights", "buffers"])
def test_a_loss_without_a_variable_has_no_repair(kind: str) -> None:
    assert repaired(LostState(kind, "")) == []
    assert repaired(LostState("SGD", "optimizer"), LostState(kind, "")) == []


def test_a_script_whose_loading_line_is_unknown_has_no_repair() -> None:
    places = Places("train.py", save="train.py:4", load="")
    assert repaired(LostState("SGD", "optimizer"), places=places) == []


def test_an_attached_script_gives_the_object_to_attach() -> None:
    source = "job = ebbflow.attach(model,\n    optimizer)\n"
    places = Places("train.py", save="", load="", attached=True)
    finding = LostState("dict", "self.ema")

    assert repaired(finding, source=source, places=places) == [
        "job = ebbflow.attach(model,\n    optimizer, ema=self.ema)\n"
    ]
    told = "\n".join(explain({"train.py": source}, finding, places))
    assert "attach(…, ema=self.ema)" in told and "?" not in told and "let ebbflow" not in told


@pytest.mark.parametrize(
    "name", [name for name in PLANTED if name not in ("statistics", "sampler", "nothing")]
)
def test_a_repair_is_tried_for_each_planted_bug_that_has_one(name: str) -> None:
    source = plant((SCRIPTS / "resumable.py").read_text(), name)
    lines = source.splitlines()
    load = next(number for number, line in enumerate(lines, 1) if "torch.load(" in line)
    save = next(number for number, line in enumerate(lines, 1) if "torch.save(" in line)
    places = Places("train.py", f"train.py:{save}", f"train.py:{load}")
    subject, _, says = PLANTED[name][2].partition(": ")
    if "random state" in says:
        finding = LostState("random", subject)
    elif "count" in says:
        finding = LostState("counter", subject)
    elif says:
        finding = LostState("Object", subject.partition(" ")[0])
    else:
        finding = LostState("data", "")

    assert repaired(finding, source=source, places=places)

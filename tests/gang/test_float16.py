"""float16 trains with a loss scale: overflows are skipped, and a resumed job has the scale of its
commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import Event, read_events
from ebbflow.core.store import Store
from ebbflow.training.engine.guards.guards import LossScale
from tests.support.alone import run_alone

HALF = {"use_mixed_precision": True, "param_dtype": "float16"}


def configured(folder: Path, steps: int, **sections: Any) -> RunConfig:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(4):
        (texts / f"{number}.txt").write_text(f"{number} ebb and flow, " * 40)
    return RunConfig(
        store=str(folder / "store"),
        model={
            "architecture": "llama",
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 2,
            "sequence_length": 16,
        },
        data={"path": str(texts), "suffixes": [".txt"], "held_out_fraction": 0.3},
        training={
            "batch_size": 4,
            "max_steps": steps,
            "scheduler": {"type": "constant", "warmup_steps": 0},
        },
        checkpoint={"interval_steps": 1},
        **sections,
    )


def steps_of(folder: Path, job: str) -> dict[int, Event]:
    events = read_events(Store.open(str(folder / "store" / "jobs" / job)))
    return {event.step: event for event in events if event.name == "step"}


def test_overflows_are_skipped_and_a_resumed_job_keeps_the_loss_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The gradient of a logit is then beyond float16
    monkeypatch.setattr(LossScale, "FIRST", 2.0**24)
    monkeypatch.setattr(LossScale, "GOOD_STEPS", 3)
    whole = run_alone(configured(tmp_path, 20, fsdp=HALF), "whole")
    for steps in (4, 20):  # within the skipped steps
        part = run_alone(configured(tmp_path, steps, fsdp=HALF), "parts")
    assert whole.step == part.step == 20 and whole.weights_sha256 == part.weights_sha256
    found = steps_of(tmp_path, "whole")
    again = steps_of(tmp_path, "parts")
    skipped = [step for step, event in found.items() if "skipped" in event.data]
    assert skipped == [step for step, event in again.items() if "skipped" in event.data]
    assert (
        found[1].data["skipped"]
        == "float16 overflow in gradients; loss scale 1.67772e+07 → 8.38861e+06"
    )
    assert skipped[:5] == [1, 2, 3, 4, 5] and 6 < len(skipped) < 20, (
        "the scale grows again every three steps"
    )
    assert (
        found[1].data["loss"] == pytest.approx(found[4].data["loss"], abs=0.5)
        and found[20].data["loss"] < 5.5
    )


def test_losses_and_norms_are_those_of_float32(tmp_path: Path) -> None:
    # Ddp computes under autocast, fsdp2 in float16 throughout
    for name, fsdp in (("half", HALF), ("single", {})):
        run_alone(configured(tmp_path, 6, fsdp=fsdp, parallel={"mode": "ddp"}), name)
    half, single = (steps_of(tmp_path, name) for name in ("half", "single"))
    assert list(half) == list(single) == [1, 2, 3, 4, 5, 6]
    for step, event in single.items():
        assert "skipped" not in half[step].data
        assert half[step].data["loss"] == pytest.approx(event.data["loss"], rel=1e-3)
        assert half[step].data["gradient_norm"] == pytest.approx(
            event.data["gradient_norm"], rel=2e-2
        )


def test_a_scale_at_its_lower_limit_leaves_the_judgement_to_the_guards() -> None:
    scale = LossScale()
    reasons = [scale.update(overflow=True) for _ in range(19)]
    assert all(reasons[:18]) and not reasons[18] and scale.value == LossScale.SMALLEST

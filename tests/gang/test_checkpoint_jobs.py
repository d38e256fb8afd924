"""Whole jobs around a damaged, an exported and an imported commit: what is lost is said, and
training goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ebbflow.core.events import Event, read_events
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import reachable_commits
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.reader import read_manifest
from tests.support.gangs import run_ranks


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As YAML, of which JSON is a part."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "texts").mkdir()
    for number in range(6):
        lines = (f"{number} and {line} is {number + line}.\n" for line in range(60))
        (folder / "texts" / f"{number}.txt").write_text("".join(lines))
    document = {
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "sequence_length": 32},
        "training": {"batch_size": 8, "max_steps": 20, "evaluation_interval_steps": 5},
        "checkpoint": {"interval_steps": 5, "keep_last": 2, "keep_best": 1},
        "data": {
            "suffixes": [".txt"],
            "held_out_fraction": 0.3,
            "held_out_samples": 4,
            "path": str(folder / "texts"),
        },
        "store": str(folder / "store"),
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(document))
    return path


def train(config: Path, job: str, steps: int) -> tuple[str, Store]:
    words = [str(config), "--job", job, "--set", f"training.max_steps={steps}"]
    [said] = run_ranks(1, ["-m", "ebbflow.training", *words])
    return said, Store.open(str(config.parent / "store" / "jobs" / job))


def of(store: Store, name: str) -> list[Event]:
    return [event for event in read_events(store) if event.name == name]


def test_jobs_lose_what_is_damaged_and_go_on_from_what_is_imported(
    config: Path, tmp_path: Path
) -> None:
    _, job = train(config, "first", 20)
    refs = reachable_commits(job)
    assert [ref.step for ref in refs][:2] == [20, 15]
    scores = {
        ref.step: read_manifest(job, ref.key).common["extra"].get("metrics", {}) for ref in refs
    }
    measured = {
        event.step: event.data["metrics"]["held_out_loss"] for event in of(job, "evaluation")
    }
    assert scores[15] == {**scores[15], "step": 15, "held_out_loss": measured[15]}, (
        "measured before it was saved"
    )

    data = next(path for path in Path(job.uri, "data").rglob("*.bin") if f"{20:012d}" in path.parts)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    said, _ = train(config, "first", 25)
    assert "restored step 15 instead of a damaged commit; lost: 5 steps" in said
    (restore,) = of(job, "restore")
    (rejected,) = restore.data["rejected"]
    assert (restore.step, rejected["key"], rejected["lost_steps"]) == (15, refs[0].key, 5)
    assert rejected["lost_usd"] == 0.0, "nothing was paid without a price"
    assert set(restore.data["split"]) == {"list", "download", "verify", "load", "agree"}

    assert checkpoints(["export", job.uri, str(tmp_path / "theirs.pt"), "--weights-only"]) == 0
    weights = tmp_path / "weights.pt"
    torch.save(torch.load(tmp_path / "theirs.pt", weights_only=True)["model"], weights)
    new = str(config.parent / "store" / "jobs" / "second")
    assert checkpoints(["import", str(weights), new]) == 0
    train(config, "second", 20)
    second = Store.open(new)
    assert [event.step for event in of(second, "restore")] == [0]
    losses = {event.step: event.data["loss"] for event in of(second, "step")}
    fresh = {event.step: event.data["loss"] for event in of(job, "step") if event.generation == 1}
    assert set(losses) == set(range(1, 21)) and losses[1] < fresh[1], (
        "it starts from trained weights"
    )

"""Laptop jobs of the workloads at length: each loses a node, learns, and ends with an uninterrupted
run's bits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.gang.test_policy_folders import make_folder
from tests.support.flow import ROOT, FlowRunner, assert_ledger_adds_up, train_quietly

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]


def write_language_config(folder: Path) -> str:
    """Write a configuration of a small Llama that learns to answer in conversations, with a test of
    two choices.
    """
    model = make_folder(folder, chat=True)
    answers = {
        "ebb": "the tide goes out",
        "flood": "the tide comes in",
        "slack": "the water is still",
    }
    rows = []
    for n in range(100):
        for word, text in answers.items():
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": f"{word} {n}"},
                        {"role": "assistant", "content": f"{text}, {n}"},
                    ]
                }
            )
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    choices = [" the tide goes out", " number 300 comes in"]
    question = {
        "prompt": "<user>ebb 7<assistant>",
        "choices": [choice[1:] for choice in choices],
        "answer": 0,
    }
    (folder / "questions.jsonl").write_text(json.dumps(question))
    scheduler = {"type": "cosine", "warmup_steps": 5}
    settings = {
        "workload": "ebbflow.workloads:HuggingFace",
        "workload_options": {
            "model": str(model),
            "dataset": str(folder / "talk.jsonl"),
            "chat": True,
            "choices": str(folder / "questions.jsonl"),
        },
        "model": {"sequence_length": 32},
        "training": {
            "batch_size": 8,
            "max_steps": 180,
            "learning_rate": 3e-3,
            "evaluation_interval_steps": 60,
            "scheduler": scheduler,
        },
        "parallel": {"mode": "ddp"},
        "cluster": {"nodes": 2, "plan_for": "kubernetes"},
        "checkpoint": {"interval_steps": 20},
    }
    path = folder / "language.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.mark.parametrize(
    ("name", "metric", "least", "most", "picture"),
    [
        ("point-clouds", "chamfer_ratio", 0.0, 0.5, "clouds"),
        ("policy-optimization", "held_out_reward", 0.9, 1.0, "completions"),
        ("images", "accuracy", 0.95, 1.0, "confusion"),
        # Nats per token of the answers; ln 300 = 5.7 at the start
        ("language", "held_out_loss", 0.0, 1.0, ""),
    ],
)
def test_a_laptop_job_learns_and_loses_a_node_bit_for_bit(
    name: str, metric: str, least: float, most: float, picture: str, tmp_path: Path
) -> None:
    if picture:
        config = str(ROOT / "ebbflow/configs" / f"{name}.yaml")
    else:
        config = write_language_config(tmp_path)
    quiet = train_quietly(tmp_path / "quiet", config=config)
    runner = FlowRunner(tmp_path / "run")
    words = ["--config", config, "--set", f"store={runner.runs}", "--rehearse", "node-loss@60%"]
    run = runner.run("run", "--verbose", *words)
    assert run.exit_code == 0, run.output
    report = run.report
    assert (
        report["interruptions"] == 1 and report["redone_steps"] >= 1 and quiet["interruptions"] == 0
    )
    assert report["weights_sha256"] == quiet["weights_sha256"]
    # Speeds differ, and the share of clipped tokens is that of the steps since the restart.
    metrics = report["actual"]["metrics"]
    expected = quiet["actual"]["metrics"]
    speeds = {name for name in expected if name.endswith(("_per_second", "_share"))}
    assert {name: metrics[name] for name in metrics if name not in speeds} == {
        name: expected[name] for name in expected if name not in speeds
    }
    assert least <= metrics[metric] <= most
    if picture:
        assert report["charts"]["evaluations"]["pictures"][picture].startswith("<svg")
    else:
        assert metrics["choice_accuracy"] == 1.0 and report["actual"]["held_out_ratio"] < 0.5
    print(
        f"{name}: {metric} {metrics[metric]:.4g}, {report['actual']['wall_hours'] * 3600:.0f} s "
        "with the lost node"
    )
    assert_ledger_adds_up(report)

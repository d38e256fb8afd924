"""A job of some hours on one machine, for AWS Batch without Batch: `tests.support.virtual_batch`
has the rest.
"""

from __future__ import annotations

from pathlib import Path

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from tests.support.timelines import WALL
from tests.support.virtual_batch import (
    BEGAN_UTC,
    BOTH,
    JobLog,
    attempt,
    placed_now,
    planned,
    queue,
    queues,
)

__all__ = ["BOTH", "JobLog", "attempt", "batch_config", "placed_now", "planned", "queue", "queues"]

ROOT = Path(__file__).resolve().parents[2]
assert BEGAN_UTC == WALL, "events of both are put together"


def batch_config(*overrides: str) -> RunConfig:
    """A job of some hours on one g5.xlarge, planned for Batch."""
    job = [
        "cluster.plan_for=batch",
        "cluster.nodes=1",
        "cluster.instance_types=[g5.xlarge]",
        "store=s3://b/p",
    ]
    work = [
        "model.hidden_size=768",
        "model.num_heads=12",
        "model.num_layers=12",
        "training.max_steps=120000",
        "fsdp.use_mixed_precision=false",  # the hours in the tests are those of float32
    ]
    limits = ["cost.deadline_hours=20", "cost.budget_usd=100"]
    chosen = [*job, *work, *limits, *overrides]
    return load_config(
        str(ROOT / "ebbflow/configs" / "laptop.yaml"), chosen, project_root=ROOT, cwd=ROOT
    ).config

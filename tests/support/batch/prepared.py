"""What a job of the local Batch finds made before it: a paced workload in its image, and what
earlier jobs showed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from ebbflow.core.config import load_config
from ebbflow.core.layout import job_history_key
from ebbflow.cost.job_history import JobMeasurements, MeasuredSpeed
from ebbflow.cost.plan.throughput import speed_fingerprint
from tests.support.batch.flow import PREFIX, BatchRunner
from tests.support.flow import ROOT

_PACED = "paced:Paced"


def paced_settings(seconds_per_step: float, *, crashes_at_step: int = 0) -> dict[str, object]:
    """Of a runner's options; they hold for the job, whose quiet twin takes a pace of its own."""
    return {
        "workload": _PACED,
        "workload_options__seconds_per_step": seconds_per_step,
        "workload_options__crashes_at_step": crashes_at_step,
    }


def with_paced(folder: Path) -> dict[str, str]:
    """The variable through which launcher and containers find it, in a folder that has nothing
    else.
    """
    place = folder / "own-package"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("paced.py"), place)
    return {"PYTHONPATH": str(place)}


def remember_speeds(
    runner: BatchRunner, options: list[str], speeds: Mapping[tuple[str, int], float]
) -> None:
    """As earlier jobs of the same configuration leave them. speeds: tokens per second by instance
    type and nodes.
    """
    overrides = [word for word in options if word != "--set"]
    config = load_config(
        ROOT / "ebbflow/configs" / "laptop.yaml", overrides, project_root=ROOT, cwd=Path.cwd()
    ).config
    about = {
        "processes_per_node": 1,
        "fingerprint": speed_fingerprint(config),
        "steps": 1000,
        "seen_utc": time.time(),
    }
    seen = tuple(
        MeasuredSpeed(
            instance_type=kind, nodes=nodes, tokens_per_second=speed, log_deviation=0.03, **about
        )
        for (kind, nodes), speed in speeds.items()
    )
    record = JobMeasurements(job="earlier", speeds=seen).to_json()
    key = f"{PREFIX}/{job_history_key('20260101', 'earlier')}"
    runner.swift.client().put_object(
        Bucket=runner.bucket, Key=key, Body=json.dumps(record).encode()
    )

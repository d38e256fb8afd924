"""The shape of Ray Train's benchmark of preemptions (github.com/ray-project/ray, pull request
65047), with its fields.

Eight workers, 1,600 steps, a commit each 400, and four notices at the steps that its run was
resumed from. `baseline`: nobody heeds them, and the machine is gone 40 steps later. `jit`: the gang
saves, leaves, and goes on elsewhere. There each worker is a GPU and the model is vit_b_16; here all
share this machine's cores, so that steps redone compare and seconds do not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.imds import FakeMetadata
from benchmarks.training.notice.figures import generation_of_attempt, steps_redone, steps_taken
from benchmarks.training.notice.job import NoticeJob
from ebbflow.core.events import STEP, Event

WORKERS = 8
NODES = 2
TARGET_STEPS = 1600
INTERVAL_STEPS = 400
NOTICES_AT = (695, 866, 1395, 1547)
ARMS = ("baseline", "jit")
# From a notice that nobody heeds until the machine is gone; fewer than are left after the last
_UNHEEDED_STEPS = 40


def measure_shape(
    folder: Path,
    *,
    arms: Sequence[str],
    notice_seconds: float,
    margin_seconds: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm in arms:
        found[arm] = _arm(folder, arm, notice_seconds, margin_seconds)
        tell(f"{arm}: {found[arm]['wasted_steps']} steps redone, {found[arm]['e2e_time']:.1f} s")
    if set(ARMS) <= set(found):
        found |= _compared(found["baseline"], found["jit"])
    found["config"] = {
        "num_workers": WORKERS,
        "model": "language model of 20 thousand parameters, on the CPU",
        "target_steps": TARGET_STEPS,
        "checkpoint_interval": INTERVAL_STEPS,
        "notices_at_steps": list(NOTICES_AT),
        "notice_seconds": notice_seconds,
        "nodes": NODES,
    }
    return found


def _arm(folder: Path, arm: str, notice_seconds: float, margin_seconds: float) -> dict[str, Any]:
    job = NoticeJob(
        folder / arm,
        nodes=NODES,
        ranks_per_node=WORKERS // NODES,
        max_steps=TARGET_STEPS,
        interval_steps=INTERVAL_STEPS,
        notice_seconds=notice_seconds,
        margin_seconds=margin_seconds,
    )
    began = time.monotonic()
    error = None
    try:
        with FakeMetadata() as metadata:
            for at in NOTICES_AT:
                job.start()
                job.await_step(lambda first, step, at=at: step >= at)
                if arm == "jit":
                    job.await_end(job.notify("rehearsal", NODES - 1, metadata) + notice_seconds)
                else:
                    job.await_step(lambda first, step, at=at: step >= at + _UNHEEDED_STEPS)
                    job.close()
        job.start()
        outcome = job.finish(600.0)
        completed = outcome is not None and outcome.outcome == "completed"
        if completed:
            error = None
        else:
            error = f"ended as {outcome.outcome if outcome else 'killed'}"
    finally:
        job.close()
    seconds = time.monotonic() - began
    return _arm_figures(job.events(), arm, job.attempts, seconds, error)


def _arm_figures(
    events: Sequence[Event], arm: str, attempts: int, seconds: float, error: str | None
) -> dict[str, Any]:
    step_seconds = statistics.fmean(
        sum(event.data["seconds"].get(name, 0.0) for name in ("useful_step", "data_wait"))
        for event in events
        if event.name == STEP and event.rank == 0
    )
    resumed = []
    for attempt in range(attempts):
        generation = generation_of_attempt(events, attempt)
        resumed.append(
            min(
                steps_taken([event for event in events if event.generation == generation]),
                default=0,
            )
        )
    wasted = steps_redone(events)
    return {
        "arm": arm,
        "completed": error is None,
        "error": error,
        "e2e_time": seconds,
        "wasted_steps": wasted,
        "wasted_gpu_seconds": wasted * step_seconds * WORKERS,
        "executed_steps": len(steps_taken(events)),
        "num_attempts": attempts,
        "resumed_from_steps": [0, *resumed[1:]],
        "jit_checkpoints": sum(step > 0 and step - 1 not in _periodic() for step in resumed[1:]),
        "mean_step_time_s": step_seconds,
    }


def _periodic() -> set[int]:
    return {0, *range(INTERVAL_STEPS, TARGET_STEPS + 1, INTERVAL_STEPS)}


def _compared(baseline: dict[str, Any], jit: dict[str, Any]) -> dict[str, Any]:
    steps = baseline["wasted_steps"] - jit["wasted_steps"]
    seconds = baseline["e2e_time"] - jit["e2e_time"]
    return {
        "steps_saved": steps,
        "steps_saved_pct": 100.0 * steps / max(baseline["wasted_steps"], 1),
        "time_saved_s": seconds,
        "time_saved_pct": 100.0 * seconds / baseline["e2e_time"],
        "gpu_seconds_saved": baseline["wasted_gpu_seconds"] - jit["wasted_gpu_seconds"],
        "estimated_time_saved_s": steps * baseline["mean_step_time_s"],
    }

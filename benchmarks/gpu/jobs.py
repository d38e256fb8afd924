"""Lines of `ebbflow bench gpu` that run whole jobs under an agent: interrupted, hanging, and out of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import NO_RANGE, Bench, Row, verdict
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import FAULT_DETECTED, FAULT_INJECTED, RESTORE, STEP, Event, read_events
from ebbflow.infra.layout import job_prefix
from ebbflow.infra.store import Store
from ebbflow.training.certify import local_spec, run_to_end
from ebbflow.training.launch.messages import GangOutcome

_SAVES = 4


@dataclass(frozen=True, kw_only=True)
class JobRun:
    outcome: GangOutcome
    starts: int
    events: list[Event]
    log: Path

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    @property
    def completed(self) -> bool:
        return self.outcome.outcome == Outcome.COMPLETED

    @property
    def generations(self) -> int:
        """The starts of the gang that took steps."""
        return len({event.generation for event in self.named(STEP)})


def run_job(bench: Bench, name: str, *, rehearse: str | None = None, **sections: Any) -> JobRun:
    """Run a job of all ranks to its end under an agent, as on a user's machine. Raises TrainingError."""
    steps, ranks = bench.size.job_steps, bench.ranks
    training = {"max_steps": steps, **sections.pop("training", {})}
    workload = {key: sections.pop(key) for key in ("workload", "workload_options") if key in sections}
    config = bench.config(
        bench.size.job_model,
        ranks=ranks,
        training=training,
        checkpoint={"interval_steps": max(1, steps // _SAVES), "when_busy": "wait"},
        survival={"hang_floor_seconds": bench.size.hang_seconds},
        **sections,
    )
    config = RunConfig.model_validate({**config.model_dump(), **workload})
    folder = bench.folder / "jobs" / name
    folder.mkdir(parents=True)
    spec = local_spec(config, bench.prepared, job=name, logs=folder / "logs")
    outcome, starts = run_to_end(replace(spec, rehearse=rehearse), folder)
    events = read_events(Store.open(config.store).sub(job_prefix(name)))
    return JobRun(outcome=outcome, starts=starts, events=events, log=folder / "output.log")


def measure_resume(bench: Bench, mode: str) -> list[Row]:
    """Compare the weights of a job that lost a rank with those of one that did not, with `training.deterministic`."""
    training = {"deterministic": mode}
    whole = run_job(bench, f"{mode}-uninterrupted", training=training)
    rank = bench.ranks - 1
    killed = run_job(bench, f"{mode}-killed", rehearse=f"rank-kill@55%:rank={rank}", training=training)
    equal = whole.outcome.weights_sha256 == killed.outcome.weights_sha256 is not None
    interrupted = killed.generations > 1 and bool(killed.named(RESTORE))
    promised = mode == "strict" or not bench.on_gpu
    both_completed = whole.completed and killed.completed
    right = both_completed and interrupted and (equal or not promised)
    text = ("equal weights" if equal else "other weights") if interrupted else "never interrupted"
    row = Row(
        what=f"resume, deterministic {mode}",
        measured=text,
        expected="equal weights" if promised else "equal or nearly equal",
        source="docs/parallel.md, training.deterministic",
        verdict=verdict(right) if promised or not right else NO_RANGE,
        figures={
            "equal": equal,
            "interrupted": interrupted,
            "uninterrupted_sha256": whole.outcome.weights_sha256,
            "interrupted_sha256": killed.outcome.weights_sha256,
            "ranks": bench.ranks,
        },
    )
    return [row, _recovery_row(bench, "a killed rank", killed, rank)] if mode == "auto" else [row]


def _recovery_row(bench: Bench, fault: str, run: JobRun, rank: int) -> Row:
    """How long after the fault the first step of the next generation was done, and which rank was blamed."""
    limit = 120.0  # cluster.start_deadline_seconds
    blamed = [event.data for event in run.named(FAULT_DETECTED)]
    injected = [event.t_wall for event in run.named(FAULT_INJECTED)]
    steps = [event for event in run.named(STEP) if event.generation > 1]
    culprit = blamed[0]["culprit"] if blamed else "nobody"
    named = blamed[0].get("rank") if blamed else None
    again = min((event.t_wall for event in steps), default=None)
    seconds = again - injected[0] if again is not None and injected else None
    right = run.completed and seconds is not None and seconds < limit and named == rank
    shown = "never resumed" if seconds is None else f"{seconds:.1f} s to the next step"
    return Row(
        what=f"recovery from {fault}",
        measured=f"{shown}, blamed: rank {named}" if named is not None else f"{shown}, blamed: {culprit}",
        expected=f"resumes within {limit:g} s, rank {rank} blamed",
        source="cluster.start_deadline_seconds",
        verdict=verdict(right),
        figures={"seconds": seconds, "culprit": culprit, "rank": named, "injected_rank": rank, "ranks": bench.ranks},
    )

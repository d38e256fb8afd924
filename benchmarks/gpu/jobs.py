"""Lines of `ebbflow bench gpu` that run whole jobs under an agent: interrupted, hanging, and out of
memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.bench import NO_RANGE, Bench, Row, verdict
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import (
    FAULT_DETECTED,
    GUARD,
    RESTORE,
    STEP,
    Event,
    GuardAction,
    read_events,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError
from ebbflow.training.launch.messages import GangOutcome
from ebbflow.training.launch.transport import rendezvous_port
from ebbflow.tryout.harness import local_spec, run_to_end

_SAVES = 4


@dataclass(frozen=True, kw_only=True)
class JobRun:
    outcome: GangOutcome
    events: list[Event]

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
    """Run a job of all ranks to its end under an agent, as on a user's machine.

    Raises TrainingError.
    """
    steps = bench.size.job_steps
    ranks = bench.ranks
    training = {"max_steps": steps, **sections.pop("training", {})}
    workload = {
        key: sections.pop(key) for key in ("workload", "workload_options") if key in sections
    }
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
    outcome, _ = run_to_end(replace(spec, rehearse=rehearse), folder)
    events = read_events(Store.open(config.store).sub(job_prefix(name)))
    return JobRun(outcome=outcome, events=events)


def measure_resume(bench: Bench, mode: str) -> list[Row]:
    """Compare the weights of a job that lost a rank with those of an uninterrupted one.

    Both have `training.deterministic` as `mode`.
    """
    training = {"deterministic": mode}
    rank = bench.ranks - 1
    whole = run_job(bench, f"{mode}-uninterrupted", training=training)
    killed = run_job(
        bench, f"{mode}-killed", rehearse=f"rank-kill@55%:rank={rank}", training=training
    )
    equal = whole.outcome.weights_sha256 == killed.outcome.weights_sha256 is not None
    interrupted = killed.generations > 1 and bool(killed.named(RESTORE))
    promised = mode == "strict" or not bench.on_gpu
    both_completed = whole.completed and killed.completed
    right = both_completed and interrupted and (equal or not promised)
    if interrupted:
        text = "equal weights" if equal else "other weights"
    else:
        text = "never interrupted"
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
    if mode == "auto":
        return [row, _recovery_row(bench, "a killed rank", killed, rank)]
    return [row]


def measure_hang(bench: Bench) -> list[Row]:
    """A rank whose device never ends a kernel; on a CPU, a rank that sleeps."""
    rank = bench.ranks - 1
    if bench.on_gpu:
        what = "a hanging device"
        run = run_job(bench, "hang", **_fault(bench, "hang", rank=rank))
    else:
        what = "a sleeping rank, for a device"
        run = run_job(bench, "hang", rehearse=f"sleep@50%:rank={rank}")
    return [_recovery_row(bench, what, run, rank)]


def measure_out_of_memory(bench: Bench) -> list[Row]:
    """A job whose allocator refuses a whole batch in forward and half of one in the optimizer."""
    run = run_job(bench, "out-of-memory", **_fault(bench, "out of memory"))
    splits = [event.data for event in run.named(GUARD) if event.data["action"] == GuardAction.SPLIT]
    parts = sorted({split["accumulation"] for split in splits})
    goes_on = run.completed and run.outcome.step == bench.size.job_steps
    rows = []
    for where, accumulation in (("forward", 2), ("the optimizer", 4)):
        rows.append(
            Row(
                what=f"out of memory in {where}",
                measured=(
                    f"{run.outcome.outcome} at step {run.outcome.step}, splits into {parts} "
                    "micro-batches"
                ),
                expected=f"completed at step {bench.size.job_steps}, a split into {accumulation}",
                source="docs/survival.md, guards.out_of_memory",
                verdict=verdict(goes_on and accumulation in parts),
                figures={
                    "splits": parts,
                    "generations": run.generations,
                    "outcome": run.outcome.outcome,
                },
            )
        )
    return rows


def measure_collectives(bench: Bench) -> list[Row]:
    """Sums and bus bandwidth of collectives over all GPUs; with one GPU or a CPU, over two ranks."""
    if bench.ranks > 1:
        ranks = bench.ranks
    else:
        ranks = 2
    folder = bench.folder / "collectives"
    folder.mkdir()
    path = folder / "task.json"
    task = {
        "size": bench.size.name,
        "folder": str(bench.folder),
        "prepared": {},
        "device": bench.device,
    }
    path.write_text(json.dumps({**task, "parent_pid": os.getpid()}))
    port = rendezvous_port("127.0.0.1", str(path), attempt=0)
    common = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_PORT": str(port),
    }
    shared = bench.on_gpu and ranks > bench.device["count"]
    if shared:
        common |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(ranks):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if shared:
            # NCCL refuses two ranks of one host on one GPU, so that each names a host of its own
            environment["NCCL_HOSTID"] = f"bench-{rank}"
        command = [sys.executable, "-m", "benchmarks.gpu.measure", str(path), "collective-rank"]
        processes.append(subprocess.Popen([*command, f"{folder}/{rank}.out"], env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise GangError(f"the ranks of the collectives ended with exit codes {codes}")
    rows = [Row(**row) for row in json.loads((folder / "0.out").read_text())]
    if shared:
        rows = [replace(row, what=f"{row.what}, both on one GPU over sockets") for row in rows]
    return rows


def _fault(bench: Bench, fault: str, *, rank: int = 0) -> dict[str, Any]:
    mark = bench.folder / f"{fault.replace(' ', '-')}.mark"
    options = {"fault": fault, "rank": rank, "mark": str(mark)}
    return {"workload": "benchmarks.gpu.faults:FaultyText", "workload_options": options}


def _recovery_row(bench: Bench, fault: str, run: JobRun, rank: int) -> Row:
    """Return the time from the last step to the next generation's first, and the blamed rank."""
    limit = 120.0 + bench.size.hang_seconds
    blamed = [event.data for event in run.named(FAULT_DETECTED)]
    steps = run.named(STEP)
    last = max((event.t_wall for event in steps if event.generation == 1), default=None)
    culprit = "nobody"
    named = None
    if blamed:
        culprit = blamed[0]["culprit"]
        named = blamed[0].get("rank")
    again = min((event.t_wall for event in steps if event.generation > 1), default=None)
    if again is not None and last is not None:
        seconds = again - last
    else:
        seconds = None
    right = run.completed and seconds is not None and seconds < limit and named == rank
    if seconds is None:
        shown = "never resumed"
    else:
        shown = f"{seconds:.1f} s to the next step"
    return Row(
        what=f"recovery from {fault}",
        measured=f"{shown}, blamed: rank {named}"
        if named is not None
        else f"{shown}, blamed: {culprit}",
        expected=f"resumes within {limit:g} s, rank {rank} blamed",
        source="cluster.start_deadline_seconds + survival.hang_floor_seconds",
        verdict=verdict(right),
        figures={
            "seconds": seconds,
            "culprit": culprit,
            "rank": named,
            "injected_rank": rank,
            "ranks": bench.ranks,
        },
    )

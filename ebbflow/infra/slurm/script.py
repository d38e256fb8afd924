"""Batch scripts for `sbatch`, and the options that a partition adds to them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ebbflow.core.config.schema import PartitionConfig, RunConfig, SlurmConfig
from ebbflow.core.event_payloads import CommitPayload
from ebbflow.core.events import Event, select_events

# Between the end of the last save and the time limit: Slurm looks at limits twice a minute, and
# processes need time to end.
_LIMIT_MARGIN_SECONDS = 30.0
# Saves that must fit between the warning and the margin
_SAVES_BEFORE_LIMIT = 3
_MEASURED_SAVES = 10
# After the end of the first agent; the others upload their logs for up to 5 s
_STRAY_AGENT_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """A batch script: options for `sbatch`, and the lines that run on the first node."""

    options: Sequence[str]  # such as --nodes=2
    lines: Sequence[str]

    def render(self) -> str:
        options = [f"#SBATCH {_quote_option(option)}" for option in self.options]
        return "\n".join(["#!/bin/bash", *options, "", *self.lines, ""])


def warning_seconds(config: RunConfig, save_seconds: float | None = None) -> int:
    """Return how many seconds before the time limit Slurm must warn the job, so that it can save.

    Args:
        save_seconds: the longest measured save. None allows the drain all of
            `checkpoint.stop_seconds`, which it never exceeds.
    """
    drain = config.checkpoint.stop_seconds
    if save_seconds is not None:
        # Another save may be under way, and a slower disk must not matter
        drain = min(drain, _SAVES_BEFORE_LIMIT * save_seconds)
    return math.ceil(drain + _LIMIT_MARGIN_SECONDS)


def measure_save_seconds(events: Sequence[Event]) -> float | None:
    """Return the longest duration in seconds of the job's latest saves, or None without any."""
    saves = select_events(events, CommitPayload)
    seconds = [event.payload.seconds for event in saves if event.payload.seconds is not None]
    return max(seconds[-_MEASURED_SAVES:], default=None)


def partition_options(
    partition: PartitionConfig | None, *, most_minutes: int | None = None
) -> list[str]:
    """Return the `sbatch` options that place a job in a partition (None: the cluster's default).

    Args:
        most_minutes: a time limit below the usual one; None: the usual one.
    """
    limit = [] if most_minutes is None else [f"--time={most_minutes}"]
    if partition is None:
        return limit
    options = [f"--partition={partition.name}"]
    named = {
        "gres": partition.gres,
        "constraint": partition.constraint,
        "qos": partition.qos,
        "account": partition.account,
    }
    options += [f"--{name}={value}" for name, value in named.items() if value is not None]
    if most_minutes is None and partition.max_hours is not None:
        limit = [f"--time={max(1, math.floor(partition.max_hours * 60))}"]
    return [*options, *limit]


def srun_line(slurm: SlurmConfig, words: Sequence[str], *, options: Sequence[str] = ()) -> str:
    """Return the srun command line that starts one process for each task of the job."""
    command = ["srun", *options]
    if slurm.container_image is not None:
        command.append(f"--container-image={slurm.container_image}")
    return shlex.join([*command, *words])


def agent_lines(slurm: SlurmConfig, words: Sequence[str], *, may_leave: bool = False) -> list[str]:
    """Return the script lines that run one agent per node and pass Slurm's warning on to the
    agents.

    Args:
        words: the command line of an agent.
        may_leave: whether agents of lost nodes may end while the others go on. Otherwise all end
            together, and srun ends those that it has lost: it would wait for them for ever.
    """
    wait = 0 if may_leave else _STRAY_AGENT_SECONDS  # 0: for ever
    return [
        "# --signal reaches this shell only; the agents save and leave as at a preemption",
        """trap 'scancel --signal=TERM "$SLURM_JOB_ID"' USR1""",
        "trap : TERM",
        *activation_lines(slurm),
        srun_line(slurm, words, options=["--kill-on-bad-exit=0", f"--wait={wait}"]) + " &",
        "agents=$!",
        "code=1",
        # A trap interrupts `wait`, which then returns another code
        'while kill -0 "$agents" 2>/dev/null; do wait "$agents"; code=$?; done',
        'exit "$code"',
    ]


def activation_lines(slurm: SlurmConfig) -> list[str]:
    if slurm.activate is None:
        return []
    return [slurm.activate]


def _quote_option(option: str) -> str:
    """Quote the value of an option for sbatch, which splits lines as a shell does."""
    name, has_value, value = option.partition("=")
    if not has_value:
        return option
    return f"{name}={shlex.quote(value)}"

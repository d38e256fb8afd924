"""Calls of Slurm's commands, with deadlines and typed answers."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from ebbflow.core.config.schema import PartitionConfig
from ebbflow.core.errors import InfraError, Outcome

# A start as far ahead is no estimate: Slurm takes jobs without a time limit to last a year
FAR_SECONDS = 300 * 86400.0
_SECONDS = 30.0  # for a controller under load; its own timeout of a message is 10 s
_COMMENT = "%i|%T|%k"
_ACCOUNTED = "State,Reason,Partition,NodeList,Start,End,JobName"
_NONE = ("", "None", "none", "N/A", "(null)", "Unknown")
_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "(null)", "")
_TEST_ONLY = re.compile(r"to start at (\S+)")

# Words of errors that pass when the controller is back
_PASSING = re.compile(
    r"contact slurm controller|Connection (refused|timed out)|Socket timed out|try again|"
    r"Zero Bytes were transmitted|Unexpected message received",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"Invalid job id", re.IGNORECASE)
_NO_MUNGE = re.compile(r"munge|auth\w* (plugin|credential)", re.IGNORECASE)


class SlurmUnavailable(InfraError):
    """Error: Slurm does not answer. A later call may succeed."""


class SlurmRejected(InfraError, outcome=Outcome.PREFLIGHT):
    """Error: Slurm refused a request, such as a job that exceeds a limit."""


class Cause(StrEnum):
    """Why a Slurm job ended."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    CANCELLED = "cancelled"
    NODE_FAILED = "node failed"
    NODE_DRAINED = "node drained"  # the launcher let the job leave a node that an operator drains
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    REQUEUED = "requeued"  # by an administrator, although the launcher continues the job itself
    REFUSED = "no nodes in time"  # cancelled by the launcher after `slurm.queue_minutes`
    UNKNOWN = "unknown"


_CAUSES = {
    "COMPLETED": Cause.COMPLETED,
    "PREEMPTED": Cause.PREEMPTED,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "CANCELLED": Cause.CANCELLED,
    "NODE_FAIL": Cause.NODE_FAILED,
    "BOOT_FAIL": Cause.NODE_FAILED,
    "OUT_OF_MEMORY": Cause.OUT_OF_MEMORY,
    "FAILED": Cause.FAILED,
}


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A Slurm job, as `scontrol` or `sacct` describes it."""

    job_id: str
    state: str  # such as PENDING; "" if Slurm does not know the job any more
    reason: str = ""  # why it waits, or how it ended
    partition: str = ""
    nodes: str = ""  # node list; "" before the start
    restarts: int = 0
    preempted: bool = False  # whether Slurm has asked it to leave for another job
    # Unix seconds; None before the start or the end
    started_utc: float | None = None
    ended_utc: float | None = None
    # Unix seconds; Slurm's estimate for a job that waits; None if it has none
    expected_start_utc: float | None = None
    cancelled_by: str = ""  # uid of the user who cancelled it; "" if nobody did, or if unknown
    name: str = ""

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    @property
    def ended(self) -> bool:
        return not self.waits and self.state not in (
            "RUNNING",
            "COMPLETING",
            "SUSPENDED",
            "STOPPED",
            "SIGNALING",
            "STAGE_OUT",
        )

    @property
    def never_started(self) -> bool:
        """Whether the job has ended without ever having a node.

        False if Slurm does not know the job any more.
        """
        return bool(self.state) and self.ended and not self.nodes

    @property
    def cause(self) -> Cause:
        """Why the job ended. A preempted job that leaves in time ends with an exit code."""
        if self.preempted and self.state != "COMPLETED":
            return Cause.PREEMPTED
        return _CAUSES.get(self.state, Cause.UNKNOWN)

    def describe(self) -> str:
        """Describe how the job ended, such as "CANCELLED by uid 1000"."""
        if not self.state:
            return "not known to Slurm any more"
        text = self.state
        if self.cancelled_by:
            text += f" by uid {self.cancelled_by}"
        elif self.preempted:
            text += ", preempted"
        elif self.reason:
            text += f" ({self.reason})"
        return text


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """A Slurm job that waits or runs, with the comment of its submission."""

    job_id: str
    state: str
    comment: str


def submit(script: str, environment: Mapping[str, str]) -> str:
    """Submit a batch script, and return the id of its job.

    Args:
        environment: variables of this process and of the job.

    Raises:
        SlurmRejected: Slurm refused the job.
        SlurmUnavailable: no answer; the job may exist.
    """
    try:
        answer = call_slurm(["sbatch", "--parsable"], script=script, environment=environment)
    except SlurmRejected as error:
        raise SlurmRejected(
            f"Slurm refused the job: {error}; fix: slurm.partitions (gres, constraint, account, qos, "
            "max_hours), slurm.options or cluster.nodes; `ebbflow preflight` asks for each partition"
        ) from error
    return answer.strip().partition(";")[0]  # a cluster's name may follow


def find_live_jobs(comment: str) -> list[LiveJob]:
    """Return this user's jobs whose comment begins with `comment`, oldest first.

    Raises:
        SlurmUnavailable: no answer.
    """
    listed = call_slurm(["squeue", "-h", f"--user={os.getuid()}", "-o", _COMMENT])
    jobs = []
    for line in listed.splitlines():
        job_id, state, noted = line.split("|", 2)
        if noted.startswith(comment):
            jobs.append(LiveJob(job_id=job_id, state=state, comment=noted))
    return sorted(jobs, key=lambda job: int(job.job_id.partition("_")[0]))


def look_up(job_id: str) -> SlurmJob:
    """Return a job's state from Slurm's controller or, if that no longer knows the job, from
    accounting.

    Raises:
        SlurmUnavailable: no answer.
    """
    try:
        shown = call_slurm(["scontrol", "show", "job", "-o", job_id])
    except SlurmRejected as error:
        if _UNKNOWN_JOB.search(str(error)) is None:
            raise
        return look_up_in_accounting(job_id) or SlurmJob(job_id=job_id, state="")
    job = parse_job(job_id, shown)
    if job.cause is not Cause.CANCELLED:
        return job
    recorded = look_up_in_accounting(job_id)  # the controller does not say who cancelled it
    if recorded is None:
        return job
    return replace(job, cancelled_by=recorded.cancelled_by)


def look_up_in_accounting(job_id: str) -> SlurmJob | None:
    """Return a job's record in Slurm's accounting, or None if there is none, for example without
    slurmdbd.
    """
    words = ["sacct", "-n", "-P", "-X", "-j", job_id, "-o", _ACCOUNTED]
    try:
        return parse_accounting(job_id, call_slurm(words))
    except (SlurmRejected, SlurmUnavailable):
        return None


def parse_accounting(job_id: str, shown: str) -> SlurmJob | None:
    """Parse the output of `sacct -n -P -X -o` for the fields of `_ACCOUNTED`, or return None if it
    has no record.

    The last line is the job's newest record: a requeued job has several.
    """
    lines = shown.splitlines()
    if not lines or lines[-1].count("|") != _ACCOUNTED.count(","):
        return None
    state, reason, partition, nodes, started, ended, job_name = lines[-1].split("|")
    name, _, canceller = state.partition(" by ")
    return SlurmJob(
        job_id=job_id,
        state=name.strip("+"),
        reason="" if reason in _NONE else reason,
        partition=partition,
        nodes="" if nodes in _NONE or nodes.startswith("None") else nodes,
        preempted=name == "PREEMPTED",
        started_utc=_time(started),
        ended_utc=_time(ended),
        cancelled_by=canceller,
        name=job_name,
    )


def parse_job(job_id: str, shown: str) -> SlurmJob:
    """Parse the output of `scontrol show job -o` for one job."""
    fields: dict[str, str] = {}
    for word in shown.split():
        name, separator, value = word.partition("=")
        if separator:
            fields.setdefault(name, value)
    reason = fields.get("Reason", "")
    nodes = fields.get("NodeList", "")
    state = fields.get("JobState", "")
    start = _time(fields.get("StartTime", ""))
    return SlurmJob(
        job_id=job_id,
        state=state,
        reason="" if reason in _NONE else reason,
        partition=fields.get("Partition", ""),
        nodes="" if nodes in _NONE else nodes,
        restarts=int(fields.get("Restarts", "0")),
        preempted=state == "PREEMPTED" or fields.get("PreemptTime", "None") not in _NONE,
        started_utc=None if state == "PENDING" else start,
        ended_utc=None if state == "PENDING" else _time(fields.get("EndTime", "")),
        expected_start_utc=start if state == "PENDING" else None,
        name=fields.get("JobName", ""),
    )


def read_partitions() -> dict[str, dict[str, str]]:
    """Return the fields of all partitions by name, from `scontrol`.

    Raises:
        SlurmUnavailable: no answer.
    """
    partitions = {}
    for line in call_slurm(["scontrol", "show", "partition", "-o"]).splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "PartitionName" in fields:
            partitions[fields["PartitionName"]] = fields
    return partitions


def parse_minutes(text: str) -> float | None:
    """Convert a Slurm time such as 1-12:00:00 to minutes, or return None if it is unlimited."""
    if text in _UNLIMITED:
        return None
    days, separator, clock = text.rpartition("-")
    hours, minutes, seconds = ([0.0] * 3 + [float(part) for part in clock.split(":")])[-3:]
    whole_days = float(days) if separator else 0.0
    return whole_days * 1440 + hours * 60 + minutes + seconds / 60


def usual_minutes(partition: PartitionConfig | None, fields: Mapping[str, str]) -> float | None:
    """Return a job's time limit in minutes, or None if there is none.

    It comes from the configuration or, by default, from the partition's fields (`read_partitions`).
    """
    if partition is not None and partition.max_hours is not None:
        return partition.max_hours * 60
    default = parse_minutes(fields.get("DefaultTime", ""))
    return parse_minutes(fields.get("MaxTime", "")) if default is None else default


def cancel(job_id: str, *, signal_name: str | None = None) -> None:
    """Cancel a job, or only send a signal to its tasks.

    Nothing happens if the job has already ended.

    Raises:
        SlurmUnavailable: no answer.
    """
    options = [] if signal_name is None else [f"--signal={signal_name}"]
    try:
        call_slurm(["scancel", *options, job_id])
    except SlurmRejected:
        return


def estimate_start(options: Sequence[str]) -> float | None:
    """Return the Unix time at which Slurm would start a job submitted now, or None if unknown.

    An estimate about a year ahead counts as unknown: Slurm gives it for a job that waits behind
    jobs without a time limit.

    Args:
        options: options of sbatch, such as --nodes=2.

    Raises:
        SlurmRejected: Slurm would refuse the job.
        SlurmUnavailable: no answer.
    """
    done = _run(["sbatch", "--test-only", *options, "--wrap=true"])
    told = _TEST_ONLY.search(done.stderr)
    start = None if told is None else _time(told[1])
    if start is None or start - time.time() > FAR_SECONDS:
        return None
    return start


def count_nodes(partition: str) -> dict[str, int]:
    """Count a partition's nodes by state, such as idle and allocated.

    Raises:
        SlurmUnavailable: no answer.
    """
    counts: dict[str, int] = {}
    for line in call_slurm(["sinfo", "-h", f"--partition={partition}", "-o", "%D|%T"]).splitlines():
        number, _, state = line.partition("|")
        name = state.rstrip("*~#!%$@+^-")
        counts[name] = counts.get(name, 0) + int(number)
    return counts


def find_drained_nodes(nodes: str) -> dict[str, str]:
    """Return the nodes of a node list that are drained or draining, with the reason for each.

    Raises:
        SlurmUnavailable: no answer.
    """
    drained = {}
    shown = call_slurm(["sinfo", "-h", "--Node", f"--nodes={nodes}", "-o", "%N|%T|%E"])
    for line in shown.splitlines():
        name, state, reason = line.split("|", 2)
        if state.startswith("drain"):
            drained[name] = "" if reason in _NONE else reason.strip()
    return drained


def call_slurm(
    words: Sequence[str],
    *,
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
) -> str:
    """Run a Slurm command, and return its standard output.

    Args:
        script: standard input; None: none.
        environment: variables; None: those of this process.
        seconds: deadline for the answer.

    Raises:
        SlurmRejected: the command is missing, or Slurm refused the request.
        SlurmUnavailable: no answer. A later call may succeed.
    """
    return _run(words, script=script, environment=environment, seconds=seconds).stdout


def _run(
    words: Sequence[str],
    *,
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
) -> subprocess.CompletedProcess[str]:
    variables = dict(os.environ if environment is None else environment)
    variables["SLURM_TIME_FORMAT"] = "%Y-%m-%dT%H:%M:%S"
    configuration = variables.get("SLURM_CONF")
    if configuration and not os.path.exists(configuration):  # Slurm would look for it for a minute
        raise SlurmRejected(
            f"{words[0]}: SLURM_CONF is {configuration}, and there is no such file; fix: unset "
            "SLURM_CONF, or name the cluster's slurm.conf"
        )
    try:
        done = subprocess.run(
            list(words),
            input=script,
            env=variables,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            start_new_session=True,  # Ctrl-C is for the launcher
            stdin=subprocess.DEVNULL if script is None else None,
        )
    except FileNotFoundError as error:
        raise SlurmRejected(
            f"{words[0]} is not on PATH; fix: start the command on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"{words[0]} did not answer within {seconds:g} s") from error
    if done.returncode == 0:
        return done
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    text = lines[-1].removeprefix(f"{words[0]}: ") if lines else f"exit code {done.returncode}"
    whole = " ".join(lines)
    if _NO_MUNGE.search(whole):
        raise SlurmUnavailable(
            f"{words[0]}: {text}; fix: munge does not work on this host: systemctl status munge, "
            "and the same key and clock on all nodes"
        )
    if _PASSING.search(whole):
        raise SlurmUnavailable(f"{words[0]}: {text}")
    raise SlurmRejected(f"{words[0]}: {text}")


def _time(text: str) -> float | None:
    """Convert a local time from Slurm to Unix time, or return None if it is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None

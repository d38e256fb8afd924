"""Preflight checks of whether a Slurm cluster can run the job."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ebbflow.core.config.schema import PartitionConfig, RunConfig
from ebbflow.core.errors import StoreError
from ebbflow.core.events import read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.preflight import Check, CheckFinding, PreflightContext, failed, passed, skipped
from ebbflow.core.process import AGENT_PORTS, OwnProgram
from ebbflow.core.program import PROJECT_ROOT, python_path
from ebbflow.core.store import Store
from ebbflow.infra.slurm.commands import (
    SlurmRejected,
    SlurmUnavailable,
    call_slurm,
    parse_minutes,
    read_partitions,
    usual_minutes,
)
from ebbflow.infra.slurm.partitions import explain_fewest_gpus, order_partitions
from ebbflow.infra.slurm.probe import NodeProbe, read_probes
from ebbflow.infra.slurm.script import (
    activation_lines,
    measure_save_seconds,
    partition_options,
    warning_seconds,
)

_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_SECONDS = 35.0
# Kinds of file systems that several hosts usually share (statfs, /proc/mounts)
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "orangefs", "pvfs", "9p")
# Of the job of `slurm.probe`: its time limit, and how long it is waited for
_PROBE_MINUTES = 2
_GRANT_SECONDS = 10
_PROBE_SECONDS = 150.0
_CLOCKS_APART_SECONDS = 5.0
_CONTROLLER_FIX = "scontrol ping; start the command on a login node, and check munge and SLURM_CONF"


def _for_slurm(check: Callable[[PreflightContext], CheckFinding]) -> Callable[..., CheckFinding]:
    def run(context: PreflightContext) -> CheckFinding:
        planned = context.config.cluster.plan_for == "slurm"
        if context.target != "slurm" and (context.target is not None or not planned):
            return skipped("the job does not run on Slurm")
        try:
            return check(context)
        except (SlurmRejected, SlurmUnavailable) as error:
            text, _, fix = str(error).partition("; fix: ")
            return failed(text, fix or _CONTROLLER_FIX)

    run.__doc__ = check.__doc__
    return run


@_for_slurm
def check_commands(_context: PreflightContext) -> CheckFinding:
    """Check that Slurm's commands are on PATH, and that the controller answers."""
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    if absent:
        return failed(
            f"not on PATH: {', '.join(absent)}", "start the command on a login node of the cluster"
        )
    version = call_slurm(["scontrol", "--version"]).strip()
    answers = call_slurm(["scontrol", "ping"])
    if "is UP" not in answers:
        return failed(" ".join(answers.split()), _CONTROLLER_FIX)
    return passed(f"{version}, the controller answers")


@_for_slurm
def check_partitions(context: PreflightContext) -> CheckFinding:
    """Check that each partition exists, is up, and has enough nodes with the required devices."""
    config = context.config
    if config.cluster.nodes == "auto":
        return failed("cluster.nodes is auto, and Slurm needs a number", "--set cluster.nodes=N")
    known = read_partitions()
    problems = []
    for partition in config.slurm.partitions:
        problem = _find_partition_problem(config, partition, known)
        if problem:
            problems.append(problem)
    if problems:
        return failed(
            "; ".join(problems),
            f"slurm.partitions: partitions of this cluster are {', '.join(sorted(known))}",
        )
    if not config.slurm.partitions:
        default = [name for name, fields in known.items() if fields.get("Default") == "YES"]
        if not default:
            return failed("the cluster has no default partition", "name one in slurm.partitions")
        return passed(f"the default partition {default[0]}")
    names = [partition.name for partition in config.slurm.partitions]
    text = f"{', '.join(names)}: up, with at least {config.cluster.nodes} nodes"
    ranks = explain_fewest_gpus(config)
    return passed(f"{text}; {ranks}" if ranks else text)


@_for_slurm
def check_limits(context: PreflightContext) -> CheckFinding:
    """Check with `sbatch --test-only` that limits, account and quality of service allow the job."""
    config = context.config
    nodes = config.cluster.nodes
    if not isinstance(nodes, int):
        return skipped("cluster.nodes is auto")
    refused = []
    accepted = []
    for partition in config.slurm.partitions or [None]:
        name = "the default partition" if partition is None else partition.name
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", *partition_options(partition)]
        command = ["sbatch", "--test-only", *options, *config.slurm.options, "--wrap=true"]
        try:
            call_slurm(command)
        except SlurmRejected as error:
            refused.append(f"{name}: {error}")
        else:
            accepted.append(name)
    if refused:
        return failed(
            "; ".join(refused),
            "correct gres, constraint, account, qos and max_hours of slurm.partitions, "
            "slurm.options, or cluster.nodes",
        )
    return passed(f"accepted in {', '.join(accepted)}")


@_for_slurm
def check_time(context: PreflightContext) -> CheckFinding:
    """Check that a Slurm job's time limit leaves time to train and save, and show how many such
    jobs fit before the deadline.
    """
    config = context.config
    known = read_partitions()
    warning = warning_seconds(config) / 60
    notes = []
    for name, partition in _named_partitions(config, known):
        fields = known.get(name, {})
        most = parse_minutes(fields.get("MaxTime", ""))
        limit = usual_minutes(partition, fields)
        if limit is not None and most is not None and limit > most:
            return failed(
                f"{name}: max_hours is {limit / 60:.4g}, and MaxTime {most / 60:.4g} h: its jobs "
                "would wait for ever",
                f"slurm.partitions: max_hours: {most / 60:.4g}",
            )
        if limit is None:
            notes.append(f"{name}: no limit")
            continue
        if limit < 1.5 * warning:
            return failed(
                f"{name}: a time limit of {limit:g} min, and saving begins {warning:.1f} min "
                "before it",
                "another partition, slurm.partitions: max_hours, or a smaller checkpoint.stop_seconds",
            )
        note = f"{name}: {limit / 60:.4g} h per Slurm job"
        if config.cost.deadline_hours is not None:
            note += f", so up to {config.cost.deadline_hours * 60 / limit:.3g} until the deadline"
        notes.append(note)
    return passed("; ".join(notes))


@_for_slurm
def check_grace(context: PreflightContext) -> CheckFinding:
    """Check that the GraceTime of each preemptible partition leaves a preempted job time to save,
    judged by `checkpoint.stop_seconds` and the job's measured saves.
    """
    config = context.config
    known = read_partitions()
    stop = config.checkpoint.stop_seconds
    saved = _measure_save(context)
    notes = []
    for name, partition in _named_partitions(config, known):
        if partition is not None and not partition.preemptible:
            continue
        fields = known.get(name, {})
        if fields.get("PreemptMode", "OFF").startswith("OFF"):
            continue
        grace = float(fields.get("GraceTime", "0"))
        if saved is not None and saved > grace:
            return failed(
                f"{name}: GraceTime is {grace:g} s, and the job's longest save took {saved:.1f} s: a "
                "preemption loses the steps since the last commit",
                "a partition with a larger GraceTime, or a smaller checkpoint.interval_steps",
            )
        if grace < stop:
            return failed(
                f"{name}: GraceTime is {grace:g} s, checkpoint.stop_seconds {stop:g} s: Slurm "
                "kills a preempted job before its last save may end",
                f"--set checkpoint.stop_seconds={max(1, grace):g}, or a larger GraceTime",
            )
        notes.append(f"{name}: GraceTime {grace:g} s")
    if not notes:
        return skipped("no partition is preemptible")
    measured = "" if saved is None else f", the longest save took {saved:.1f} s"
    return passed(f"{'; '.join(notes)}; checkpoint.stop_seconds {stop:g} s{measured}")


@_for_slurm
def check_store_is_shared(context: PreflightContext) -> CheckFinding:
    """Check that a store folder is on a file system that compute nodes share."""
    store = context.config.store
    if "://" in store:
        return passed(f"{store} is no folder")
    kind, mount = _find_mount(Path(store).absolute())
    if kind.startswith(_SHARED):
        return passed(f"{store} is on {mount} ({kind})")
    return failed(
        f"{store} is on {mount} ({kind}), which is probably this host's own disk",
        "a folder that all nodes mount, or a bucket; ignore this if the nodes see the folder",
    )


@_for_slurm
def check_nodes(context: PreflightContext) -> CheckFinding:
    """Check with a short job on the nodes (`slurm.probe`) that they share the store, reach each
    other's agent port, and have equal clocks.
    """
    config = context.config
    nodes = config.cluster.nodes
    if not config.slurm.probe or not isinstance(nodes, int):
        return skipped("slurm.probe is false")
    partition = next(iter(order_partitions(config)), None)
    key = job_prefix(f".preflight-{secrets.token_hex(8)}")
    store = Store.open(config.store)
    python = "python" if config.slurm.activate or config.slurm.container_image else sys.executable
    words = [python, "-m", OwnProgram.SLURM_PROBE.value, config.store, key]
    line = " && ".join([*activation_lines(config.slurm), f"exec {shlex.join(words)}"])
    options = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--immediate={_GRANT_SECONDS}",
        *partition_options(partition, most_minutes=_PROBE_MINUTES),
        *config.slurm.options,
    ]
    if config.slurm.container_image is not None:
        options.append(f"--container-image={config.slurm.container_image}")
    own = {"PYTHONPATH": python_path(), "EBBFLOW_PROJECT": str(PROJECT_ROOT)}
    environment = {**os.environ, **own}
    try:
        output = call_slurm(
            ["srun", *options, "bash", "-c", line], environment=environment, seconds=_PROBE_SECONDS
        )
    except SlurmRejected as error:
        if "Unable to allocate resources" in str(error) or "Immediate" in str(error):
            return skipped(f"no {nodes} nodes were free within {_GRANT_SECONDS} s: {error}")
        raise
    finally:
        store.delete(f"{key}/address")
    return judge_probes(config, read_probes(output))


def judge_probes(config: RunConfig, probes: Sequence[NodeProbe]) -> CheckFinding:
    """Combine the nodes' probe results into one finding."""
    if len(probes) != config.cluster.nodes:
        return failed(
            f"{len(probes)} of {config.cluster.nodes} nodes answered: "
            f"{', '.join(probe.name for probe in probes) or 'none'}",
            "the environment of slurm.activate on the nodes; srun --nodes=N python -m ebbflow --help",
        )
    problems = [f"{probe.name}: {probe.problem}" for probe in probes if probe.problem]
    if problems:
        return failed(
            "; ".join(problems),
            f"a store that all nodes share, and TCP ports {AGENT_PORTS.start} to "
            f"{AGENT_PORTS.stop - 1} open between the nodes",
        )
    apart = [
        f"{probe.name} {probe.clock_seconds:+.1f} s"
        for probe in probes
        if abs(probe.clock_seconds) > _CLOCKS_APART_SECONDS + probe.clock_error_seconds
    ]
    if apart:
        return failed(
            f"clocks differ from that of {probes[0].name}: {', '.join(apart)}",
            "chronyc tracking on the nodes; munge refuses credentials when clocks differ by minutes",
        )
    widest = max((abs(probe.clock_seconds) for probe in probes), default=0.0)
    return passed(
        f"{', '.join(probe.name for probe in probes)}: share the store, reach each other, clocks "
        f"within {widest:.2f} s"
    )


def _measure_save(context: PreflightContext) -> float | None:
    """Return the longest duration in seconds of the job's latest saves, or None without any."""
    if context.job is None:
        return None
    try:
        return measure_save_seconds(
            read_events(Store.open(context.config.store).sub(job_prefix(context.job)))
        )
    except StoreError:
        return None


def _named_partitions(
    config: RunConfig, known: dict[str, dict[str, str]]
) -> list[tuple[str, PartitionConfig | None]]:
    """Return the partitions that the job may use: the configured ones or, by default, the cluster's
    default partition.
    """
    if config.slurm.partitions:
        return [(partition.name, partition) for partition in config.slurm.partitions]
    return [(name, None) for name, fields in known.items() if fields.get("Default") == "YES"]


def _find_partition_problem(
    config: RunConfig, partition: PartitionConfig, known: dict[str, dict[str, str]]
) -> str:
    """Return why a partition cannot run the job, or "" if it can."""
    name = partition.name
    fields = known.get(name)
    if fields is None:
        return f"there is no partition {name}"
    state = fields.get("State", "")
    if state != "UP":
        return f"{name} is {state}"
    nodes = config.cluster.nodes
    most = fields.get("MaxNodes", "")
    limit = int(most) if most.isdigit() else int(fields.get("TotalNodes", "0"))
    if isinstance(nodes, int) and nodes > limit:
        return f"{name} allows {limit} nodes, cluster.nodes is {nodes}"
    return _find_device_problem(config, partition)


def _find_device_problem(config: RunConfig, partition: PartitionConfig) -> str:
    """Return why a partition lacks the job's devices, or "" if it has them."""
    name = partition.name
    if partition.gres is None:
        if config.cluster.device == "cuda":
            return f"{name} names no gres, and cluster.device is cuda"
        return ""
    offered = call_slurm(["sinfo", "-h", "-p", name, "-o", "%G"]).split()
    kind = partition.gres.partition(":")[0].removeprefix("gres/")
    if not any(kind in text for text in offered):
        return f"{name} has {' and '.join(offered) or 'no devices'}, and no {partition.gres}"
    return ""


def _find_mount(folder: Path) -> tuple[str, str]:
    """Return the type and mount point of the file system of a folder, from /proc/mounts."""
    best = ("unknown", "/")
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return best
    for line in lines:
        _, mount, kind, *_ = line.split()
        # The last mount of a path hides those before it
        if folder.is_relative_to(mount) and len(mount) >= len(best[1]):
            best = (kind, mount)
    return best


CHECKS: list[Check] = [
    Check(
        "slurm-commands",
        "Slurm's commands work",
        "error",
        "quick",
        _SECONDS,
        ("A18", "A19"),
        check_commands,
    ),
    Check(
        "slurm-partitions",
        "partitions can run the job",
        "error",
        "quick",
        _SECONDS,
        ("A04", "I04"),
        check_partitions,
    ),
    Check(
        "slurm-limits",
        "limits and account allow the job",
        "error",
        "full",
        2 * _SECONDS,
        ("I04",),
        check_limits,
    ),
    Check(
        "slurm-time",
        "time limits leave time to save",
        "error",
        "full",
        _SECONDS,
        ("I04",),
        check_time,
    ),
    Check(
        "slurm-grace",
        "GraceTime suffices for a save",
        "warning",
        "full",
        _SECONDS,
        ("I01",),
        check_grace,
    ),
    Check(
        "slurm-nodes",
        "nodes share store, network and time",
        "error",
        "full",
        _PROBE_SECONDS + 10,
        ("A18", "H10"),
        check_nodes,
    ),
    Check(
        "slurm-store",
        "nodes share the store",
        "warning",
        "quick",
        10.0,
        ("A18", "H10"),
        check_store_is_shared,
    ),
]

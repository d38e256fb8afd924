"""Preflight checks of this machine: network, memory, cores, files, and how the batch divides among
its ranks.
"""

import functools
import http.client
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from math import lcm
from pathlib import Path

from ebbflow.core import footprint
from ebbflow.core.config.rule_base import division, nearest_divisors, nearest_multiples
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.config.shape_rules import DERIVED
from ebbflow.core.footprint import size_text
from ebbflow.core.preflight import CheckFinding, PreflightContext, failed, passed, skipped
from ebbflow.core.process import memory_left, read_system_file
from ebbflow.infra.checks.gpu import gpu_files, has_rdma
from ebbflow.infra.instance import (
    HOP_LIMIT_FIX,
    MetadataService,
    metadata_endpoint,
    metadata_unavailable_reason,
)

_ALL_ANSWERS_SECONDS = 1.8
_TOKEN_TTL_SECONDS = 60
_PATH = "meta-data/instance-id"
_NOTICE = "meta-data/spot/instance-action"
_OPTIONS = "aws ec2 modify-instance-metadata-options --instance-id ID"
_INTERFACES = Path("/sys/class/net")

_SHARED_MEMORY = Path("/dev/shm")
# Advised by the NCCL user guide for containers, whose default is 64 MiB
_NCCL_SHARED_BYTES = 1 << 30
_SHARED_MEMORY_FIX = (
    f"enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g {_SHARED_MEMORY}"
)

_NEAR = 4  # largest batch to suggest, as a multiple of the given one


def check_imds(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that EC2's metadata service accepts only requests with a token (IMDSv2) and has no spot
    notice.

    Spot notices and a role's credentials come from this service.
    """
    if reason := metadata_unavailable_reason(os.environ):
        return skipped(f"{reason}: neither spot notices nor a role's credentials")
    service = MetadataService(metadata_endpoint(os.environ))
    try:
        return _ask(service)
    except TimeoutError:
        detail = (
            f"{service.endpoint} accepts connections and answers none in time: its answer may "
            "not leave the host"
        )
        return failed(detail, HOP_LIMIT_FIX)
    except (OSError, http.client.HTTPException, ValueError) as error:
        detail = f"{service.endpoint} cannot be reached: {error}; spot notices would not arrive"
        return failed(
            detail, f"let {service.endpoint} through, or: {_OPTIONS} --http-endpoint enabled"
        )


def check_interfaces(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that the network interfaces named in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME exist on
    this machine.
    """
    if not _INTERFACES.is_dir():
        return skipped(f"this system has no {_INTERFACES}")
    there = sorted(name for _, name in socket.if_nameindex())
    named = {
        name: os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }
    wrong = [
        f"{variable}={value} names no interface of this machine ({', '.join(there)})"
        for variable, value in named.items()
        if value and not _matches(variable, value, there)
    ]
    if wrong:
        outward = next((name for name in there if name != "lo"), "lo")
        return failed(
            "\n".join(wrong),
            f"unset it, or name one that leads to the other nodes, such as {outward}",
        )
    given = ", ".join(f"{variable}={value}" for variable, value in named.items() if value)
    return passed(f"{given or 'none is named: gloo and NCCL choose'}")


def check_shared_memory(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that /dev/shm has room for the shared-memory segments of NCCL and of data loaders.

    Staging buffers of checkpoints are anonymous files, which do not count against the size of
    /dev/shm; `check_memory` counts them. On CPUs nothing uses /dev/shm, because gloo uses TCP.
    """
    if not _SHARED_MEMORY.is_dir():
        return skipped(f"this system ({sys.platform}) has no {_SHARED_MEMORY}")
    free = _free_shared_memory()
    gpus = len(gpu_files())
    if not gpus:
        detail = "none needed: ranks on CPUs talk over TCP, staging buffers count as memory"
        return passed(f"{_SHARED_MEMORY}: {size_text(free)} free, {detail}")
    arithmetic = (
        f"{_SHARED_MEMORY}: {size_text(free)} free, {size_text(_NCCL_SHARED_BYTES)} advised with "
        f"{gpus} GPUs: NCCL's segments between processes, and loader processes"
    )
    if free < _NCCL_SHARED_BYTES:
        return failed(arithmetic, _SHARED_MEMORY_FIX)
    return passed(arithmetic)


def describe_shared_memory_shortage(ranks: int) -> str:
    """Return a message if /dev/shm is too small for NCCL and several GPU ranks, else ""."""
    if ranks < 2 or not _SHARED_MEMORY.is_dir():
        return ""
    free = _free_shared_memory()
    if free >= _NCCL_SHARED_BYTES:
        return ""
    return (
        f"{_SHARED_MEMORY}: {size_text(free)} free for {ranks} ranks, {size_text(_NCCL_SHARED_BYTES)} "
        f"advised for NCCL's segments between them; fix: {_SHARED_MEMORY_FIX}"
    )


def check_locked_memory(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that a machine with an RDMA device has an unlimited RLIMIT_MEMLOCK, because the
    device's buffers are locked in memory.
    """
    if not has_rdma():
        return skipped("this machine has no InfiniBand or EFA device")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return passed("memory may be locked without limit")
    return failed(
        f"{size_text(soft)} may be locked; NCCL registers its buffers with the RDMA device and "
        "fails above this",
        "ulimit -l unlimited, or docker run --ulimit memlock=-1",
    )


def _with_gang(
    check: Callable[[RunConfig, footprint.HostGang], CheckFinding],
) -> Callable[[PreflightContext], CheckFinding]:
    """Decorate a check that needs the number of ranks.

    The check is skipped if the plan chooses this number.
    """

    @functools.wraps(check)
    def run(context: PreflightContext) -> CheckFinding:
        gang = footprint.local_gang(context.config)
        if gang is None:
            return skipped("the number of ranks is auto")
        return check(context.config, gang)

    return run


@_with_gang
def check_cores(config: RunConfig, gang: footprint.HostGang) -> CheckFinding:  # noqa: ARG001 (as the checks of a gang take)
    """Check that this machine, or its container, has a core for each rank."""
    if gpu_files():
        return skipped("ranks compute on the GPUs of this machine")
    cores = usable_cores()
    arithmetic = f"{gang} on {cores:g} cores"
    if gang.ranks > cores:
        return failed(
            f"{arithmetic}: they take turns",
            "use fewer ranks here, or expect no speed-up from them",
        )
    return passed(arithmetic)


@_with_gang
def check_open_files(config: RunConfig, gang: footprint.HostGang) -> CheckFinding:  # noqa: ARG001 (as the checks of a gang take)
    """Check that RLIMIT_NOFILE is large enough for the sockets and files of the rank that opens the
    most.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = footprint.open_files_per_rank(gang)
    arithmetic = f"{soft} open files allowed, about {needed} needed by a rank of {gang.ranks}"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return passed(arithmetic)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return failed(arithmetic, f"ulimit -n {needed}")
    return failed(
        f"{arithmetic}; the hard limit is {hard}", f"have the administrator allow nofile {needed}"
    )


@_with_gang
def check_memory(config: RunConfig, gang: footprint.HostGang) -> CheckFinding:
    """Check that this machine, or its container, has enough main memory for all ranks together."""
    limits = memory_left()
    if not limits:
        return skipped(f"this system ({sys.platform}) does not say how much memory is available")
    where, available = min(limits.items(), key=lambda item: item[1])
    if config.user_code is not None:
        return skipped(f"what {config.user_code} takes is not known before its model is measured")
    needed = footprint.host_memory_bytes(config, gang)
    staging = f"{size_text(footprint.staging_bytes(config))} of it to stage commits"
    arithmetic = (
        f"{size_text(needed)} needed by {gang} (estimated; {staging}), {size_text(available)} "
        f"{where}"
    )
    if needed > available:
        larger = 2 * config.training.gradient_accumulation_steps
        if config.parallel.mode == "ddp":
            shard = " or parallel.mode to fsdp2"
        else:
            shard = ""
        fix = (
            f"set training.gradient_accumulation_steps to {larger}{shard}, or use fewer ranks or "
            "a smaller model"
        )
        return failed(arithmetic, fix)
    return passed(arithmetic)


def usable_cores() -> float:
    """Return the number of cores that this process may use, limited by its CPU affinity and its
    cgroup's quota.
    """
    if hasattr(os, "sched_getaffinity"):
        available = float(len(os.sched_getaffinity(0)))
    else:
        available = float(os.cpu_count() or 1)
    quota, period = (*read_system_file("/sys/fs/cgroup/cpu.max").split(), "", "")[:2]  # version 2
    if not quota:
        quota, period = (
            read_system_file(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us")
            for name in ("quota", "period")
        )
    if quota.isdecimal() and period.isdecimal() and int(period):
        available = min(available, int(quota) / int(period))
    return available


def check_derived(context: PreflightContext) -> CheckFinding:
    """Check that no derived quantity, such as samples per micro-batch, is 0.

    With a 0, the job would do nothing.
    """
    config = context.config
    known = [setting for setting in DERIVED if setting.applies(config)]
    breaches = [setting.check(config) for setting in known]
    wrong = [breach for breach in breaches if breach is not None]
    if wrong:
        hints = "\n".join(hint or "" for _, hint in wrong)
        return failed("\n".join(message for message, _ in wrong), hints)
    return passed(", ".join(f"{setting.name} {setting.value(config)}" for setting in known))


@_with_gang
def check_batch(config: RunConfig, gang: footprint.HostGang) -> CheckFinding:
    """Check that each rank gets the same number of samples in each micro-batch."""
    batch = config.training.batch_size
    accumulation = config.training.gradient_accumulation_steps
    parts = gang.ranks * accumulation
    samples, rest = divmod(batch, parts)
    arithmetic = f"{batch} = {gang.ranks} ranks × {accumulation} accumulation × {samples}"
    if rest:
        return failed(f"{arithmetic} + {rest}", f"set training.batch_size to a multiple of {parts}")
    return passed(f"{arithmetic} samples per micro-batch")


@_with_gang
def check_elastic(config: RunConfig, gang: footprint.HostGang) -> CheckFinding:
    """Check that batch and shards divide evenly among fewer nodes too, so that a job can survive
    lost nodes.
    """
    if gang.nodes == 1:
        return skipped("a single node cannot lose another")
    batch = config.training.batch_size
    accumulation = config.training.gradient_accumulation_steps
    if config.parallel.mode == "hsdp":
        shard = config.parallel.shard_size
    else:
        shard = None
    fits = []
    fails = []
    for nodes in range(gang.nodes, 0, -1):
        smaller = footprint.HostGang(nodes=nodes, processes_per_node=gang.processes_per_node)
        trouble = _trouble(batch, accumulation, shard, smaller)
        if trouble is None:
            fits.append(str(nodes))
        else:
            fails.append(
                f"{nodes} nodes, {smaller.ranks} ranks: {trouble}"
                if nodes > 1
                else f"1 node: {trouble}"
            )
    if not fails:
        return passed(f"{batch} samples divide on {', '.join(fits)} nodes")
    told = (
        f"the job could go on with {', '.join(fits) or 'no number of'} nodes, and not with\n"
        + "\n".join(fails)
    )
    return failed(told, _fix(batch, accumulation, gang, shard))


def _ask(service: MetadataService) -> CheckFinding:
    limit = time.monotonic() + _ALL_ANSWERS_SECONDS

    def get(path: str, token: str) -> tuple[int, str]:
        return service.get(path, token, seconds=limit - time.monotonic())

    status, token = service.token(ttl_seconds=_TOKEN_TTL_SECONDS, seconds=limit - time.monotonic())
    if status == 403:
        return failed(
            "the metadata service is turned off (403)", f"{_OPTIONS} --http-endpoint enabled"
        )
    if status != 200 or not token:
        detail = (
            f"{service.endpoint} gives no token: status {status}; this is not an IMDSv2 service"
        )
        return failed(
            detail, "check AWS_EC2_METADATA_SERVICE_ENDPOINT, and what else listens there"
        )
    status, instance = get(_PATH, token)
    if status != 200:
        return failed(
            f"{_PATH} answers {status} to a fresh token",
            "check proxies and firewalls between here and the service",
        )
    status, notice = get(_NOTICE, token)
    if status == 200:
        return failed(
            f"{instance} has a spot interruption notice: {notice}", "start on another instance"
        )
    status, _ = get(_PATH, "")
    if status == 200:
        detail = f"{instance}: IMDSv1 answers requests without a token"
        return failed(detail, f"{_OPTIONS} --http-tokens required")
    return passed(
        f"{instance}: IMDSv2 works, IMDSv1 is refused ({status}), no spot notice is pending"
    )


def _free_shared_memory() -> int:
    statistics = os.statvfs(_SHARED_MEMORY)
    return statistics.f_bavail * statistics.f_frsize


def _matches(variable: str, value: str, there: list[str]) -> bool:
    """Return whether the value of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME matches the interfaces
    `there` of this machine.

    GLOO_SOCKET_IFNAME contains names, all of which must exist. NCCL_SOCKET_IFNAME contains
    prefixes, exclusions after '^', or exact names after '=' (NCCL user guide,
    "NCCL_SOCKET_IFNAME").
    """
    if variable.startswith("GLOO"):
        return all(name.strip() in there for name in value.split(","))
    names = [
        name.strip().partition(":")[0] for name in value.lstrip("^=").split(",") if name.strip()
    ]
    if value.startswith("="):
        return any(name in there for name in names)
    found = [name for name in there if name.startswith(tuple(names))]
    if value.startswith("^"):
        return len(found) < len(there)
    return bool(found)


def _trouble(
    batch: int, accumulation: int, shard: int | None, gang: footprint.HostGang
) -> str | None:
    """Return why a gang cannot divide the batch or the shards evenly, or None if it can.

    The text suggests numbers of gradient accumulation steps that would work.
    """
    if shard is not None and gang.ranks % shard:
        return (
            f"groups of parallel.shard_size do not divide the ranks: {division(gang.ranks, shard)}"
        )
    if batch % (gang.ranks * accumulation) == 0:
        return None
    if batch % gang.ranks:
        return f"no accumulation does: {division(batch, gang.ranks)}"
    share = batch // gang.ranks
    would = " or ".join(map(str, nearest_divisors(share, accumulation)))
    return (
        f"{share} samples per rank do not divide by {accumulation} accumulation; {would} would do"
    )


def _fix(batch: int, accumulation: int, gang: footprint.HostGang, shard: int | None) -> str:
    smallest = lcm(
        *(nodes * gang.processes_per_node * accumulation for nodes in range(1, gang.nodes + 1))
    )
    batches = [size for size in nearest_multiples(smallest, batch) if size <= _NEAR * batch]
    if batch % smallest == 0 or not batches:
        sized = "resume on one of the numbers of nodes that fit"
    else:
        sized = (
            f"set training.batch_size to {' or '.join(map(str, batches))}, which all of them divide"
        )
    if shard is not None and shard > gang.processes_per_node:
        sized += f", and parallel.shard_size to {gang.processes_per_node}, the ranks of a node"
    return f"{sized}, or leave it: a shrink is yours to ask for"

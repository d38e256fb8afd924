"""Settings of the environment that guides recommend and that do nothing, slow the job down, or break it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.infra.checks.devices import gpu_files, has_rdma
from ebbflow.infra.config.overrides import PREFIX
from ebbflow.infra.instance import VARIABLES as MACHINE_VARIABLES
from ebbflow.infra.preflight import Finding, PreflightContext
from ebbflow.infra.signing_key import NAME_VARIABLE

# All that some part of Ebbflow reads, whether a user sets it or another part; a test finds them in the code.
_OWN_VARIABLES = (
    *("EBBFLOW_RUNS", "EBBFLOW_PARENT_PID", "EBBFLOW_SPEC", "EBBFLOW_STANDBY_OF", "EBBFLOW_EXECUTION"),
    *("EBBFLOW_SUBMIT", "EBBFLOW_UNPLACED", "EBBFLOW_RUNNABLE_SECONDS", "EBBFLOW_GRACE_SECONDS", "EBBFLOW_TASK_FILE"),
    *(
        "EBBFLOW_LAUNCHER",
        "EBBFLOW_PROJECT",
        "EBBFLOW_RUN_CLAIM",
        "EBBFLOW_SHIM_RULES",
        "EBBFLOW_SHIM_FILES",
        NAME_VARIABLE,
        *MACHINE_VARIABLES.values(),
    ),
)
_ON = ("1", "true", "yes", "on", "y", "t")


def _always(value: str, context: PreflightContext) -> bool:
    return True


def _is_on(value: str, context: PreflightContext) -> bool:
    return value.strip().lower() in _ON


def _cuts_off_rdma(value: str, context: PreflightContext) -> bool:
    return _is_on(value, context) and has_rdma()


def _is_detail(value: str, context: PreflightContext) -> bool:
    return value.strip().upper() == "DETAIL"


@dataclass(frozen=True)
class Advice:
    """A variable, what is wrong with setting it, what to do instead, and for which values that holds."""

    variable: str
    why: str
    instead: str
    applies: Callable[[str, PreflightContext], bool] = _always


def _renamed(old: str, new: str) -> Advice:
    return Advice(old, f"is a deprecated name of {new}, which torch 2.13 reads as well", f"set {new}")


_DEADLINES = "set cluster.step_deadline_seconds and cluster.start_deadline_seconds"

ADVICE = (
    Advice("NCCL_TIMEOUT", "is not in NCCL's user guide, and torch 2.13 does not read it", _DEADLINES),
    Advice("TORCH_DIST_TIMEOUT", "is not read by torch 2.13", _DEADLINES),
    Advice("NCCL_BACKEND", "is not in NCCL's user guide, and torch 2.13 does not read it", "unset it"),
    Advice("NCCL_TOPOLOGY", "is no variable of NCCL", "set NCCL_TOPO_FILE"),
    Advice("NCCL_TOPOLOGY_FILE", "is no variable of NCCL", "set NCCL_TOPO_FILE"),
    _renamed("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    _renamed("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
    _renamed("NCCL_DESYNC_DEBUG", "TORCH_NCCL_DESYNC_DEBUG"),
    _renamed("NCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING"),
    Advice(
        "TORCH_DISTRIBUTED_DEBUG",
        "at DETAIL checks each collective by another one: for finding one bug, not for training",
        "set it to INFO",
        _is_detail,
    ),
    Advice(
        "CUDA_LAUNCH_BLOCKING",
        "waits for each kernel before the next is launched: for finding one bug, not for training",
        "unset it; it has no bearing on /dev/shm",
        _is_on,
    ),
    Advice(
        "NCCL_IB_DISABLE",
        "turns InfiniBand and EFA off, and this machine has such a device",
        "unset it, or set NCCL_SOCKET_IFNAME if it was meant to choose an interface",
        _cuts_off_rdma,
    ),
    Advice(
        "NCCL_P2P_DISABLE",
        "sends what NVLink or PCIe would carry through main memory",
        "unset it, unless NCCL's own tests hang without",
        _is_on,
    ),
)


def check_advice(context: PreflightContext) -> Finding:
    """Variables of this environment that do not do what whoever set them hopes for."""
    found = [
        (f"{one.variable}={os.environ[one.variable]} {one.why}", f"{one.variable}: {one.instead}")
        for one in ADVICE
        if one.variable in os.environ and one.applies(os.environ[one.variable], context)
    ]
    found += [_unknown(name) for name in sorted(os.environ) if _is_unknown(name, context)]
    if found:
        return Finding.failed("\n".join(what for what, _ in found), "\n".join(fix for _, fix in found))
    return Finding.passed(f"none of {len(ADVICE)} variables that mislead or slow down is set")


def check_debug_level(context: PreflightContext) -> Finding:
    """No debugging level at which DDP dies of a segmentation fault in its constructor (torch 2.13 on CPUs)."""
    level, mode = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF"), context.config.parallel.mode
    detail = f"TORCH_DISTRIBUTED_DEBUG={level}, parallel.mode {mode}"
    if mode == "ddp" and _is_detail(level, context) and not gpu_files():
        return Finding.failed(f"{detail}: every rank would be killed by signal 11", "TORCH_DISTRIBUTED_DEBUG=INFO")
    return Finding.passed(detail)


def _is_unknown(name: str, context: PreflightContext) -> bool:
    if name == context.config.checkpoint.signing_key_env:
        return False
    return name.startswith("EBBFLOW_") and not name.startswith(PREFIX) and name not in _OWN_VARIABLES


def _unknown(name: str) -> tuple[str, str]:
    """A variable that looks like ours: perhaps an override with one underscore too few."""
    close = difflib.get_close_matches(name, _OWN_VARIABLES, n=1, cutoff=0.85)
    if close:
        return f"{name} is read by nobody", f"{name}: did you mean {close[0]}?"
    override = PREFIX + re.sub("^EBBFLOW_+", "", name)
    return f"{name} is read by nobody", f"{name}: keys are overridden by {PREFIX}SECTION__KEY, such as {override}"

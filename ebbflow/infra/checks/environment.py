"""Preflight checks of a job's environment: configuration, Python, packages and environment
variables.
"""

import difflib
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.core.config.keys import PREFIX, leaf_fields
from ebbflow.core.config.load import violations
from ebbflow.core.preflight import CheckFinding, PreflightContext, failed, passed, skipped
from ebbflow.core.program import python_path
from ebbflow.core.requirements import (
    NEWEST_PYTHON,
    OLDEST_PYTHON,
    REQUIREMENTS,
    TESTED_PYTHON,
    TESTED_TORCH,
)
from ebbflow.core.signing_key import NAME_VARIABLE, signing_key_problem
from ebbflow.core.store.marker import VARIABLE as MARKER_VARIABLE
from ebbflow.infra.checks.gpu import NoAnswer, gpu_files, has_rdma, run_program
from ebbflow.infra.instance import VARIABLES as MACHINE_VARIABLES

_ANSWER_SECONDS = 1.5
_IMPORT_SECONDS = 90.0
_INSTALL = f"{sys.executable} -m pip install -r requirements.txt"

# All variables that Ebbflow reads, whether a user or Ebbflow sets them. A test checks that this
# list is complete.
_OWN_VARIABLES = (
    "EBBFLOW_STORE_REGION",
    "EBBFLOW_RUNS",
    "EBBFLOW_PARENT_PID",
    "EBBFLOW_SPEC",
    "EBBFLOW_JOB",
    "EBBFLOW_PROBE",
    "EBBFLOW_STANDBY_OF",
    "EBBFLOW_EXECUTION",
    "EBBFLOW_SUBMIT",
    "EBBFLOW_UNPLACED",
    "EBBFLOW_RUNNABLE_SECONDS",
    "EBBFLOW_GRACE_SECONDS",
    "EBBFLOW_TASK_FILE",
    "EBBFLOW_CLOUD",
    "EBBFLOW_LAUNCHER",
    "EBBFLOW_LIVE_PAGE",
    "EBBFLOW_PROJECT",
    "EBBFLOW_RUN_CLAIM",
    "EBBFLOW_SHIM_RULES",
    "EBBFLOW_SHIM_FILES",
    "EBBFLOW_POD_VARIABLES",
    NAME_VARIABLE,
    MARKER_VARIABLE,
    *MACHINE_VARIABLES.values(),
)
_ON = ("1", "true", "yes", "on", "y", "t")

_DEADLINES = "set cluster.step_deadline_seconds and cluster.start_deadline_seconds"


@dataclass(frozen=True)
class Advice:
    """Advice against an environment variable, with the reason and an alternative."""

    variable: str
    why: str  # the problem; continues the variable's name
    instead: str  # the alternative
    # Returns whether the advice applies to a value
    applies: Callable[[str], bool] = lambda value: True  # noqa: ARG005 (takes the value, as others do)


def check_configuration(context: PreflightContext) -> CheckFinding:
    """Check that the configuration, including all overrides, violates no rule."""
    broken = violations(context.config)
    if broken:
        hints = [violation.hint or f"change {violation.keys[0]}" for violation in broken]
        return failed("\n".join(violation.message for violation in broken), "\n".join(hints))
    if context.config_path is None:
        where = "no file"
    else:
        where = context.config_path.name
    return passed(f"{where}: {len(leaf_fields())} keys, types, ranges and rules hold")


def check_signing_key(context: PreflightContext) -> CheckFinding:
    """Check that the environment variable with the key for signing commits is set on this machine."""
    name = context.config.checkpoint.signing_key_env
    if name is None:
        return passed("commits are not signed (checkpoint.signing_key_env is null)")
    if problem := signing_key_problem(name):
        return failed(
            problem,
            f"set {name} to the job's key; for a new job: export {name}=$(openssl rand -hex 32)",
        )
    return passed(f"commits are signed with the key in {name}")


def check_interpreter(context: PreflightContext) -> CheckFinding:
    """Check that the command `python` runs the current interpreter.

    Metaflow starts the other nodes of a local run with `python`.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return failed(f"Python {version} is too old", "use Python 3.11, 3.12 or 3.13")
    folder = os.path.dirname(os.path.abspath(sys.executable))
    found = shutil.which("python", path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if found is None:
        detail = f"Python {version}, but there is no `python` in {folder} nor on PATH"
    elif _same_environment(found):
        now = shutil.which("python")
        first = now is not None and _same_environment(now)
        if first:
            note = ""
        else:
            note = f"; `python` is {now or 'not on PATH'} here, and the flow puts {folder} first"
        return passed(f"Python {version}, {sys.executable}{note}")
    else:
        detail = f"`python` is {found}, another interpreter than {sys.executable}"
    if context.config.cluster.nodes == 1:
        return passed(f"Python {version}; a single node starts no other, but {detail}")
    return failed(
        detail,
        f"run with the project's .venv/bin/python, or: ln -s {sys.executable} {folder}/python",
    )


def check_packages(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that all required packages are installed and that torch is a supported release.

    No package is imported.
    """
    versions = {requirement: requirement.installed() for requirement in REQUIREMENTS}
    wrong = [
        f"{requirement} is not installed"
        for requirement, version in versions.items()
        if version is None
    ]
    wrong += [
        f"{requirement.name} {version} is installed, {requirement} is needed"
        for requirement, version in versions.items()
        if version is not None and requirement.strict and not requirement.is_supported(version)
    ]
    if wrong:
        return failed("\n".join(wrong), _INSTALL)
    return passed(
        ", ".join(f"{name.name} {version}" for name, version in versions.items() if name.strict)
    )


def check_versions(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that the test suite covers the installed versions of Python and of the packages."""
    untested = []
    if sys.version_info[:2] != TESTED_PYTHON:
        supported = OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON
        if supported:
            note = "supported, 3.11 is tested"
        else:
            note = "3.11 to 3.13 are supported, 3.11 is tested"
        untested.append(f"Python {sys.version_info[0]}.{sys.version_info[1]} ({note})")
    for requirement in REQUIREMENTS:
        version = requirement.installed()
        if version is None or requirement.is_tested(version):
            continue
        if requirement.tested and requirement.is_supported(version):
            tested = ".".join(map(str, requirement.tested))
            untested.append(f"{requirement.name} {version} (supported, {tested} is tested)")
        elif not requirement.strict:
            untested.append(f"{requirement.name} {version} (supported: {requirement})")
    if untested:
        return failed("untested: " + ", ".join(untested), _INSTALL)
    return passed("all packages have tested versions")


def check_imports(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that a new process can import the packages of a rank, regardless of its working
    directory.
    """
    code = (
        "import torch.distributed, numpy, obstore, awscrt.checksums; "
        "from ebbflow.training.torch_names import describe_release; "
        f"note = describe_release(torch.__version__, {TESTED_TORCH}); "
        "print(note or f'torch {torch.__version__}')"
    )
    try:
        release = run_program(
            [sys.executable, "-c", code], _IMPORT_SECONDS, {"PYTHONPATH": python_path()}
        )
    except NoAnswer as error:
        return failed(f"a rank's imports fail: {error}", _INSTALL)
    return passed(f"{release.strip()}, and what else a rank imports")


def check_ports(context: PreflightContext) -> CheckFinding:  # noqa: ARG001 (each check takes the context)
    """Check that the loopback interface accepts connections, which ranks on this machine need."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_ANSWER_SECONDS)
            with socket.create_connection(server.getsockname(), timeout=_ANSWER_SECONDS) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"ebb")
                    if client.recv(3) != b"ebb":
                        return failed(
                            "127.0.0.1 altered the bytes", "look for a proxy on the loopback"
                        )
    except OSError as error:
        fix = "bring the loopback interface up (ip link set lo up) and allow it in the firewall"
        return failed(f"no connection over 127.0.0.1: {error}", fix)
    return passed("127.0.0.1 accepts connections")


def check_host_name(context: PreflightContext) -> CheckFinding:
    """Check that the hostname resolves to this host.

    Gloo resolves the hostname to find its network interface.
    """
    if context.config.cluster.nodes == 1:
        return skipped("a single node looks up no names")
    name = socket.gethostname()
    fix = f"add the line '127.0.0.1 {name}' to /etc/hosts"
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError as error:
        return failed(
            f"hostname {name} does not resolve: {error}; gloo falls back to the loopback", fix
        )
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return passed(f"hostname {name} resolves to {address[0]}, an address of this host")
    return failed(
        f"hostname {name} resolves to {', '.join(addresses)}, no address of this host", fix
    )


def check_advice(context: PreflightContext) -> CheckFinding:
    """Check that no environment variable is set that Ebbflow ignores, that misleads, or that slows
    down training.
    """
    found = [
        (
            f"{advice.variable}={os.environ[advice.variable]} {advice.why}",
            f"{advice.variable}: {advice.instead}",
        )
        for advice in ADVICE
        if advice.variable in os.environ and advice.applies(os.environ[advice.variable])
    ]
    found += [_unknown(name) for name in sorted(os.environ) if _is_unknown(name, context)]
    if found:
        return failed("\n".join(what for what, _ in found), "\n".join(fix for _, fix in found))
    return passed(f"none of {len(ADVICE)} variables that mislead or slow down is set")


def check_debug_level(context: PreflightContext) -> CheckFinding:
    """Check that TORCH_DISTRIBUTED_DEBUG is not set to a level that crashes DDP's constructor
    (torch 2.13 on CPUs).
    """
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    mode = context.config.parallel.mode
    detail = f"TORCH_DISTRIBUTED_DEBUG={level}, parallel.mode {mode}"
    if mode == "ddp" and _is_detail(level) and not gpu_files():
        return failed(
            f"{detail}: every rank would be killed by signal 11", "TORCH_DISTRIBUTED_DEBUG=INFO"
        )
    return passed(detail)


def _same_environment(python: str) -> bool:
    """Return whether an executable is in the same folder as this process's Python, without
    following symbolic links.
    """
    return os.path.dirname(os.path.abspath(python)) == os.path.dirname(
        os.path.abspath(sys.executable)
    )


def _is_on(value: str) -> bool:
    return value.strip().lower() in _ON


def _is_detail(value: str) -> bool:
    return value.strip().upper() == "DETAIL"


def _renamed(old: str, new: str) -> Advice:
    return Advice(
        old, f"is a deprecated name of {new}, which torch 2.13 reads as well", f"set {new}"
    )


ADVICE = (
    Advice(
        "NCCL_TIMEOUT", "is not in NCCL's user guide, and torch 2.13 does not read it", _DEADLINES
    ),
    Advice("TORCH_DIST_TIMEOUT", "is not read by torch 2.13", _DEADLINES),
    Advice(
        "NCCL_BACKEND", "is not in NCCL's user guide, and torch 2.13 does not read it", "unset it"
    ),
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
        lambda value: _is_on(value) and has_rdma(),
    ),
    Advice(
        "NCCL_P2P_DISABLE",
        "sends what NVLink or PCIe would carry through main memory",
        "unset it, unless NCCL's own tests hang without",
        _is_on,
    ),
)


def _is_unknown(name: str, context: PreflightContext) -> bool:
    if name == context.config.checkpoint.signing_key_env:
        return False
    return (
        name.startswith("EBBFLOW_") and not name.startswith(PREFIX) and name not in _OWN_VARIABLES
    )


def _unknown(name: str) -> tuple[str, str]:
    """Return (problem, fix) for an unknown EBBFLOW_ variable, such as an override that lacks one
    underscore.
    """
    close = difflib.get_close_matches(name, _OWN_VARIABLES, n=1, cutoff=0.85)
    if close:
        return f"no program reads {name}", f"{name}: did you mean {close[0]}?"
    override = PREFIX + re.sub("^EBBFLOW_+", "", name)
    return (
        f"no program reads {name}",
        f"{name}: keys are overridden by {PREFIX}SECTION__KEY, such as {override}",
    )

"""Preflight checks of GPUs: the driver, CUDA and the GPUs that torch finds.

These checks run in preflight on the launching machine, and in the agent of each node
(`training.launch.devices.NodeGpuCheck`).
"""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.footprint import local_gang
from ebbflow.core.preflight import CheckFinding, PreflightContext, failed, passed, skipped
from ebbflow.core.program import python_path
from ebbflow.core.requirements import DRIVER_FILE, installed_versions

GPU_FILES = "/dev/nvidia[0-9]*"  # one for each GPU
RDMA_DEVICES = Path("/sys/class/infiniband")  # InfiniBand, RoCE and EFA alike

_ANSWER_SECONDS = 15.0  # nvidia-smi initializes each GPU that no process keeps awake
_TORCH_SECONDS = 75.0
# The oldest driver of each CUDA release family: NVIDIA, CUDA Compatibility, "Minor Version
# Compatibility", table 1 (read in November 2026).
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_WHEELS = "https://pytorch.org/get-started/locally"

# Runs in a child process, which a broken driver may crash or hang. One addition proves that a GPU
# runs kernels.
_ASK_TORCH = """
import json, torch
seen, error = (torch.cuda.device_count() if torch.version.cuda else 0), ""
if torch.version.cuda:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as raised:
        seen, error = 0, " ".join(str(raised).split())
answer = {"torch": torch.__version__, "cuda": torch.version.cuda, "error": error, "gpus": []}
answer["arches"] = [] if error else torch.cuda.get_arch_list()
for index in range(seen):
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    gpu = {"name": name, "capability": capability, "error": ""}
    try:
        assert (torch.ones(2, device=f"cuda:{index}") + 1).sum().item() == 4
    except (RuntimeError, AssertionError) as error:
        gpu["error"] = (str(error).splitlines() or ["a wrong sum"])[0]
    answer["gpus"].append(gpu)
print(json.dumps(answer))
"""


class NoAnswer(Exception):
    """Failure of another program, such as nvidia-smi or a Python that imports torch.

    The message is the reason.
    """


def gpu_files() -> list[str]:
    return glob.glob(GPU_FILES)


def gpus_hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def visible_gpus() -> int:
    """Count the GPUs that a new process would see, from device files and CUDA_VISIBLE_DEVICES."""
    return len(list_visible_gpus())


def list_visible_gpus() -> list[str]:
    """Return the names of the GPUs that a new process would see, as CUDA_VISIBLE_DEVICES has them."""
    if gpus_hidden():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in named if name.strip()]
    if names:
        return names[: len(gpu_files())]
    return [str(number) for number in range(len(gpu_files()))]


def has_rdma() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def check_gpu(context: PreflightContext) -> CheckFinding:  # noqa: PLR0911 (one return for each case)
    """Check that torch computes on every GPU of this machine.

    If cluster.device is cuda, each rank needs a GPU.
    """
    config = context.config
    if config.cluster.device == "cpu":
        return skipped("cluster.device is cpu")
    if context.target in ("batch", "kubernetes"):
        return skipped(f"ranks run on {context.target}: the agent of each node checks its own GPUs")
    wanted = config.cluster.device == "cuda"
    if not may_have_gpus(wanted=wanted):
        return skipped("there is no NVIDIA driver here")
    if gpus_hidden() and not wanted:
        return skipped("CUDA_VISIBLE_DEVICES hides all GPUs")
    finding, gpus = try_gpus()
    gang = local_gang(config)
    if finding.status != "passed":
        return CheckFinding(
            finding.status, finding.detail, f"{finding.fix}, or set cluster.device to cpu"
        )
    if gang is None or gang.ranks <= gpus:
        return finding
    short = f"{gang} on {gpus} GPUs"
    if wanted:
        fix = (
            "set cluster.nodes and cluster.processes_per_node to one rank per GPU, or "
            "cluster.device to auto or cpu"
        )
        return failed(f"{short}, and cluster.device is cuda", fix)
    return passed(
        f"{finding.detail}\n{short}: all ranks train on the CPU; one rank per GPU would use them"
    )


def may_have_gpus(*, promised: int = 0, wanted: bool = False, by_tool: bool = True) -> bool:
    """Return whether this machine may have GPUs, judging by the placement, the configuration and
    the machine itself.

    Args:
        promised: GPUs per node according to the placement, or 0 if unknown.
        wanted: the configuration demands GPUs.
        by_tool: count nvidia-smi on the PATH as a sign of GPUs. GPU images contain it even on
            machines without GPUs.
    """
    here = bool(gpu_files()) or (by_tool and shutil.which("nvidia-smi") is not None)
    return promised > 0 or wanted or (here and not gpus_hidden())


def try_gpus(promised: int = 0) -> tuple[CheckFinding, int]:
    """Compute one addition on each GPU with torch, in a child process.

    Returns the finding and the number of GPUs that torch found. The check passes if the addition
    works on every GPU. promised: GPUs per node according to the placement, or 0 if unknown.
    """
    if promised:
        promise = f", and this node was chosen for its GPUs ({promised} per node)"
    else:
        promise = ""
    if gpus_hidden():
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
        return failed(f"{hidden}{promise}", "unset CUDA_VISIBLE_DEVICES"), 0
    if not gpu_files() and not shutil.which("nvidia-smi"):
        fix = (
            "give the container its GPUs (docker run --gpus all; an AMI or node image with the "
            "NVIDIA driver)"
        )
        return failed(f"there is no {GPU_FILES} and no nvidia-smi here{promise}", fix), 0
    try:
        driver = _ask_driver()
    except NoAnswer as error:
        return failed(
            str(error), "run nvidia-smi; reinstall or reload the driver until it lists the GPUs"
        ), 0
    try:
        answer = _ask_torch()
    except NoAnswer as error:
        return failed(
            f"driver {driver.version}: {error}", f"install a torch that works with it: {_WHEELS}"
        ), 0
    return _compare(driver, answer), len(answer["gpus"])


def has_kernels_for(capability: int, architectures: list[str]) -> bool:
    """Return whether a torch build has kernels that a GPU can run.

    Machine code (sm_80) runs on GPUs of the same major version and the same or a later minor
    version. With a suffix (sm_90a) it runs on exactly that version. Portable code (PTX, compute_80)
    runs on the same and all later versions (CUDA C++ Programming Guide, "Application
    Compatibility"). capability: the GPU's compute capability × 10, such as 90 for 9.0.
    """
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_([0-9]+)([a-z]?)", name)
        if match is None:
            continue
        kind = match[1]
        number = int(match[2])
        exact = bool(match[3])
        if number == capability or (not exact and number < capability and kind == "compute"):
            return True
        if not exact and kind == "sm" and number // 10 == capability // 10 and number < capability:
            return True
    return False


def run_program(command: list[str], seconds: float, variables: dict[str, str] | None = None) -> str:
    """Run a program in the folder / and return its standard output.

    Raises NoAnswer if it fails or takes too long.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env=os.environ | (variables or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{name} did not answer within {seconds:g} s") from None
    except OSError as error:
        raise NoAnswer(f"{name} cannot be started: {error}") from None
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip().splitlines() or ["it says nothing"]
        raise NoAnswer(
            f"{name} ended with {done.returncode}: "
            f"{said[-1] if command[0] == sys.executable else said[0]}"
        )
    return done.stdout


@dataclass(frozen=True)
class _Driver:
    version: str
    gpus: list[str]


def _compare(driver: _Driver, answer: dict) -> CheckFinding:
    torch = answer["torch"]
    cuda = answer["cuda"]
    architectures = answer["arches"]
    names = ", ".join(driver.gpus) or "no GPU listed"
    here = f"driver {driver.version} ({names}), torch {torch}"
    if cuda is None:
        fix = f"install torch for CUDA ({_WHEELS})"
        return failed(f"{here} is built without CUDA: ranks would train on the CPU", fix)
    family = int(cuda.split(".")[0])
    major = int(driver.version.split(".")[0])
    oldest = _OLDEST_DRIVER.get(family)
    if oldest is not None and major < oldest:
        fix = f"upgrade the driver, or install torch for an older CUDA: {_WHEELS}"
        return failed(
            f"{here} for CUDA {cuda}, which needs driver {oldest} or newer: {major} < {oldest}", fix
        )
    if not answer["gpus"]:
        said = answer["error"] or "torch sees none of the GPUs"
        return failed(f"{here} for CUDA {cuda}: {said}", _fix_of(said))
    for index, gpu in enumerate(answer["gpus"]):
        capability = 10 * gpu["capability"][0] + gpu["capability"][1]
        if not has_kernels_for(capability, architectures):
            what = (
                f"GPU {index}, {gpu['name']}, is sm_{capability}; torch {torch} has "
                f"{' '.join(architectures)}"
            )
            return failed(
                f"no kernel image: {what}", f"install a torch with sm_{capability}: {_WHEELS}"
            )
        if gpu["error"]:
            return failed(
                f"GPU {index}, {gpu['name']}, cannot add: {gpu['error']}", "run nvidia-smi -q"
            )
    return passed(f"{here} for CUDA {cuda}: an addition on each of {len(answer['gpus'])} GPUs")


def _fix_of(said: str) -> str:
    if "802" in said or "system not yet initialized" in said:  # cudaErrorSystemNotReady
        return (
            "start NVIDIA Fabric Manager of the driver's version: systemctl start "
            "nvidia-fabricmanager"
        )
    if "too old" in said or "insufficient" in said:
        return f"upgrade the driver, or install torch for an older CUDA: {_WHEELS}"
    return "run nvidia-smi; see CUDA_VISIBLE_DEVICES, and whether the container was given its GPUs"


def _ask_driver() -> _Driver:
    """Return the driver's version and GPUs from nvidia-smi.

    Without nvidia-smi, read only the version from /proc.
    """
    if shutil.which("nvidia-smi") is None:
        version = installed_versions().get("NVIDIA driver")
        if version is None:
            raise NoAnswer(
                f"{GPU_FILES} exist, but neither nvidia-smi nor {DRIVER_FILE} shows the driver's "
                "version"
            )
        return _Driver(version, [])
    lines = run_program(
        ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"], _ANSWER_SECONDS
    )
    rows = [line.split(", ", 1) for line in lines.splitlines() if ", " in line]
    if not rows or not rows[0][0].split(".")[0].isdecimal():
        raise NoAnswer(f"nvidia-smi lists no GPU: {(lines.splitlines() or ['it says nothing'])[0]}")
    return _Driver(rows[0][0], [name for _, name in rows])


def _ask_torch() -> dict:
    path = python_path()
    said = run_program([sys.executable, "-c", _ASK_TORCH], _TORCH_SECONDS, {"PYTHONPATH": path})
    try:
        return json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        raise NoAnswer("torch did not say what it was built for") from None

"""Preflight checks of GPUs: the driver, CUDA and the GPUs that torch finds.

These checks run in preflight on the launching machine, and in the agent of each node
(`training.launch.devices.NodeGpuCheck`).
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.config.device_settings import BFLOAT16_CAPABILITY, settle_for_device
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import (
    HostGang,
    causal_lm_shape,
    local_gang,
    rank_bytes,
    size_text,
)
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
_MIG = "MIG-"  # the ids of parts of a GPU begin so
_WHEELS = "https://pytorch.org/get-started/locally"
_OTHER_DRIVER = f"upgrade the driver, or install torch for an older CUDA: {_WHEELS}"
_OTHER_LIBRARY = (
    "use the driver's own libcuda.so.1: take cuda-compat out of LD_LIBRARY_PATH, or reboot if the "
    "driver was upgraded"
)
_HIDDEN_GPUS = (
    "run nvidia-smi; see CUDA_VISIBLE_DEVICES, and whether the container was given its GPUs"
)
# Words of torch's error, and the fix
_FIXES = (
    (
        "system not yet initialized",  # error 802
        "start NVIDIA Fabric Manager of the driver's version: systemctl start nvidia-fabricmanager",
    ),
    ("too old", _OTHER_DRIVER),
    ("insufficient", _OTHER_DRIVER),
    ("unsupported display driver", _OTHER_LIBRARY),  # error 803
    ("forward compatibility was attempted", _OTHER_LIBRARY),  # error 804
    ("CUDA driver is a stub library", "take the folder stubs of CUDA out of LD_LIBRARY_PATH"),
    ("CUDA unknown error", "load the module nvidia_uvm: nvidia-modprobe -u -c=0; else reboot"),
)

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
    memory = torch.cuda.get_device_properties(index).total_memory
    gpu = {"name": name, "capability": capability, "memory": memory, "error": ""}
    try:
        assert (torch.ones(2, device=f"cuda:{index}") + 1).sum().item() == 4
    except (RuntimeError, AssertionError) as error:
        gpu["error"] = (str(error).splitlines() or ["a wrong sum"])[0]
    answer["gpus"].append(gpu)
print(json.dumps(answer))
"""


class NoAnswer(Exception):
    """Exception for the failure of another program, such as nvidia-smi or a Python that imports
    torch.

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
    """Return the GPUs that a new process would see, named as in CUDA_VISIBLE_DEVICES.

    CUDA ignores an index that no GPU has and all names after it. Of several MIG devices it uses
    only the first.
    """
    if gpus_hidden():
        return []
    files = len(gpu_files())
    names = _named_gpus()
    if not names:
        return [str(number) for number in range(files)]
    if names[0].startswith(_MIG):
        return names[: min(1, files)]
    visible = []
    for name in names[:files]:
        if name.isdecimal() and int(name) >= files:
            break
        visible.append(name)
    return visible


def has_rdma() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def check_gpu(context: PreflightContext) -> CheckFinding:  # noqa: PLR0911 (one return for each case)
    """Check that torch computes on every GPU of this machine.

    If cluster.device is cuda, each rank needs a GPU.
    """
    config = context.config
    if config.cluster.device == "cpu":
        return skipped("cluster.device is cpu")
    elsewhere = _find_other_place(context)
    if elsewhere is not None:
        return skipped(f"ranks run on {elsewhere}: the agent of each node checks its own GPUs")
    wanted = config.cluster.device == "cuda"
    if not may_have_gpus(wanted=wanted):
        return skipped("there is no NVIDIA driver here")
    if gpus_hidden() and not wanted:
        return skipped("CUDA_VISIBLE_DEVICES hides all GPUs")
    finding, gpus = _try_gpus()
    gang = local_gang(config)
    if finding.status != "passed":
        return CheckFinding(
            finding.status, finding.detail, f"{finding.fix}, or set cluster.device to cpu"
        )
    if gang is None:
        gang = HostGang(nodes=1, processes_per_node=len(gpus))
    if gang.ranks <= len(gpus):
        return _compare_with_job(config, gang, gpus[: gang.ranks], finding)
    short = f"{gang} on {len(gpus)} GPUs"
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


def try_gpus(
    promised: int = 0, config: RunConfig | None = None, gang: HostGang | None = None
) -> tuple[CheckFinding, int]:
    """Compute one addition on each GPU with torch, in a child process.

    Returns the finding and the number of GPUs that torch found. The check passes if the addition
    works on every GPU, and if the GPUs of a node that was chosen for them suit the job.

    Args:
        promised: GPUs per node according to the placement, or 0 if unknown.
        config: the job's configuration; None: the GPUs are not compared with it.
        gang: the job's nodes and ranks.
    """
    finding, gpus = _try_gpus(promised)
    works = finding.status == "passed"
    if works and promised and config is not None and gang is not None:
        here = gang.processes_per_node
        if here <= len(gpus):
            finding = _compare_with_job(config, gang, gpus[:here], finding)
    return finding, len(gpus)


def describe_mixture(models: Sequence[tuple[str, float]]) -> str:
    """Return a message if the ranks' GPUs are of different models, or "" if all are equal.

    Args:
        models: name and compute capability of each rank's GPU.
    """
    counts = Counter(models)
    if len(counts) < 2:
        return ""
    named = ", ".join(f"{count} × {name}" for (name, _), count in counts.most_common())
    lowest = min(models, key=lambda model: model[1])
    return (
        f"the {len(models)} ranks have {len(counts)} kinds of GPU ({named}): each step waits for "
        f"the slowest, and the precision is that of {lowest[0]} (capability {lowest[1]}); fix: "
        "CUDA_VISIBLE_DEVICES with GPUs of one kind"
    )


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


@dataclass(frozen=True)
class _Gpu:
    name: str
    capability: float
    memory_bytes: int  # of a MIG device: its own


def _find_other_place(context: PreflightContext) -> str | None:
    """Return the backend whose machines train the job, or None if it is this machine.

    Without a target, the backend of the plan counts. Unless that is Slurm, a job with a local store
    stays on this machine, because containers cannot reach the folder.
    """
    planned = context.config.cluster.plan_for
    if context.target is not None:
        backend = context.target
    elif planned == "slurm" or "://" in context.config.store:
        backend = planned
    else:
        return None
    return None if backend == "local" else backend


def _try_gpus(promised: int = 0) -> tuple[CheckFinding, list[_Gpu]]:
    if promised:
        promise = f", and this node was chosen for its GPUs ({promised} per node)"
    else:
        promise = ""
    if gpus_hidden():
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
        return failed(f"{hidden}{promise}", "unset CUDA_VISIBLE_DEVICES"), []
    if not gpu_files() and not shutil.which("nvidia-smi"):
        fix = (
            "give the container its GPUs (docker run --gpus all; an AMI or node image with the "
            "NVIDIA driver)"
        )
        return failed(f"there is no {GPU_FILES} and no nvidia-smi here{promise}", fix), []
    try:
        driver = _ask_driver()
    except NoAnswer as error:
        return failed(
            str(error), "run nvidia-smi; reinstall or reload the driver until it lists the GPUs"
        ), []
    try:
        answer = _ask_torch()
    except NoAnswer as error:
        return failed(
            f"driver {driver.version}: {error}", f"install a torch that works with it: {_WHEELS}"
        ), []
    gpus = [
        _Gpu(gpu["name"], float(".".join(map(str, gpu["capability"]))), gpu["memory"])
        for gpu in answer["gpus"]
    ]
    wrong = _find_wrong_names(len(gpus))
    if wrong is not None:
        return wrong, []
    return _compare(driver, answer), gpus


def _named_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name.strip() for name in named if name.strip()]


def _find_wrong_names(seen: int) -> CheckFinding | None:
    """Return a failure if CUDA_VISIBLE_DEVICES contains names that CUDA ignores, else None.

    `seen` is the number of GPUs that torch found.
    """
    names = _named_gpus()
    if len(names) <= seen:
        return None
    variable = f"CUDA_VISIBLE_DEVICES={','.join(names)}"
    if seen and all(name.startswith(_MIG) for name in names):
        return failed(
            f"{variable} names {len(names)} MIG devices, and CUDA lets a process use one of them: "
            "ranks cannot train together on others",
            "name one MIG device, with cluster.nodes 1 and cluster.processes_per_node 1, or turn "
            "MIG off: nvidia-smi -mig 0",
        )
    try:
        listed = run_program(["nvidia-smi", "-L"], _ANSWER_SECONDS)
    except NoAnswer as error:
        listed = str(error)
    there = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listed)
    count = sum(not identity.startswith(_MIG) for identity in there)
    unknown = [name for name in names if not _is_known(name, count, there)]
    if not there or not unknown:
        return None
    return failed(
        f"{variable}: {unknown[0]} is none of this machine's {count} GPUs, and CUDA ignores it and "
        f"all names after it: {seen} of {len(names)} are left",
        f"name 0 to {count - 1}, or ids of nvidia-smi -L: {', '.join(there)}",
    )


def _is_known(name: str, count: int, identities: Sequence[str]) -> bool:
    if name.isdecimal():
        return int(name) < count
    return any(identity.startswith(name) for identity in identities)


def _compare_with_job(
    config: RunConfig, gang: HostGang, gpus: Sequence[_Gpu], finding: CheckFinding
) -> CheckFinding:
    """Return a failure if a GPU cannot train this job, otherwise `finding`.

    If the GPUs differ, a line that says so is added to `finding`. A script is not checked, because
    it chooses its own precision and memory.
    """
    if config.script is not None:
        return finding
    oldest = min(gpus, key=lambda gpu: gpu.capability)
    settled = settle_for_device(config, oldest.capability)
    if settled.fsdp.compute_dtype == "bfloat16" and oldest.capability < BFLOAT16_CAPABILITY:
        return failed(
            f"{oldest.name} has capability {oldest.capability}; bfloat16 needs "
            f"{BFLOAT16_CAPABILITY}",
            "set fsdp.param_dtype to auto or float16",
        )
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    needed = _sample_bytes(settled, gang)
    if needed > smallest.memory_bytes:
        return failed(
            f"{smallest.name} has {size_text(smallest.memory_bytes)} of memory; the model with one "
            f"sample needs {size_text(needed)} on each of {gang.ranks} ranks (estimated)",
            _fix_of_memory(settled, gang, smallest.memory_bytes),
        )
    mixture = describe_mixture([(gpu.name, gpu.capability) for gpu in gpus])
    if mixture:
        return passed(f"{finding.detail}\n{mixture}")
    return finding


def _sample_bytes(config: RunConfig, gang: HostGang) -> int:
    """Estimate the bytes of a rank's tensors with one sample per micro-batch.

    Return 0 for a user's own workload, which has to be measured first.
    """
    if config.user_code is not None:
        return 0
    return rank_bytes(
        config,
        causal_lm_shape(config.model),
        ranks=gang.ranks,
        samples=1,
        ranks_per_node=gang.processes_per_node,
    ).total


def _fix_of_memory(config: RunConfig, gang: HostGang, memory_bytes: int) -> str:
    for keys, smaller in _smaller_configurations(config, gang):
        needed = _sample_bytes(smaller, gang)
        if needed <= memory_bytes:
            return f"set {keys}, which needs {size_text(needed)}"
    return "GPUs with more memory, more ranks in parallel.mode fsdp2, or a smaller model"


def _smaller_configurations(config: RunConfig, gang: HostGang) -> Iterator[tuple[str, RunConfig]]:
    """Yield changes of the configuration that save memory, as (text, changed configuration).

    The change that slows training down least comes first.
    """
    if not config.fsdp.mixes_precision:
        yield (
            "fsdp.use_mixed_precision to auto",
            config.changed("fsdp", use_mixed_precision=True),
        )
    sharded = config
    keys = ""
    if config.parallel.mode == "ddp" and gang.ranks > 1:
        sharded = config.changed("parallel", mode="fsdp2")
        keys = "parallel.mode to fsdp2"
        yield keys, sharded
    if config.parallel.recompute != "full":
        keys = " and ".join(filter(None, (keys, "parallel.recompute to full")))
        yield keys, sharded.changed("parallel", recompute="full")


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
    # An older driver works with the libraries of NVIDIA's package cuda-compat
    is_old = oldest is not None and major < oldest
    said = answer["error"] or "torch sees none of the GPUs"
    if is_old and not answer["gpus"]:
        return failed(
            f"{here} for CUDA {cuda}, which needs driver {oldest} or newer: {major} < {oldest}; {said}",
            _fix_of(said, _OTHER_DRIVER),
        )
    if not answer["gpus"]:
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
                f"GPU {index}, {gpu['name']}, cannot add: {gpu['error']}",
                _OTHER_DRIVER if is_old else "run nvidia-smi -q",
            )
    return passed(f"{here} for CUDA {cuda}: an addition on each of {len(answer['gpus'])} GPUs")


def _fix_of(said: str, other: str = _HIDDEN_GPUS) -> str:
    """Return the fix for an error of torch; `other` for an unknown one."""
    for sign, fix in _FIXES:
        if sign in said:
            return fix
    return other


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

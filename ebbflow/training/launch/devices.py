"""Assignment of devices to ranks: one GPU to each rank, or the CPU to all ranks.

Each rank tells all other ranks which GPUs it sees, and all ranks compute the same assignment. They
identify a GPU by its UUID, not by its index, because an index has different meanings: two "nodes"
on one machine both see all GPUs from cuda:0 on, and each task of `srun --gpus-per-task=1` sees its
own GPU as cuda:0. This module does not import torch, since agents use it too.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from ebbflow.core.preflight import CheckFinding
from ebbflow.infra.checks.gpu import (
    describe_mixture,
    gpu_files,
    gpus_hidden,
    may_have_gpus,
    try_gpus,
)
from ebbflow.infra.checks.machine import describe_shared_memory_shortage
from ebbflow.training.errors import DeviceUnavailable

DeviceChoice = Literal["auto", "cpu", "cuda"]
_RANKS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class VisibleGpus:
    gpus: tuple[str, ...] = ()  # identities of the GPUs, in the order of torch's indices
    # Reason why CUDA does not work although this machine has GPUs or should have them; "" otherwise
    trouble: str = ""
    promised: int = 0  # GPUs per node that the chosen machines have; 0 if unknown
    # Name and compute capability of each GPU, such as ("NVIDIA A100-SXM4-80GB", 8.0)
    models: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> VisibleGpus:
        known = json.loads(text)
        models = tuple((str(name), float(capability)) for name, capability in known["models"])
        return cls(**known | {"gpus": tuple(known["gpus"]), "models": models})


@dataclass(frozen=True, kw_only=True)
class Assignment:
    # Torch's index of each rank's GPU in that rank; None: the CPU
    indices: tuple[int, ...] | None = None
    note: str = ""  # message for the user if GPUs remain unused or differ; "" otherwise
    # Lowest compute capability of the assigned GPUs; None: the CPU
    capability: float | None = None


class NodeGpuCheck:
    """Check of a node's GPUs.

    It runs in a thread and in child processes, since CUDA could block the agent.
    """

    def __init__(
        self,
        choice: DeviceChoice,
        *,
        promised: int,
        ranks: int,
        check: Callable[[int], tuple[CheckFinding, int]] = try_gpus,
    ) -> None:
        self._finding: CheckFinding | None = None
        self._ranks = ranks  # of this node
        self._thread = threading.Thread(
            target=self._run, args=(check, promised), name="gpu-check", daemon=True
        )
        if choice != "cpu" and may_have_gpus(
            promised=promised, wanted=choice == "cuda", by_tool=False
        ):
            self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def refusal(self) -> DeviceUnavailable | None:
        """Error if the check has shown that the GPUs do not work, so that no rank can start;
        otherwise None.
        """
        finding = self._finding
        if finding is None or finding.status != "failed":
            return None
        return DeviceUnavailable(
            f"{finding.detail}; fix: {finding.fix}, or set cluster.device to cpu"
        )

    def _run(self, check: Callable[[int], tuple[CheckFinding, int]], promised: int) -> None:
        try:
            self._finding, gpus = check(promised)
            shortage = describe_shared_memory_shortage(min(gpus, self._ranks))
            if shortage:
                print(shortage, flush=True)
        except Exception as error:  # each rank checks its GPU again
            print(
                f"the GPUs of this node could not be checked: {type(error).__name__}: {error}",
                flush=True,
            )


def detect_gpus(choice: DeviceChoice, *, promised: int = 0) -> VisibleGpus:
    if choice == "cpu":
        return VisibleGpus()
    import torch

    if torch.cuda.is_available():
        indices = range(torch.cuda.device_count())
        gpus = tuple(_identity(torch, index) for index in indices)
        models = tuple((torch.cuda.get_device_name(index), _capability(index)) for index in indices)
        return VisibleGpus(gpus=gpus, promised=promised, models=models)
    expected = promised > 0 or choice == "cuda" or (bool(gpu_files()) and not gpus_hidden())
    return VisibleGpus(trouble=_why_no_cuda(torch) if expected else "", promised=promised)


def assign_gpus(seen: Sequence[VisibleGpus], choice: DeviceChoice) -> Assignment:
    """Assign one GPU to each rank, or the CPU to all ranks, since all ranks must use the same kind
    of device.

    `seen` lists the GPUs that each rank sees. Each rank gets the first GPU in its list that no
    lower rank has.

    Raises:
        DeviceUnavailable: CUDA does not work on a machine with GPUs. Or there are fewer GPUs than
            ranks although the ranks need GPUs: `cluster.device` is cuda, or the chosen machines
            have GPUs.
    """
    if choice == "cpu":
        return Assignment()
    broken = [(rank, devices.trouble) for rank, devices in enumerate(seen) if devices.trouble]
    if broken:
        if len(broken) > 1:
            others = f" (and {len(broken) - 1} other ranks)"
        else:
            others = ""
        raise DeviceUnavailable(
            f"rank {broken[0][0]}{others} cannot use a GPU: {broken[0][1]}; "
            "fix: run nvidia-smi there, or set cluster.device to cpu"
        )
    taken: set[str] = set()
    indices: dict[int, int] = {}
    for rank, devices in enumerate(seen):
        free = [index for index, gpu in enumerate(devices.gpus) if gpu not in taken]
        if free:
            indices[rank] = free[0]
            taken.add(devices.gpus[free[0]])
    if len(indices) == len(seen):
        models = [devices.models[indices[rank]] for rank, devices in enumerate(seen)]
        return Assignment(
            indices=tuple(indices.values()),
            note=describe_mixture(models),
            capability=min(capability for _, capability in models),
        )
    wanted = choice == "cuda" or any(gpus.promised for gpus in seen)
    if not taken and not wanted:
        return Assignment()
    without = [rank for rank in range(len(seen)) if rank not in indices]
    named = ", ".join(map(str, without[:_RANKS_NAMED])) + (
        ", …" if len(without) > _RANKS_NAMED else ""
    )
    short = f"{len(seen)} ranks and {len(taken)} GPUs: no GPU is left for rank {named}"
    fewer = "set cluster.nodes and cluster.processes_per_node to one rank per GPU"
    if wanted:
        raise DeviceUnavailable(f"{short}; fix: {fewer}, or set cluster.device to cpu")
    return Assignment(note=f"{short}; all ranks train on the CPU; to train on the GPUs, {fewer}")


def _capability(index: int) -> float:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return major + minor / 10


def _identity(torch: object, index: int) -> str:
    """Return the identity of a GPU, which is the same in all processes and containers of a machine."""
    properties = torch.cuda.get_device_properties(index)  # type: ignore[attr-defined]
    uuid = getattr(properties, "uuid", None)
    names = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    if index < len(names):
        name = names[index]
    else:
        name = str(index)
    if uuid is not None:
        return str(uuid)
    return f"{socket.gethostname()}/{name}"


def _why_no_cuda(torch: object) -> str:
    if gpus_hidden():
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
    try:
        torch.cuda.init()  # type: ignore[attr-defined]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "torch.cuda.is_available() is False"

"""The device of each rank: which GPU of which machine, or the CPU for all ranks.

Ranks exchange the identities of the GPUs that they see, and each computes the same assignment. A GPU's identity is its
UUID, so two local "nodes" on one machine do not both take cuda:0, and neither do tasks that see one GPU each as index 0
(`srun --gpus-per-task=1`). Importing this module imports no torch: agents use `NodeGpuCheck`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from ebbflow.infra.checks.gpu import gpu_files, gpus_hidden, may_have_gpus, try_gpus
from ebbflow.infra.preflight import CheckFinding
from ebbflow.training.errors import DeviceUnavailable

DeviceChoice = Literal["auto", "cpu", "cuda"]
_RANKS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class VisibleGpus:
    """The GPUs that one rank sees.

    gpus: identities in the order of torch's indices. trouble: the reason why CUDA does not work although this machine
    has GPUs, or should have; "" where it works, or where there is no GPU. promised: GPUs of each node by its placement.
    """

    gpus: tuple[str, ...] = ()
    trouble: str = ""
    promised: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> VisibleGpus:
        known = json.loads(text)
        return cls(gpus=tuple(known["gpus"]), trouble=known["trouble"], promised=known["promised"])


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """indices: of each rank's GPU as torch numbers it in that rank; None: all ranks train on the CPU.

    note: one line for the user where GPUs are left unused; else "".
    """

    indices: tuple[int, ...] | None = None
    note: str = ""


def detect_gpus(choice: DeviceChoice, *, promised: int = 0) -> VisibleGpus:
    """Look at this rank's GPUs through torch. promised: see `VisibleGpus`."""
    if choice == "cpu":
        return VisibleGpus()
    import torch

    if torch.cuda.is_available():
        gpus = tuple(_identity(torch, index) for index in range(torch.cuda.device_count()))
        return VisibleGpus(gpus=gpus, promised=promised)
    expected = promised > 0 or choice == "cuda" or (bool(gpu_files()) and not gpus_hidden())
    return VisibleGpus(trouble=_why_no_cuda(torch) if expected else "", promised=promised)


def assign_gpus(seen: Sequence[VisibleGpus], choice: DeviceChoice) -> Assignment:
    """One GPU for each rank, or the CPU for all of them: the collectives of a gang take one kind of device.

    seen: of all ranks, in their order. Each rank takes the first GPU that it sees and that no rank before it has taken.

    Raises:
        DeviceUnavailable: CUDA does not work on a machine with GPUs, or there are fewer GPUs than ranks and
            `cluster.device` is cuda or the nodes were paid for by their GPUs.
    """
    if choice == "cpu":
        return Assignment()
    broken = [(rank, one.trouble) for rank, one in enumerate(seen) if one.trouble]
    if broken:
        others = f" (and {len(broken) - 1} other ranks)" if len(broken) > 1 else ""
        raise DeviceUnavailable(
            f"rank {broken[0][0]}{others} cannot use a GPU: {broken[0][1]}; "
            "fix: run nvidia-smi there, or set cluster.device to cpu"
        )
    taken: set[str] = set()
    indices: list[int | None] = []
    for one in seen:
        index = next((index for index, gpu in enumerate(one.gpus) if gpu not in taken), None)
        indices.append(index)
        if index is not None:
            taken.add(one.gpus[index])
    found = tuple(index for index in indices if index is not None)
    if len(found) == len(seen):
        return Assignment(indices=found)
    wanted = choice == "cuda" or any(one.promised for one in seen)
    if not taken and not wanted:
        return Assignment()
    without = [rank for rank, index in enumerate(indices) if index is None]
    named = ", ".join(map(str, without[:_RANKS_NAMED])) + (", …" if len(without) > _RANKS_NAMED else "")
    short = f"{len(seen)} ranks and {len(taken)} GPUs: no GPU is left for rank {named}"
    fewer = "set cluster.nodes and cluster.processes_per_node to one rank per GPU"
    if wanted:
        raise DeviceUnavailable(f"{short}; fix: {fewer}, or set cluster.device to cpu")
    return Assignment(note=f"{short}; all ranks train on the CPU; to train on the GPUs, {fewer}")


class NodeGpuCheck:
    """The check of a node's GPUs, made in its agent: in a thread, whose children import torch and ask the driver.

    promised: GPUs of this node by its placement; 0: the placement names none.
    """

    def __init__(
        self,
        choice: DeviceChoice,
        *,
        promised: int,
        check: Callable[[int], tuple[CheckFinding, int]] = try_gpus,
    ) -> None:
        self._finding: CheckFinding | None = None
        self._thread: threading.Thread | None = None
        if choice != "cpu" and may_have_gpus(promised=promised, wanted=choice == "cuda", by_tool=False):
            self._thread = threading.Thread(target=self._run, args=(check, promised), name="gpu-check", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def refusal(self) -> DeviceUnavailable | None:
        """The reason why no rank may start on this node. None where the GPUs work, or where there are none."""
        finding = self._finding
        if finding is None or finding.status != "failed":
            return None
        return DeviceUnavailable(f"{finding.detail}; fix: {finding.fix}, or set cluster.device to cpu")

    def _run(self, check: Callable[[int], tuple[CheckFinding, int]], promised: int) -> None:
        try:
            self._finding, _ = check(promised)
        except Exception as error:  # the ranks look for themselves
            print(f"the GPUs of this node could not be checked: {type(error).__name__}: {error}", flush=True)


def _identity(torch: object, index: int) -> str:
    """A name of one GPU that is the same in every process of every container on its machine."""
    properties = torch.cuda.get_device_properties(index)  # type: ignore[attr-defined]
    uuid = getattr(properties, "uuid", None)
    return str(uuid) if uuid is not None else f"{socket.gethostname()}/{_visible_name(index)}"


def _visible_name(index: int) -> str:
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


def _why_no_cuda(torch: object) -> str:
    """torch's own words. Its CPU build raises AssertionError, a driver that does not work RuntimeError."""
    if gpus_hidden():
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
    try:
        torch.cuda.init()  # type: ignore[attr-defined]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "torch.cuda.is_available() is False"

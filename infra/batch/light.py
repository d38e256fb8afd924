"""Which queue the steps around training go to where none is named: they need one processor and no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from infra.batch.machines import BATCHS_CHOICE, accelerated, arm
from infra.batch.queues import QueueState

# Of a step without @resources Metaflow asks for 4,096 MiB, which the system leaves of no machine with 4 GiB.
_LEAST_GIB = 5.0
_GIB_PER_VCPU = {"c": 2.0, "r": 8.0, "x": 16.0, "z": 8.0}  # others: 4
_VCPUS = {"nano": 0.5, "micro": 0.5, "small": 0.5, "medium": 1.0, "large": 2.0, "xlarge": 4.0}
_ANY_SIZE_VCPUS = 2.0  # of a family, or of Batch's own choice: it takes a size that fits
_METAL_VCPUS = 96.0
_CPU, _FARGATE, _UNKNOWN, _GPU, _UNFIT = range(5)


def lightest_queue(queues: Mapping[str, QueueState]) -> tuple[str, str] | None:
    """(name, why) of the on-demand queue whose smallest machine that will do is the smallest, one without GPUs before
    any with them, and Fargate, which needs one more role, in between; None where no queue takes jobs on demand. What
    the machines are goes by their types' names.
    """
    able = [(name, queue) for name, queue in queues.items() if queue.usable and queue.market == "on_demand"]
    if not able:
        return None
    name, queue = min(able, key=lambda one: _rank_of(one[1]))  # the first of equals
    kind, _ = _rank_of(queue)
    types = ", ".join(queue.instance_types) or "machines that nobody named"
    fix = "fix: name a queue of small machines in batch.light_queue"
    why = {
        _CPU: f"the smallest of {len(able)} on demand ({types})"
        if len(able) > 1
        else f"the only one on demand ({types})",
        _FARGATE: "of Fargate, which has no GPUs; Metaflow runs none there without METAFLOW_ECS_FARGATE_EXECUTION_ROLE",
        _UNKNOWN: f"of {types}, which may have GPUs; {fix}",
        _GPU: f"whose machines all have GPUs or other accelerators, paid for and not used ({types}); {fix}",
        _UNFIT: f"whose machines may have less than {_LEAST_GIB:g} GiB, or run no image for x86-64 ({types}); {fix}",
    }
    return name, why[kind]


def has_gpus_only(queue: QueueState) -> bool:
    """Whether all of its machines that hold a step have GPUs or other accelerators, as far as their types are told."""
    return bool(queue.instance_types) and _rank(queue.instance_types)[0] == _GPU


def _rank_of(queue: QueueState) -> tuple[int, float]:
    return (_FARGATE, 0.0) if queue.fargate else _rank(queue.instance_types)


def _rank(types: Iterable[str]) -> tuple[int, float]:
    """(kind, processors) of the smallest machine among the types that will do."""
    fit = [one for one in types if _gib(one) >= _LEAST_GIB and not arm(one)]
    found = [(_GPU if accelerated(one) else _CPU, _vcpus(one)) for one in fit]
    return min(found) if found else ((_UNFIT, 0.0) if list(types) else (_UNKNOWN, 0.0))


def _vcpus(listed: str) -> float:
    if listed in BATCHS_CHOICE:
        return _ANY_SIZE_VCPUS
    size = listed.partition(".")[2].rstrip("*")
    if not size:
        return _ANY_SIZE_VCPUS
    if size.startswith("metal"):
        return _METAL_VCPUS
    times = re.fullmatch(r"([0-9]+)xlarge", size)
    return 4.0 * int(times[1]) if times else _VCPUS.get(size, _ANY_SIZE_VCPUS)


def _gib(listed: str) -> float:
    if listed in BATCHS_CHOICE or "." not in listed.rstrip("."):
        return _LEAST_GIB
    return _vcpus(listed) * _GIB_PER_VCPU.get(listed[0], 4.0)

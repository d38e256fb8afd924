"""The queues that a configuration declares, held against what Batch says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infra.batch.machines import BATCHS_CHOICE, accelerated
from infra.batch.queues import QueueState, describe_queues
from infra.config.batch import BatchConfig, QueueConfig
from infra.config.schema import RunConfig
from infra.store.aws import aws_settings


def declared_queues(batch: BatchConfig) -> dict[str, QueueState]:
    """As the configuration has them, all taken to be usable: for when Batch does not answer."""
    return {
        queue.name: QueueState(
            name=queue.name,
            arn="",
            market=queue.market,
            instance_types=tuple(queue.instance_types),
            multi_node=queue.multi_node,
            usable=True,
            problem="",
        )
        for queue in batch.queues
    }


def training_queues(batch: BatchConfig, client: Any, *, deadline_seconds: float = 20.0) -> dict[str, QueueState]:
    """Where training may go, by the name in the configuration; with none declared, all EC2 queues of the region.

    A declaration can only narrow what Batch says: its instance types, and multi_node where that is not wanted. One that
    contradicts Batch makes the queue unusable, with the reason in `problem`. Raises CloudError.
    """
    if not batch.queues:
        found = describe_queues(None, client, deadline_seconds=deadline_seconds)
        return {name: state for name, state in found.items() if not state.fargate}  # Fargate has no GPUs
    found = describe_queues([queue.name for queue in batch.queues], client, deadline_seconds=deadline_seconds)
    return {queue.name: _narrowed(found[queue.name], queue) for queue in batch.queues}


def in_queues_region(config: RunConfig, *, told: bool = True) -> RunConfig:
    """The configuration with the region of the queues as the only one that is priced: a job runs nowhere else.

    told: False takes the default region where nobody has told another, as a client does; True leaves the configuration
    as it is then, since a container need not know. Raises StoreError for an unreadable profile.
    """
    region = config.batch.region
    if region is None:
        settings = aws_settings()
        if told and not settings.region_told:
            return config
        region = settings.region
    cost = config.cost.model_copy(update={"regions": [region]})
    return config.model_copy(update={"cost": cost, "batch": config.batch.model_copy(update={"region": region})})


def contradiction(state: QueueState, declared: QueueConfig) -> str:
    """What the configuration says of a queue and Batch does not, with the fix; "" when they agree."""
    if state.market is not None and state.market != declared.market:
        kinds = ", ".join(dict.fromkeys(one.kind for one in state.compute_environments))
        said = f"queue {state.name} is declared {declared.market}, and its compute environments are {kinds}"
        return f"{said}; fix: set its market to {state.market} in batch.queues"
    if declared.multi_node and not state.multi_node:
        said = (
            f"queue {state.name} is declared multi_node, and Batch runs several nodes in managed EC2 environments only"
        )
        return f"{said}; fix: set its multi_node to false in batch.queues"
    if declared.instance_types and state.instance_types:
        lost = [kind for kind in declared.instance_types if not _offered(kind, state.instance_types)]
        if lost:
            said = (
                f"queue {state.name} is declared to have {', '.join(lost)}, and has {', '.join(state.instance_types)}"
            )
            return f"{said}; fix: correct its instance_types in batch.queues"
    return ""


def _narrowed(state: QueueState, declared: QueueConfig) -> QueueState:
    problem = state.problem or contradiction(state, declared)
    return replace(
        state,
        instance_types=_common(declared.instance_types, state.instance_types),
        multi_node=state.multi_node and declared.multi_node,
        usable=not problem,
        problem=problem,
    )


def _common(declared: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    """What both mean: of a family that is declared only the types that there are, where Batch was given types."""
    if not declared or not offered:
        return tuple(declared or offered)
    narrow = [kind for kind in declared if kind in offered or not _lists_types_of(offered, kind)]
    listed = [one for one in offered if any(_lists_types_of([one], kind) for kind in declared)]
    return tuple(dict.fromkeys([*narrow, *listed])) or tuple(declared)


def _lists_types_of(offered: Sequence[str], kind: str) -> bool:
    """Whether Batch was given narrower words than the declared ones: g5.xlarge, and g5 is declared."""
    whole = kind.rstrip(".")
    return any(one != whole and one.startswith(whole if "." in whole else f"{whole}.") for one in offered)


def _offered(kind: str, offered: Sequence[str]) -> bool:
    """Whether a type or family is among those of a compute environment, as wide or as narrow as it names them."""
    family, _, size = kind.rstrip(".").partition(".")
    for one in offered:
        other, _, its_size = one.partition(".")
        if one in BATCHS_CHOICE and not accelerated(kind):
            return True  # Batch's own choice changes with time and region, and has never had GPUs
        if family == other and (not size or not its_size or its_size.startswith(size)):
            return True
    return False

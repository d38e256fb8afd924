"""A submitted job: definition and overrides made one for each node, and what AWS would refuse at
once.
"""

from __future__ import annotations

from typing import Any

from tests.support.batch.account import Account
from tests.support.batch.faults import Refused
from tests.support.batch.jobs import Job
from tests.support.batch.settings import QueueSettings

_SHORTEST_ATTEMPT_SECONDS = 60


def new_job(account: Account, asked: dict[str, Any], *, created_at: int) -> Job:
    """Raises Refused for what SubmitJob refuses."""
    queue = account.queue(asked["jobQueue"])
    if queue is None:
        raise Refused("ClientException", f"JobQueue {asked['jobQueue']} not found.")
    if queue.state != "ENABLED":
        raise Refused(
            "ClientException", f"Job Queue {queue.name} is in DISABLED state, it cannot accept jobs"
        )
    definition = account.definition(asked["jobDefinition"])
    if definition is None or definition["status"] != "ACTIVE":
        raise Refused(
            "ClientException", f"JobDefinition {asked['jobDefinition']} is not found or not ACTIVE"
        )
    multi_node = definition["type"] == "multinode"
    if multi_node:
        _check_multi_node(queue)
    if multi_node:
        properties = _nodes(definition, asked)
    else:
        properties = [_container(definition, asked)]
    for container in properties:
        _check_resources(container)
    return Job(
        request=asked,
        queue=queue.name,
        queue_arn=account.arn("job-queue", queue.name),
        definition=definition,
        properties=properties,
        created_at=created_at,
        multi_node=multi_node,
        timeout_seconds=_timeout(definition, asked),
    )


def _check_multi_node(queue: QueueSettings) -> None:
    """The documentation forbids it; with which words AWS refuses is not known."""
    if queue.is_spot:
        raise Refused(
            "ClientException",
            "Multi-node parallel jobs aren't supported on compute environments that use Spot "
            f"Instances ({queue.name})",
        )
    if queue.market.startswith("fargate"):
        raise Refused(
            "ClientException",
            f"Multi-node parallel jobs aren't supported on Fargate ({queue.name})",
        )


def _container(definition: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    if "nodeOverrides" in asked:
        raise Refused("ClientException", "nodeOverrides are for multi-node parallel jobs")
    return _overridden(definition["containerProperties"], asked.get("containerOverrides", {}))


def _nodes(definition: dict[str, Any], asked: dict[str, Any]) -> list[dict[str, Any]]:
    if "containerOverrides" in asked:
        raise Refused(
            "ClientException", "Container overrides should not be set for multi-node parallel jobs"
        )
    properties = definition["nodeProperties"]
    overrides = asked.get("nodeOverrides", {})
    count = overrides.get("numNodes", properties["numNodes"])
    if properties["mainNode"] != 0:
        raise Refused("ClientException", "this local Batch has its main node at 0")
    nodes: list[dict[str, Any] | None] = [None] * count
    for node_range in properties["nodeRangeProperties"]:
        for index in _range(node_range["targetNodes"], count):
            nodes[index] = node_range["container"]
    if missing := [index for index, node in enumerate(nodes) if node is None]:
        raise Refused("ClientException", f"nodeRangeProperties leave out nodes {missing}")
    made = [dict(node or {}) for node in nodes]
    for node_range in overrides.get("nodePropertyOverrides", []):
        for index in _range(node_range["targetNodes"], count):
            made[index] = _overridden(made[index], node_range.get("containerOverrides", {}))
    return made


def _range(text: str, count: int) -> range:
    first, _, last = text.partition(":")
    found = range(int(first or 0), int(last) + 1 if last else count)
    if not found or found.stop > count:
        raise Refused("ClientException", f"targetNodes {text} is no range of {count} nodes")
    return found


def _overridden(properties: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """What is named on both sides (a variable, a resource) is the override's."""
    made = {**properties, **{name: overrides[name] for name in ("command",) if name in overrides}}
    for name, key in (("environment", "name"), ("resourceRequirements", "type")):
        both = {
            entry[key]: entry for entry in [*properties.get(name, []), *overrides.get(name, [])]
        }
        made[name] = list(both.values())
    return made


def _check_resources(properties: dict[str, Any]) -> None:
    asked = {
        requirement["type"]: requirement["value"]
        for requirement in properties["resourceRequirements"]
    }
    for kind in ("VCPU", "MEMORY"):
        if kind not in asked:
            raise Refused("ClientException", f"resourceRequirements must have {kind}")
    for kind, value in asked.items():
        try:
            good = float(value) > 0 and (kind == "VCPU" or float(value).is_integer())
        except ValueError:
            good = False
        if not good:
            raise Refused("ClientException", f"resourceRequirements: {kind} {value!r} is not valid")


def _timeout(definition: dict[str, Any], asked: dict[str, Any]) -> float | None:
    seconds = {**definition.get("timeout", {}), **asked.get("timeout", {})}.get(
        "attemptDurationSeconds"
    )
    if seconds is not None and seconds < _SHORTEST_ATTEMPT_SECONDS:
        raise Refused("ClientException", "attemptDurationSeconds must be at least 60")
    return seconds

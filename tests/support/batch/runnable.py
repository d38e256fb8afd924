"""Why a job does not start, in the words of AWS ("Jobs stuck in a RUNNABLE status")."""

from __future__ import annotations

import re
from functools import cache

from ebbflow.cost.catalogue import Catalogue, load_catalogue
from tests.support.batch.jobs import Job, Node
from tests.support.batch.settings import QueueSettings

_NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
_TOO_LARGE = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
_TOO_MANY_VCPUS = "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE"


def placed_on(
    job: Job, queue: QueueSettings, free: float, *, used_vcpus: float = 0.0
) -> tuple[str | None, str | None]:
    """The type of instance that each node gets, or None and why it waits. free: instances.

    used_vcpus: of the instances that run. AWS may exceed maxvCpus by one instance, depending on the
    strategy; here it is never exceeded. A job that only waits for others to end waits without a
    reason.
    """
    if queue.environment_state != "ENABLED" or queue.environment_status != "VALID":
        return None, None  # AWS says nothing of it in the job
    fitting = []
    for kind in queue.instance_types:
        if all(_fits(node, kind) for node in job.nodes):
            fitting.append(kind)
    if not fitting:
        return None, (
            f"{_TOO_LARGE} - The job resource requirement (vCPU/memory/GPU) is higher than that "
            "can be met by the CE(s) attached to the job queue."
        )
    needed = {}
    for kind in fitting:
        needed[kind] = sum(vcpus(node, kind) for node in job.nodes)
    bearable = [kind for kind in fitting if needed[kind] <= queue.max_vcpus]
    if not bearable:
        return None, (
            f"{_TOO_MANY_VCPUS} - CE(s) associated with the job queue cannot meet the CPU "
            "requirement of the job."
        )
    fitting = [kind for kind in bearable if used_vcpus + needed[kind] <= queue.max_vcpus]
    if not fitting:
        return None, None
    if len(job.nodes) > free:
        return (
            None,
            f"{_NO_CAPACITY} - Service cannot fulfill the capacity requested for instance type "
            f"{fitting[0]}",
        )
    return fitting[0], None


def vcpus(node: Node, instance_type: str) -> float:
    """Of the instance; of a type that the catalogue does not know, what the node asks for."""
    try:
        return _catalogue()[instance_type].vcpu
    except LookupError:
        return _asked(node)["VCPU"]


def time_limit(job: Job, queue: QueueSettings, waited_seconds: float) -> str:
    """What jobStateTimeLimitActions end this job with now, or ""."""
    for action in queue.time_limit_actions:
        reason = action["reason"]
        if (job.status_reason or "").startswith(reason) and waited_seconds >= action[
            "maxTimeSeconds"
        ]:
            return f"Canceled by JobStateTimeLimit action due to reason: {reason}"
    return ""


def pull_problem(node: Node, missing_images: list[str]) -> str:
    """Why the node's image cannot be pulled, or ""."""
    image = node.properties.get("image", "")
    if not any(re.search(pattern, image) for pattern in missing_images):
        return ""
    return (
        f"CannotPullContainerError: Error response from daemon: pull access denied for {image}, "
        "repository does not exist or may require 'docker login'"
    )


def _asked(node: Node) -> dict[str, float]:
    return {
        requirement["type"]: float(requirement["value"])
        for requirement in node.properties["resourceRequirements"]
    }


def _fits(node: Node, instance_type: str) -> bool:
    """A type that the catalogue does not know (a family, a CPU type) takes anything."""
    try:
        kind = _catalogue()[instance_type]
    except LookupError:
        return True
    asked = _asked(node)
    return (
        asked["VCPU"] <= kind.vcpu
        and asked["MEMORY"] <= kind.ram_gib * 1024
        and asked.get("GPU", 0) <= kind.gpu_count
    )


@cache
def _catalogue() -> Catalogue:
    return load_catalogue()

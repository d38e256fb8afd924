"""Why a job does not start, in the words of AWS ("Jobs stuck in a RUNNABLE status")."""

from __future__ import annotations

import re
from functools import cache

from cost.catalogue import Catalogue, load_catalogue
from tests.support.batch.jobs import Job, Node
from tests.support.batch.settings import QueueSettings

_NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
_TOO_LARGE = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"


def placed_on(job: Job, queue: QueueSettings, free: float) -> tuple[str | None, str | None]:
    """The type of instance that each node gets, or None and why it waits. free: instances."""
    if queue.environment_state != "ENABLED" or queue.environment_status != "VALID":
        return None, None  # AWS says nothing of it in the job
    fitting = [kind for kind in queue.instance_types if all(_fits(node, kind) for node in job.nodes)]
    if not fitting:
        return None, (
            f"{_TOO_LARGE} - The job resource requirement (vCPU/memory/GPU) is higher than that can be met by the "
            "CE(s) attached to the job queue."
        )
    if len(job.nodes) > free:
        return None, f"{_NO_CAPACITY} - Service cannot fulfill the capacity requested for instance type {fitting[0]}"
    return fitting[0], None


def _fits(node: Node, instance_type: str) -> bool:
    """A type that the catalogue does not know (a family, a CPU type) takes anything."""
    try:
        kind = _catalogue()[instance_type]
    except LookupError:
        return True
    asked = {each["type"]: float(each["value"]) for each in node.properties["resourceRequirements"]}
    return (
        asked["VCPU"] <= kind.vcpu
        and asked["MEMORY"] <= kind.ram_gib * 1024
        and asked.get("GPU", 0) <= kind.gpu_count
    )  # fmt: skip


@cache
def _catalogue() -> Catalogue:
    return load_catalogue()


def time_limit(job: Job, queue: QueueSettings, waited_seconds: float) -> str:
    """What jobStateTimeLimitActions end this job with now, or ""."""
    for action in queue.time_limit_actions:
        reason = action["reason"]
        if (job.status_reason or "").startswith(reason) and waited_seconds >= action["maxTimeSeconds"]:
            return f"Canceled by JobStateTimeLimit action due to reason: {reason}"
    return ""


def pull_problem(node: Node, missing_images: list[str]) -> str:
    """Why the node's image cannot be pulled, or ""."""
    image = node.properties.get("image", "")
    if not any(re.search(pattern, image) for pattern in missing_images):
        return ""
    return (
        f"CannotPullContainerError: Error response from daemon: pull access denied for {image}, repository does not "
        "exist or may require 'docker login'"
    )

"""Queues, compute environments and job definitions: what the Describe calls tell, and what a submit
is held against.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from tests.support.batch.faults import Refused
from tests.support.batch.settings import QueueSettings, Settings

ACCOUNT = "000000000000"


class Account:
    """Lookups by name or ARN. Job definitions have revisions, as on AWS."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.definitions: dict[str, dict[str, Any]] = {}

    def arn(self, kind: str, name: str) -> str:
        return f"arn:aws:batch:{self.settings.region}:{ACCOUNT}:{kind}/{name}"

    def queue(self, name: str) -> QueueSettings | None:
        return self.settings.queues.get(name.rpartition("/")[2])

    def describe_queues(self, asked: dict[str, Any]) -> dict[str, Any]:
        names = asked.get("jobQueues")
        if not names:
            queues = list(self.settings.queues.values())
        else:
            queues = [self.queue(name) for name in names]
        return {"jobQueues": [self._queue(queue) for queue in queues if queue is not None]}

    def _queue(self, queue: QueueSettings) -> dict[str, Any]:
        order = [
            {"order": 1, "computeEnvironment": self.arn("compute-environment", queue.environment)}
        ]
        return {
            "jobQueueName": queue.name,
            "jobQueueArn": self.arn("job-queue", queue.name),
            "state": queue.state,
            "status": "VALID",
            "statusReason": "JobQueue Healthy",
            "priority": 1,
            "computeEnvironmentOrder": order,
            "serviceEnvironmentOrder": [],
            "jobQueueType": "ECS",
            "tags": {},
            "jobStateTimeLimitActions": queue.time_limit_actions,
        }

    def update_queue(self, asked: dict[str, Any]) -> dict[str, Any]:
        queue = self.queue(asked["jobQueue"])
        if queue is None:
            raise Refused("ClientException", f"{asked['jobQueue']} does not exist")
        queue.state = asked.get("state", queue.state)
        queue.time_limit_actions = asked.get("jobStateTimeLimitActions", queue.time_limit_actions)
        return {"jobQueueName": queue.name, "jobQueueArn": self.arn("job-queue", queue.name)}

    def describe_environments(self, asked: dict[str, Any]) -> dict[str, Any]:
        names = {name.rpartition("/")[2] for name in asked.get("computeEnvironments", [])}
        queues = [
            queue
            for queue in self.settings.queues.values()
            if not names or queue.environment in names
        ]
        return {"computeEnvironments": [self._environment(queue) for queue in queues]}

    def _environment(self, queue: QueueSettings) -> dict[str, Any]:
        resources: dict[str, Any] = {
            "type": queue.environment_type,
            "maxvCpus": queue.max_vcpus,
            "subnets": [f"subnet-{queue.zone}"],
            "securityGroupIds": ["sg-0"],
        }
        if not queue.market.startswith("fargate"):
            resources |= {
                "minvCpus": 0,
                "desiredvCpus": 0,
                "instanceTypes": queue.instance_types,
                "instanceRole": f"arn:aws:iam::{ACCOUNT}:instance-profile/ecsInstanceRole",
                "allocationStrategy": "SPOT_PRICE_CAPACITY_OPTIMIZED"
                if queue.is_spot
                else "BEST_FIT_PROGRESSIVE",
            }
        return {
            "computeEnvironmentName": queue.environment,
            "computeEnvironmentArn": self.arn("compute-environment", queue.environment),
            "type": "MANAGED",
            "state": queue.environment_state,
            "status": queue.environment_status,
            "statusReason": "ComputeEnvironment Healthy"
            if queue.environment_status == "VALID"
            else "CLIENT_ERROR",
            "computeResources": resources,
            "serviceRole": f"arn:aws:iam::{ACCOUNT}:role/batch",
            "containerOrchestrationType": "ECS",
            "tags": {},
        }

    def register(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["jobDefinitionName"]
        revision = 1 + sum(
            definition["jobDefinitionName"] == name for definition in self.definitions.values()
        )
        arn = self.arn("job-definition", f"{name}:{revision}")
        self.definitions[arn] = {
            **asked,
            "jobDefinitionArn": arn,
            "revision": revision,
            "status": "ACTIVE",
        }
        return {"jobDefinitionName": name, "jobDefinitionArn": arn, "revision": revision}

    def describe_definitions(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = list(self.definitions.values())
        if name := asked.get("jobDefinitionName"):
            found = [definition for definition in found if definition["jobDefinitionName"] == name]
        if names := asked.get("jobDefinitions"):
            known = [self.definition(name) for name in names]
            found = [definition for definition in known if definition is not None]
        if status := asked.get("status"):
            found = [definition for definition in found if definition["status"] == status]
        return {"jobDefinitions": found[::-1]}

    def deregister(self, asked: dict[str, Any]) -> dict[str, Any]:
        definition = self.definition(asked["jobDefinition"])
        if definition is None:
            raise Refused(
                "ClientException", f"Job definition {asked['jobDefinition']} does not exist"
            )
        definition["status"] = "INACTIVE"
        return {}

    def definition(self, named: str) -> dict[str, Any] | None:
        """By ARN, by name:revision, or by name: then the newest."""
        named = named.rpartition("/")[2]
        if ":" in named:
            pattern = named
        else:
            pattern = f"{named}:*"
        found = [
            registered
            for arn, registered in self.definitions.items()
            if fnmatch.fnmatchcase(arn.rpartition("/")[2], pattern)
        ]
        return max(found, key=lambda item: item["revision"], default=None)

"""The operations: each takes what was asked, checked against botocore's model, and gives what is
answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.batch.account import Account
from tests.support.batch.faults import Conduct, Refused
from tests.support.batch.jobs import Job
from tests.support.batch.scheduler import Scheduler
from tests.support.batch.settings import Settings
from tests.support.batch.submit import new_job

_MOST_DESCRIBED = 100


class Api:
    """One account in one region."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.account = Account(settings)
        self.conduct = Conduct(settings.rules)
        self.scheduler = Scheduler(settings, folder, self.now_ms)
        self.operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "SubmitJob": self._submit,
            "DescribeJobs": self._describe_jobs,
            "ListJobs": self._list_jobs,
            "TerminateJob": self._terminate,
            "CancelJob": self._cancel,
            "DescribeJobQueues": self.account.describe_queues,
            "UpdateJobQueue": self.account.update_queue,
            "DescribeComputeEnvironments": self.account.describe_environments,
            "RegisterJobDefinition": self.account.register,
            "DescribeJobDefinitions": self.account.describe_definitions,
            "DeregisterJobDefinition": self.account.deregister,
        }

    def now_ms(self) -> int:
        """By the account's clock."""
        return round(1000 * (time.time() + self.settings.clock_ahead_seconds))

    def answer(self, operation: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Raises Refused."""
        with self.scheduler.lock:
            return self.operations[operation](asked)

    def job(self, named: str) -> Job:
        """By id or by name, the newest of that name. Raises Refused."""
        found = [
            job for job in self.scheduler.jobs.values() if named in (job.id, job.request["jobName"])
        ]
        if not found:
            raise Refused("ClientException", f"Job {named} does not exist")
        return found[-1]

    def _submit(self, asked: dict[str, Any]) -> dict[str, Any]:
        job = new_job(self.account, asked, created_at=self.now_ms())
        self.scheduler.jobs[job.id] = job
        return {"jobArn": job.detail()["jobArn"], "jobName": asked["jobName"], "jobId": job.id}

    def _describe_jobs(self, asked: dict[str, Any]) -> dict[str, Any]:
        if len(asked["jobs"]) > _MOST_DESCRIBED:
            raise Refused("ClientException", f"jobs: at most {_MOST_DESCRIBED}")
        details = [self._detail(named) for named in asked["jobs"]]
        return {"jobs": [detail for detail in details if detail is not None]}

    def _detail(self, named: str) -> dict[str, Any] | None:
        """None for a job that is not known: it is left out of the answer."""
        id_, _, node = named.rpartition("/")[2].partition("#")
        job = self.scheduler.jobs.get(id_)
        if job is None or (node and int(node) >= len(job.nodes)):
            return None
        return job.detail(int(node) if node else None)

    def _list_jobs(self, asked: dict[str, Any]) -> dict[str, Any]:
        if parent := asked.get("multiNodeJobId"):
            job = self.job(parent)
            if job.multi_node:
                found = [job.summary(node.index) for node in job.nodes]
            else:
                found = []
        elif "jobQueue" in asked:
            queue = self.account.queue(asked["jobQueue"])
            if queue is None:
                raise Refused("ClientException", f"Job Queue {asked['jobQueue']} does not exist")
            found = [
                job.summary() for job in self.scheduler.jobs.values() if job.queue == queue.name
            ]
        else:
            raise Refused(
                "ClientException", "One of jobQueue, arrayJobId, multiNodeJobId must be specified"
            )
        by_name = [
            condition["values"]
            for condition in asked.get("filters", [])
            if condition["name"] == "JOB_NAME"
        ]
        names = []
        for values in by_name:
            for value in values:
                names.append(value.lower())
        if names:  # any status, and * at the end stands for anything
            return {
                "jobSummaryList": [
                    found_job for found_job in found if _named(found_job["jobName"], names)
                ]
            }
        status = asked.get("jobStatus", "RUNNING")
        return {
            "jobSummaryList": [found_job for found_job in found if found_job["status"] == status]
        }

    def _terminate(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.scheduler.stop(self.job(asked["jobId"]), asked["reason"])
        return {}

    def _cancel(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Succeeds also where nothing is cancelled, because the job is further on."""
        self.scheduler.cancel(self.job(asked["jobId"]), asked["reason"])
        return {}


def _named(name: str, patterns: list[str]) -> bool:
    name = name.lower()
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )

"""What moves jobs on: capacity, starting containers, their ends, reclaims and limits.

One thread, all 50 ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.batch import environment, retries, runnable
from tests.support.batch.instances import Container, Instance
from tests.support.batch.jobs import Job, Node
from tests.support.batch.settings import QueueSettings, Settings

_ROUND_SECONDS = 0.05
_TIMED_OUT = "Job attempt duration exceeded timeout"


class Scheduler:
    """jobs: in the order of their submission; `lock` guards them and all that they hold.

    Containers are started by the one thread, with whose end they end.
    """

    def __init__(self, settings: Settings, folder: Path, now_ms: Callable[[], int]) -> None:
        self.jobs: dict[str, Job] = {}
        self.lock = threading.RLock()
        self.traces_began = time.monotonic()
        self._settings = settings
        self._folder = folder
        self._now_ms = now_ms
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(30)

    def reclaim(self, job: Job, node: int, *, notice: bool) -> None:
        """Take a node's instance away, after the notice time where there is a notice."""
        instance = job.nodes[node].instance
        if instance is not None:
            if notice:
                seconds = self._settings.notice_seconds / self._settings.time_scale
            else:
                seconds = 0.0
            instance.reclaim(seconds, notice=notice)

    def cancel(self, job: Job, reason: str) -> None:
        """CancelJob: what has not reached STARTING is over; anything else is left as it is."""
        if job.waits and job.stop_reason is None:
            job.cancelled = True
            job.stop_reason = reason
            self._end_job(job, "FAILED", reason)

    def stop(self, job: Job, reason: str) -> None:
        """TerminateJob: what runs is asked to end and killed later, what does not run yet is over.

        Whether AWS then calls the latter terminated or cancelled is not documented; here it is
        terminated.
        """
        if job.ended or job.stop_reason is not None:
            return
        job.stop_reason = reason
        if job.waits:
            self._end_job(job, "FAILED", reason)
        else:
            self._ask_to_end(job)

    def _ask_to_end(self, job: Job) -> None:
        job.killed_at = time.monotonic() + self._settings.stop_seconds
        for node in job.nodes:
            if node.container is not None:
                node.container.ask_to_end()

    def _run(self) -> None:
        while not self._closing.wait(_ROUND_SECONDS):
            with self.lock:
                for queue in self._settings.queues.values():
                    self._take_back(queue)
                for job in list(self.jobs.values()):
                    if not job.ended:
                        self._move(job)
        with self.lock:
            for job in self.jobs.values():
                if not job.ended:
                    self._end_job(job, "FAILED", "the local Batch was closed")

    def _move(self, job: Job) -> None:
        if job.status == "SUBMITTED":
            job.status = "RUNNABLE"
        elif job.status == "RUNNABLE":
            self._try_to_start(job)
        else:
            self._start_due(job)
            self._watch(job)

    # -- capacity

    def _active(self, queue: str) -> list[Job]:
        return [
            job
            for job in self.jobs.values()
            if job.queue == queue and job.status in ("STARTING", "RUNNING")
        ]

    def _instances(self, queue: str) -> list[Instance]:
        """Those in use, oldest first."""
        found = []
        for job in self._active(queue):
            found += [node for node in job.nodes if node.instance and not node.stopped_at]
        return [node.instance for node in found if node.instance]

    def _used_vcpus(self, queue: str) -> float:
        nodes = []
        for job in self._active(queue):
            nodes += [node for node in job.nodes if node.instance and not node.stopped_at]
        return sum(runnable.vcpus(node, node.instance.type) for node in nodes if node.instance)

    def _available(self, queue: QueueSettings) -> float:
        return queue.instances((time.monotonic() - self.traces_began) * self._settings.time_scale)

    def _take_back(self, queue: QueueSettings) -> None:
        """Spot only: capacity that one has on demand is kept, whatever others ask for."""
        if queue.is_spot:
            used = self._instances(queue.name)
            for instance in used[int(min(self._available(queue), len(used))) :]:
                seconds = self._settings.notice_seconds / self._settings.time_scale
                instance.reclaim(seconds, notice=True)

    def _try_to_start(self, job: Job) -> None:
        now = time.monotonic()
        job.runnable_since = job.runnable_since or now
        queue = self._settings.queues[job.queue]
        if self._is_behind(job):
            return
        free = self._available(queue) - len(self._instances(queue.name))
        instance_type, job.status_reason = runnable.placed_on(
            job, queue, free, used_vcpus=self._used_vcpus(queue.name)
        )
        if instance_type is None:
            waited = (now - job.runnable_since) * self._settings.time_scale
            if reason := runnable.time_limit(job, queue, waited):
                self._end_job(job, "FAILED", reason)
            return
        job.status = "STARTING"
        job.status_reason = None
        for node in job.nodes:
            node.instance = Instance(instance_type, queue.zone, queue.market)
            node.status = "STARTING"
            node.due = float("inf")
        job.main.due = now + self._settings.start_seconds

    def _is_behind(self, job: Job) -> bool:
        """First in, first out: the first job that waits holds up the queue."""
        first = next(
            waiting
            for waiting in self.jobs.values()
            if waiting.queue == job.queue and waiting.status == "RUNNABLE"
        )
        return first is not job

    # -- containers

    def _start_due(self, job: Job) -> None:
        for node in job.nodes:
            if (
                node.status != "STARTING"
                or time.monotonic() < node.due
                or job.stop_reason is not None
            ):
                continue
            if problem := runnable.pull_problem(node, self._settings.missing_images):
                node.reason = problem
                self._end_attempt(job, "Task failed to start")
                return
            self._start(job, node)
            if node is job.main:
                job.status = "RUNNING"
                for child in job.nodes[1:]:
                    child.due = time.monotonic() + self._settings.start_seconds

    def _start(self, job: Job, node: Node) -> None:
        variables = environment.container_environment(self._settings, job, node)
        folder = self._folder / job.id / f"{len(job.attempts) + 1}-{node.index}"
        node.container = Container(node.properties["command"], variables, folder)
        node.status = "RUNNING"
        node.started_at = self._now_ms()

    def _watch(self, job: Job) -> None:
        now = time.monotonic()
        for node in job.nodes:
            if node.container is None or node.status != "RUNNING":
                continue
            code = node.container.exit_code()
            if code is not None:
                if job.stop_reason is None:
                    reason = "Essential container in task exited"
                else:
                    reason = job.stop_reason
                self._end_node(node, code, _TIMED_OUT if job.timed_out_at else reason)
            elif (
                node.instance is not None
                and node.instance.ends_at is not None
                and now >= node.instance.ends_at
            ):
                node.container.kill()
                self._end_node(node, None, f"Host EC2 (instance {node.instance.id}) terminated.")
            elif job.killed_at is not None and now >= job.killed_at:
                node.container.kill()
                self._end_node(node, 137, _TIMED_OUT if job.timed_out_at else job.stop_reason)
        if job.main.stopped_at is not None:
            self._end_attempt(job, job.main.status_reason)
        elif job.stop_reason is not None and job.main.container is None:
            self._end_job(job, "FAILED", job.stop_reason)
        else:
            self._enforce_duration(job)

    def _enforce_duration(self, job: Job) -> None:
        """The duration is of the whole job, from its main node's start."""
        if (
            job.timeout_seconds is None
            or job.main.started_at is None
            or job.timed_out_at is not None
        ):
            return
        if (
            self._now_ms() - job.main.started_at
            >= 1000 * job.timeout_seconds / self._settings.attempt_scale
        ):
            job.timed_out_at = time.monotonic()
            self._ask_to_end(job)

    def _end_node(self, node: Node, code: int | None, reason: str | None) -> None:
        node.exit_code = code
        node.status_reason = reason
        node.stopped_at = self._now_ms()
        if code == 0:
            node.status = "SUCCEEDED"
        else:
            node.status = "FAILED"
        if node.instance is not None:
            node.instance.close()

    def _end_attempt(self, job: Job, reason: str | None) -> None:
        """The main node's end is the attempt's: what still runs beside it is stopped."""
        # What was terminated or took too long has FAILED, however its container has ended
        # (API_TerminateJob).
        stopped = job.stop_reason is not None or job.timed_out_at is not None
        succeeded = job.main.status == "SUCCEEDED" and not stopped
        self._stop_nodes(job, reason)
        job.attempts.append(job.main.attempt())
        if not stopped and not succeeded and retries.another(job):
            job.status = "RUNNABLE"
            job.status_reason = None
            job.runnable_since = None
            job.killed_at = None
            job.new_attempt()
            return
        if succeeded:
            job.status = "SUCCEEDED"
        else:
            job.status = "FAILED"
        job.status_reason = reason

    def _end_job(self, job: Job, status: str, reason: str) -> None:
        self._stop_nodes(job, reason)
        if job.main.started_at is not None:
            job.attempts.append(job.main.attempt())
        job.main.stopped_at = job.main.stopped_at or self._now_ms()
        job.status = status
        job.status_reason = reason

    def _stop_nodes(self, job: Job, reason: str | None) -> None:
        for node in job.nodes:
            if node.container is not None and node.stopped_at is None:
                node.container.kill()
                self._end_node(node, 137, reason)
            elif node.instance is not None and node.stopped_at is None:
                self._end_node(node, None, reason)

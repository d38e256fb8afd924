"""What the account holds and how it behaves, as given at the start and changed while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

_ENVIRONMENT_TYPES = {
    "spot": "SPOT",
    "on_demand": "EC2",
    "fargate": "FARGATE",
    "fargate_spot": "FARGATE_SPOT",
}


@dataclass(kw_only=True)
class QueueSettings:
    """A job queue with one compute environment.

    capacity: [[seconds since the start or the last change, instances], …]; empty: without end.
    Fewer instances than run means that the youngest are reclaimed, with notice. environment_state,
    environment_status: of the compute environment. max_vcpus: its maxvCpus. time_limit_actions:
    `jobStateTimeLimitActions` as AWS takes them.
    """

    name: str
    market: str = "on_demand"
    instance_types: list[str] = field(default_factory=lambda: ["g5.xlarge"])
    zone: str = "us-east-1a"
    state: str = "ENABLED"
    environment_state: str = "ENABLED"
    environment_status: str = "VALID"
    max_vcpus: int = 256
    capacity: list[list[float]] = field(default_factory=list)
    time_limit_actions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def environment(self) -> str:
        return f"{self.name}-environment"

    @property
    def environment_type(self) -> str:
        return _ENVIRONMENT_TYPES[self.market]

    @property
    def is_spot(self) -> bool:
        return self.market.endswith("spot")

    def instances(self, seconds: float) -> float:
        """How many there are so long after the start of the trace."""
        if not self.capacity:
            now = float("inf")
        else:
            now = 0.0
        for begins, count in self.capacity:
            if begins <= seconds:
                now = count
        return now


@dataclass(kw_only=True)
class Settings:
    """queues: by name. role_environment: what containers find set, as an instance with a role would
    find credentials.

    time_scale: seconds of AWS in one second here, for the notice, for traces and for
    jobStateTimeLimitActions; the times of jobs are real. attempt_scale: the same for the duration
    of attempts. start_seconds: from capacity to a running container. stop_seconds: from SIGTERM to
    SIGKILL. clock_ahead_seconds: of the account's clock against this machine's. missing_images:
    expressions of images that cannot be pulled. rules: faults that requests meet ({"operation",
    "kind", "times"}, see faults.py).
    """

    queues: dict[str, QueueSettings] = field(default_factory=dict)
    role_environment: dict[str, str] = field(default_factory=dict)
    region: str = "us-east-1"
    time_scale: float = 1.0
    attempt_scale: float = 1.0
    notice_seconds: float = 120.0
    start_seconds: float = 0.2
    stop_seconds: float = 1.0
    clock_ahead_seconds: float = 0.0
    missing_images: list[str] = field(default_factory=list)
    rules: list[dict[str, Any]] = field(default_factory=list)

    def change(self, document: dict[str, Any]) -> None:
        """Settings from now on; queues are added or changed by name.

        Raises ValueError for what is not known.
        """
        known = {field.name for field in fields(self)}
        if unknown := set(document) - known:
            raise ValueError(f"no such settings: {sorted(unknown)}")
        for name, value in document.items():
            if name != "queues":
                setattr(self, name, value)
        for name, changes in document.get("queues", {}).items():
            if unknown := set(changes) - {field.name for field in fields(QueueSettings)}:
                raise ValueError(f"queue {name}: no such settings: {sorted(unknown)}")
            queue = self.queues.setdefault(name, QueueSettings(name=name))
            for key, value in changes.items():
                setattr(queue, key, value)
            if queue.market not in _ENVIRONMENT_TYPES:
                raise ValueError(
                    f"queue {name}: market is {queue.market!r}, not one of "
                    f"{sorted(_ENVIRONMENT_TYPES)}"
                )

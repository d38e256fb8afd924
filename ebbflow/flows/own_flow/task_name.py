"""Names of trainings' jobs, derived from the position of their task in the user's flow."""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ebbflow.core.layout import plain_name

if TYPE_CHECKING:
    from metaflow import FlowSpec

_MOST_LINKS = 1000  # resumed runs of one run
_FIRST_PORT = 20000  # below those that the kernel gives to clients
_PORTS = 8000


@dataclass(frozen=True, kw_only=True)
class TaskName:
    """Identity of a task in the user's flow, from Metaflow.

    Attributes:
        origin_run: The run that this run resumes; None or "None" if it resumes none.
        attempt: Metaflow's retry count, 0 at first.
    """

    flow: str
    run: str
    origin_run: str | None
    step: str
    task: str
    attempt: int

    @property
    def pathspec(self) -> str:
        return f"{self.flow}/{self.run}/{self.step}/{self.task}"

    def rendezvous_port(self, gang: Sequence[int]) -> int:
        """Return the port for process groups that the step itself opens.

        The port is the same on all nodes of a gang.

        Args:
            gang: Indexes of the foreach loops around the gang, which tell gangs of a step apart.
        """
        place = f"{self.flow}/{self.run}/{self.step}/{self.attempt}/{list(gang)}"
        digest = hashlib.sha256(place.encode())
        return _FIRST_PORT + int.from_bytes(digest.digest()[:2], "big") % _PORTS

    @functools.cached_property
    def first_run(self) -> str:
        """The original run, from which this run was resumed directly or through other runs."""
        run = self.run
        origin = self.origin_run
        for _ in range(_MOST_LINKS):
            if origin in (None, "None", ""):
                break
            run = str(origin)
            origin = _read_origin(self.flow, run)
        return run


def sweep_name(task: TaskName, *, label: str | None) -> str:
    """Return the name under which a step's trials share data. A resumed run gets the same name."""
    return plain_name(
        "-".join([task.flow.lstrip("_") or "flow", task.first_run, label or task.step])
    )


def job_name(task: TaskName, flow: FlowSpec, *, label: str | None, is_gang: bool, call: int) -> str:
    """Return the job's name, which is one path segment and the same in all attempts and resumed
    runs.

    Args:
        label: The option `name` of `@ebbflow`; None for the step's name.
        call: Number of the training in its step, 1 for the first.
    """
    stack = [index for index, _, _ in flow.foreach_stack() or []]
    if is_gang:
        stack = stack[:-1]  # the nodes of a gang share a job
    indexes = [*stack, *(getattr(flow, "_iteration_stack", None) or [])]
    parts = [task.flow.lstrip("_") or "flow", task.first_run, label or task.step]
    parts += [str(index) for index in indexes]
    if call > 1:
        parts.append(f"call{call}")
    return plain_name("-".join(parts))


def _read_origin(flow: str, run: str) -> str | None:
    """Return the run that `run` resumed, or None if there is none or its records cannot be read."""
    from metaflow import Run

    try:
        path = Run(f"{flow}/{run}", _namespace_check=False).origin_pathspec
    except Exception:  # Metaflow's client and its providers raise many kinds of errors
        return None
    if path is None:
        return None
    return path.rpartition("/")[2]

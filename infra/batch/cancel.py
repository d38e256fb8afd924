"""Ending jobs that are not wanted any more."""

from __future__ import annotations

from typing import Any

from infra.aws.calls import Patience, ask

# What our own reasons begin with: a job that was ended by us is told from one that a person or Metaflow ended.
NEVER_STARTED = "Ebbflow: did not start in time"
TERMINATED = "Ebbflow: ended"


def cancel_job(job_id: str, reason: str, client: Any, *, started: bool = False, deadline_seconds: float = 20.0) -> None:
    """End a job in whatever state it is; one that has ended already is left as it is.

    started: whether it ever ran: `describe_attempts` tells a job that waited too long by it. reason: for people, it
    goes on from "Ebbflow: did not start in time: ". Raises CloudError when Batch could not be told.
    """
    text = f"{TERMINATED if started else NEVER_STARTED}: {reason}"
    # TerminateJob also cancels what has not reached STARTING; CancelJob would leave alone what has.
    ask(client, "terminate_job", Patience.of(deadline_seconds), jobId=job_id, reason=text[:1024])

"""Ending jobs that are not wanted any more."""

from __future__ import annotations

from typing import Any

from ebbflow.infra.aws.calls import Patience, ask

# What our own reasons begin with: a job that was ended by us is told from one that a person or Metaflow ended.
NEVER_STARTED = "Ebbflow: did not start in time"  # it waited for capacity
NOT_MADE = "Ebbflow: its container was not made in time"  # it had capacity
TERMINATED = "Ebbflow: ended"


def cancel_job(
    job_id: str, reason: str, client: Any, *, words: str = NEVER_STARTED, deadline_seconds: float = 20.0
) -> None:
    """End a job in whatever state it is; one that has ended already is left as it is.

    words: what its reason begins with, by which `describe_attempts` tells why it ended: NEVER_STARTED, NOT_MADE or
    TERMINATED. reason: for people, it goes on from "Ebbflow: did not start in time: ". Raises CloudError when Batch
    could not be told.
    """
    text = f"{words}: {reason}"
    # TerminateJob also cancels what has not reached STARTING; CancelJob would leave alone what has, and not say so:
    # https://docs.aws.amazon.com/batch/latest/APIReference/API_CancelJob.html
    ask(client, "terminate_job", Patience.of(deadline_seconds), jobId=job_id, reason=text[:1024])

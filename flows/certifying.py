"""The resume certificate of a job, where one is asked for, before the gang starts."""

from __future__ import annotations

from typing import Any

from metaflow import current

from ebbflow.flows.job import Job
from ebbflow.flows.steps import told
from ebbflow.infra.events import CERTIFICATE


@told
def certify(flow: Any) -> dict | None:
    """The certificate as JSON; None where none is asked for. One that does not hold ends the job before it costs."""
    from ebbflow.training.certify import certify_in_child
    from ebbflow.training.errors import TrainingError

    if not flow.certify:
        return None
    job = Job.of(flow, current.run_id)
    found = certify_in_child(job.config)
    with job.events("certify") as events:
        events.emit(CERTIFICATE, **found)
    if not found["holds"]:
        raise TrainingError("the job would not resume exactly, as its certificate says; fix: make it repeatable")
    return found

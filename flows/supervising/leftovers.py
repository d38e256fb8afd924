"""Jobs of AWS Batch that a run left behind: nobody waits for them any more, and they are paid for."""

from __future__ import annotations

import time
from collections.abc import Callable

from ebbflow.flows.attempts.past import settle, unsettled_jobs
from ebbflow.flows.job import Job
from ebbflow.infra.batch import batch_client, describe_attempts
from ebbflow.infra.errors import InfraError
from ebbflow.infra.events import read_events

_SECONDS = 90.0
_LOOK_SECONDS = 2.0


def end_leftovers(job: Job, say: Callable[[str], None]) -> None:
    """End them and write down what they were, for the bill. job: with the run that its events are to name. Only where
    no launcher of the job is alive. Takes 90 s at most, also when the supervisor was asked to leave.

    Batch not answering is said, and no reason to stop: the next attempt that is placed asks again. Raises StoreError.
    """
    events = read_events(job.store)
    if not unsettled_jobs(events):
        return
    limit = time.monotonic() + _SECONDS
    try:
        client = batch_client(job.config.batch.region)
        with job.events("leftovers") as log:
            while True:
                events += settle(job, events, client, log)
                known = describe_attempts(list(unsettled_jobs(events)), client)
                left = [job_id for job_id, attempt in known.items() if not attempt.finished]
                if not left or time.monotonic() > limit:
                    break
                time.sleep(_LOOK_SECONDS)
            events += settle(job, events, client, log)
        if left:
            say(f"not ended within {_SECONDS:g} s, and still to be paid for: {', '.join(left)}")
    except InfraError as error:
        say(f"whether AWS Batch still runs something of this job is not known: {error}")

"""Jobs found again by a mark that their submit bore: Batch gives no token by which a submit made twice is one job."""

from __future__ import annotations

from typing import Any

from ebbflow.infra.aws.calls import Patience, ask, pages

# Of a submit's parameters, which stand in no job definition and so replace nothing; Batch tells them with the job.
MARK = "ebbflow_submit"
_JOBS_IN_A_REQUEST = 100


def marked_jobs(queue: str, job_name: str, mark: str, client: Any, *, deadline_seconds: float = 20.0) -> list[str]:
    """Ids of the queue's jobs of that name whose parameter `MARK` is `mark`, in whatever state, the first made first.

    Batch lists jobs by name whatever their state, and says no parameters with the list. Raises CloudError.
    """
    patience = Patience.of(deadline_seconds)
    by_name = [{"name": "JOB_NAME", "values": [job_name]}]
    listed = pages(client, "list_jobs", "jobSummaryList", patience, jobQueue=queue, filters=by_name)
    named = [one["jobId"] for one in listed if one.get("jobName") == job_name]
    found: list[Any] = []
    for start in range(0, len(named), _JOBS_IN_A_REQUEST):
        answer = ask(client, "describe_jobs", patience, jobs=named[start : start + _JOBS_IN_A_REQUEST])
        found += [job for job in answer.get("jobs") or [] if (job.get("parameters") or {}).get(MARK) == mark]
    return [job["jobId"] for job in sorted(found, key=lambda job: job.get("createdAt") or 0)]

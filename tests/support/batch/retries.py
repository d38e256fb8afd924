"""Whether Batch itself starts a failed job again: its retry strategy, with evaluateOnExit."""

from __future__ import annotations

import fnmatch

from tests.support.batch.jobs import Job


def another(job: Job) -> bool:
    """After an attempt that failed and stands in job.attempts: the first condition that fits
    decides.
    """
    strategy = {**job.definition.get("retryStrategy", {}), **job.request.get("retryStrategy", {})}
    if len(job.attempts) >= strategy.get("attempts", 1):
        return False
    node = job.main
    said = {
        "onStatusReason": node.status_reason or "",
        "onReason": node.reason or "",
        "onExitCode": "" if node.exit_code is None else str(node.exit_code),
    }
    for condition in strategy.get("evaluateOnExit", []):
        patterns = {name: condition[name] for name in said if name in condition}
        if all(
            fnmatch.fnmatchcase(said[name].lower(), pattern.lower())
            for name, pattern in patterns.items()
        ):
            return condition["action"].upper() == "RETRY"
    return True

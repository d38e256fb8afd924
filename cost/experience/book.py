"""Experience in the store: one small object per job, under keys that sort by time.

    <store>/experience/<day of the job's first event>-<job>.json

An object is a pure function of the job's events, so that writing it again, by whomever, changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from cost.experience.belief import Experience
from cost.experience.records import JobExperience, experience_of
from infra.errors import ObjectNotFound
from infra.events import Event
from infra.layout import EXPERIENCE_PREFIX, experience_key
from infra.store import Store

# A plan reads no more than these: older jobs say little of today's pools, and each costs a request.
NEWEST_JOBS = 200


def remember(root: Store, events: Sequence[Event]) -> JobExperience | None:
    """Put what the job has shown so far; None, and nothing is written, where it has shown nothing.

    root: the store that holds all jobs. Raises StoreError.
    """
    if not events:
        return None
    found = experience_of(events)
    if not found.stays and not found.speeds:
        return None
    day = datetime.fromtimestamp(min(event.t_wall for event in events), UTC).strftime("%Y%m%d")
    root.put(experience_key(day, found.job), json.dumps(found.to_json(), indent=1).encode())
    return found


def recall(root: Store) -> Experience:
    """What the newest jobs of the store have shown. Raises StoreError; an object that cannot be read is left out."""
    jobs = []
    for key in sorted(meta.key for meta in root.list(EXPERIENCE_PREFIX))[-NEWEST_JOBS:]:
        try:
            jobs.append(JobExperience.from_json(json.loads(root.get(key))))
        except (ObjectNotFound, ValueError, KeyError, TypeError):
            continue  # deleted meanwhile, or of another version: a plan does without
    return Experience.of(jobs)

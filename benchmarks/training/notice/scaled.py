"""Many notices, one after the other, to a gang of two ranks: is each one's last step durable in
time?
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos.imds import FakeMetadata
from benchmarks.training.notice.figures import (
    generation_of_attempt,
    notice_figures,
    spread,
    steps_redone,
)
from benchmarks.training.notice.job import SOURCES, NoticeJob
from ebbflow.infra.instance import ENDPOINT_VARIABLE

_ENDLESS = 10**7
# Range of the steps after a start at which its notice comes
_FIRST_STEPS = 5
_LAST_STEPS = 60


def measure_scaled(
    folder: Path,
    *,
    notices: int,
    notice_seconds: float,
    margin_seconds: float,
    seed: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Sources and nodes in turn, steps by the seed; the machine is killed when the time of its
    notice is up.
    """
    chance = random.Random(seed)
    with FakeMetadata() as metadata:
        os.environ[ENDPOINT_VARIABLE] = metadata.address  # the agents inherit it
        job = NoticeJob(
            folder / "scaled",
            nodes=2,
            ranks_per_node=1,
            max_steps=_ENDLESS,
            interval_steps=400,
            notice_seconds=notice_seconds,
            margin_seconds=margin_seconds,
        )
        given = []
        try:
            for number in range(notices):
                source = SOURCES[number % len(SOURCES)]
                node = number // len(SOURCES) % job.nodes
                after = chance.randint(_FIRST_STEPS, _LAST_STEPS)
                job.start()
                at = job.await_step(lambda first, step, after=after: step >= first + after)
                given_at = job.notify(source, node, metadata)
                outcome = job.await_end(given_at + notice_seconds)
                metadata.forget()
                given.append(
                    {
                        "source": source,
                        "node": node,
                        "at_step": at,
                        "given_at": given_at,
                        "attempt": number,
                        "outcome": None if outcome is None else outcome.outcome,
                    }
                )
                tell(
                    f"notice {number + 1} of {notices}: {source} to node {node} at step {at}: "
                    f"{given[-1]['outcome']}"
                )
        finally:
            job.close()
            del os.environ[ENDPOINT_VARIABLE]
    return _figures(
        job, given, notice_seconds=notice_seconds, margin_seconds=margin_seconds, seed=seed
    )


def _figures(job: NoticeJob, given: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    events = job.events()
    for one in given:
        one["generation"] = generation_of_attempt(events, one["attempt"])
    rows = notice_figures(events, given)
    for row, one in zip(rows, given, strict=True):
        row["outcome"] = one["outcome"]
    durable = [row["durable_seconds"] for row in rows if row["durable_seconds"] is not None]
    return {
        "notices": len(rows),
        "durable": len(durable),
        "interrupted": sum(row["outcome"] == "interrupted" for row in rows),
        "heard_seconds": spread(
            [row["heard_seconds"] for row in rows if row["heard_seconds"] is not None]
        ),
        "durable_seconds": spread(durable),
        "durable_seconds_by_source": {
            source: spread(
                [
                    row["durable_seconds"]
                    for row in rows
                    if row["source"] == source and row["durable_seconds"]
                ]
            )
            for source in SOURCES
        },
        "steps_redone": steps_redone(events),
        **settings,
        "rows": rows,
    }

"""Reading all segments of a job's events, from stores whose listings may be late too.

S3 lists what was put at once. Others (OpenStack Swift) may omit an object for a while, though it can be read by its
name. Names are numbered, so that the next of each writer can be asked for; and a generation that has ended says who
must have written.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from infra.errors import ObjectNotFound
from infra.store import Store

_READERS = 16
_PATIENCE_SECONDS = 2.0  # for writers of whom nothing is listed at all; most often they died before they wrote
_PAUSE_SECONDS = 0.25
_NAME = re.compile(r"(events/\d+/.+)-(\d{6})\.(\w+)\.jsonl")


def read_segments(job_store: Store) -> list[bytes]:
    """The content of every segment, in no order. Raises StoreError."""
    found: dict[str, bytes] = {}
    with ThreadPoolExecutor(_READERS, thread_name_prefix="events") as pool:
        _read_listed(job_store, pool, found)
        if job_store.local_path("events") is not None:
            return list(found.values())
        _read_next(job_store, pool, found)
        limit = time.monotonic() + _PATIENCE_SECONDS
        while (silent := _silent_writers(found)) and time.monotonic() < limit:
            time.sleep(_PAUSE_SECONDS)
            _read_listed(job_store, pool, found)
            _read_next(job_store, pool, found)
    planned = [writer for writer, by_plan in silent.items() if by_plan]
    if planned:
        text = ", ".join(sorted(planned)[:5])
        print(f"events: WARNING: nothing is listed of {text}; figures may be too low", file=sys.stderr, flush=True)
    return list(found.values())


def _read_listed(job_store: Store, pool: ThreadPoolExecutor, found: dict[str, bytes]) -> None:
    keys = [meta.key for meta in job_store.list("events") if meta.key not in found]
    found.update(zip(keys, pool.map(job_store.get, keys), strict=True))


def _read_next(job_store: Store, pool: ThreadPoolExecutor, found: dict[str, bytes]) -> None:
    """Of each writer: what the listing left out in between, and what came after the last it showed."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for key in found:
        if match := _NAME.fullmatch(key):
            numbers[match[1], match[3]].add(int(match[2]))

    def more(writer: tuple[str, str]) -> dict[str, bytes]:
        known, answers, number = numbers[writer], {}, 0
        while True:
            if number not in known:
                key = f"{writer[0]}-{number:06d}.{writer[1]}.jsonl"
                try:
                    answers[key] = job_store.get(key)
                except ObjectNotFound:
                    if number > max(known):
                        return answers
            number += 1

    for answers in pool.map(more, list(numbers)):
        found.update(answers)


def _silent_writers(found: dict[str, bytes]) -> dict[str, bool]:
    """Agents and ranks of ended generations of whom there is nothing; True: of one that ended as planned."""
    heard = {match[1] for key in found if (match := _NAME.fullmatch(key))}
    ended: dict[int, bool] = {}
    expected: dict[int, set[str]] = defaultdict(set)
    for event in _gang_events(found.values()):
        number, data = event["generation"], event["data"]
        folder = f"events/{number:06d}"
        if event["name"] == "generation_started":
            expected[number] |= {f"{folder}/{node}-agent" for node in range(data["nodes"])}
        elif event["name"] == "node_started":
            expected[number] |= {f"{folder}/{event['node']}-{rank}" for rank in data["ranks"]}
        else:
            ended[number] = not data.get("culprit")
    return {writer: ended[number] for number in ended for writer in expected[number] - heard}


def _gang_events(segments: Iterable[bytes]) -> Iterable[dict]:
    names = tuple(f'"name":"{name}"'.encode() for name in ("generation_started", "node_started", "generation_ended"))
    for segment in segments:
        for line in segment.splitlines():
            if any(name in line for name in names):
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

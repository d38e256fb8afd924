"""`python -m benchmarks page`: time and memory of the first page of a long job, from a log that
this program makes up.

The log has the events that one rank and its agent write: steps, commits and heartbeats, in sealed
segments of 20 steps, as in a local store with steps of 0.1 s. Each reader runs in a process of its
own, which reports its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ebbflow.core.events import (
    COMMIT,
    GENERATION_STARTED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    PLAN,
    STEP,
    Event,
)
from ebbflow.core.layout import commit_key, event_key, job_prefix
from ebbflow.core.segments import seal_segment
from ebbflow.observe.watch import LivePage

_JOB = "long"
_START = 1.8e9
_STEP_SECONDS = 0.1
_STEPS_PER_SEGMENT = 20
_STEPS_PER_COMMIT = 600
_HEARTBEAT_SECONDS = 5.0
_LAUNCHER = {"since_utc": _START, "host": "here", "user": "ada", "pid": 1, "command": "run"}
_CHOSEN = {
    "instance_type": "g5.xlarge",
    "market": "spot",
    "nodes": 1,
    "usd_per_hour": 0.5,
    "price_kind": "made up",
}


def write_log(store: Path, steps: int, ranks: int) -> None:
    """Write the events of a job with this number of steps, on one node."""
    empty = Event(
        name="",
        job=_JOB,
        run="1",
        attempt=0,
        generation=1,
        node=0,
        rank=-1,
        step=None,
        t_wall=_START,
        t_mono=0.0,
    )

    def at(
        now: float, name: str, /, rank: int = -1, step: int | None = None, **data: object
    ) -> str:
        return replace(
            empty, name=name, rank=rank, step=step, t_wall=_START + now, t_mono=now, data=data
        ).to_json()

    def put(writer: int | str, number: int, lines: list[str], *, last: bool) -> None:
        key = event_key(1, 0, writer, f"{number:06d}.abcdef")
        path = store / job_prefix(_JOB) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seal_segment(key, lines, last=last))

    begun = [
        at(0.0, PLAN, chosen=_CHOSEN, simulated=True, refusal=None, steps=2 * steps),
        at(0.0, GENERATION_STARTED, parent=None, parent_step=0, nodes=1),
        at(0.0, NODE_STARTED, ranks=list(range(ranks)), host="host-0"),
    ]
    beats = [
        at(seconds, NODE_HEARTBEAT, seconds=seconds, resident_bytes=10**9)
        for seconds in (
            n * _HEARTBEAT_SECONDS for n in range(int(steps * _STEP_SECONDS / _HEARTBEAT_SECONDS))
        )
    ]
    put("agent", 0, [*begun, *beats], last=False)
    for rank in range(ranks):
        for number, first in enumerate(range(1, steps + 1, _STEPS_PER_SEGMENT)):
            lines = []
            for step in range(first, min(first + _STEPS_PER_SEGMENT, steps + 1)):
                now = step * _STEP_SECONDS
                loss = 2.0 + 1.0 / step + (step * 7919 % 1000) / 1e5
                if rank == 0:
                    more = {"flops": 1179648.0, "slowest_rank": 0, "slowest_ratio": 1.022061}
                else:
                    more = {}
                lines.append(
                    at(
                        now,
                        STEP,
                        rank,
                        step,
                        loss=loss,
                        tokens=64.0,
                        learning_rate=0.0018421250316689353,
                        gradient_norm=0.9058520941783835,
                        own_seconds=0.0931569960028864,
                        seconds={
                            "useful_step": 0.09715699600288644,
                            "data_wait": 0.00035769599708146416,
                        },
                        at_risk_usd=3.3037730724798164e-06,
                        **more,
                    )
                )
                if rank == 0 and step % _STEPS_PER_COMMIT == 0:
                    key = commit_key(step, 1, "ab" * 32)
                    lines.append(
                        at(
                            now,
                            COMMIT,
                            rank,
                            step,
                            key=key,
                            bytes=10**6,
                            seconds=0.2,
                            stall_seconds=0.003,
                        )
                    )
            put(rank, number, lines, last=False)


def measure_page(store: str) -> dict[str, float]:
    """Make the first page in this process, and return its seconds, bytes and the process's largest
    memory.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    cpu = time.process_time()
    page = LivePage(_JOB, store, launcher=_LAUNCHER)
    while len(content := page.render()) < 100_000 or b"waiting for the job" in content:
        time.sleep(0.1)
    return {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu,
        "page_bytes": len(content),
        "mib_before": before / 1024,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks page", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--store",
        default=None,
        help="folder of a log that an earlier call wrote, or to write it to",
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure_page(options.store)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        store = Path(options.store or folder)
        if not (store / job_prefix(_JOB)).exists():
            write_log(store, options.steps, options.ranks)
        again = [sys.executable, "-m", "benchmarks", "page", "--measure", "--store", str(store)]
        found = json.loads(subprocess.check_output(again, env=os.environ, text=True))
    print(
        f"first page after {found['seconds']:.1f} s ({found['cpu_seconds']:.1f} s of CPU), "
        f"{found['mib']:.0f} MiB (imports alone {found['mib_before']:.0f}), page of "
        f"{found['page_bytes']:,} bytes"
    )
    return 0

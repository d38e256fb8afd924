"""Timeline of a job in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open: `ebbflow trace JOB`.

Each node is a process and each rank a thread. A slice is an interval of one ledger class, so a step is split into its
waits and its useful part. Commits, notices and failures are marks; loss and speed are counters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ebbflow.cost.jobs import read_job
from ebbflow.infra.events import (
    COMMIT,
    COMMIT_FAILED,
    FAULT_DETECTED,
    FAULT_INJECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    GUARD,
    NODE_ENDED,
    NODE_STARTED,
    NOTICE,
    OUTCOME,
    PHASE,
    RESTORE,
    STEP,
    Event,
    LedgerClass,
)

_MARKS = frozenset({COMMIT, COMMIT_FAILED, FAULT_DETECTED, FAULT_INJECTED, GUARD, NOTICE, OUTCOME, RESTORE})
_GANG = -1  # the process that shows generations and nodes
# The order in which a step spends its time; what is not named here comes between.
_FIRST, _LAST = (LedgerClass.DATA_WAIT,), (LedgerClass.CHECKPOINT_STALL,)


def build_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Build the trace of a job from its events, with the first event at time 0."""
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    zero = ordered[0].t_wall
    found = [*_names(ordered), *_spans(ordered, zero)]
    for event in ordered:
        found += _slices(event, zero)
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"job": ordered[0].job, "start_unix": zero}}


def _names(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", _GANG, 0, "generations")
    for node in sorted({event.node for event in events if event.generation > 0}):
        yield _meta("process_name", node, 0, f"node {node}")
    for node, rank in sorted({(event.node, event.rank) for event in events if event.rank >= 0}):
        yield _meta("thread_name", node, rank, f"rank {rank}")


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _spans(events: Sequence[Event], zero: float) -> Iterator[dict[str, Any]]:
    """Yield a slice for each generation and each of its nodes. Without a recorded end, it ends with the last event."""
    last: dict[tuple[int, int | None], float] = {}
    for event in events:
        last[event.generation, None] = last[event.generation, event.node] = event.t_wall
    kinds = {GENERATION_STARTED: GENERATION_ENDED, NODE_STARTED: NODE_ENDED}
    ends = {(one.name, one.generation, one.node): one for one in events if one.name in kinds.values()}
    for event in events:
        if event.name not in kinds:
            continue
        gang = event.name == GENERATION_STARTED
        end = ends.get((kinds[event.name], event.generation, event.node))
        until = end.t_wall if end is not None else last[event.generation, None if gang else event.node]
        name = f"generation {event.generation}" if gang else f"node {event.node} of generation {event.generation}"
        arguments = {**event.data, **({} if end is None else end.data)}
        yield _slice(name, event.t_wall - zero, until - event.t_wall, _GANG, 0 if gang else event.node + 1, arguments)


def _slices(event: Event, zero: float) -> Iterator[dict[str, Any]]:
    at, data = event.t_wall - zero, event.data
    if event.name == PHASE:
        seconds = float(data["seconds"])
        yield _slice(str(data["class"]), at - seconds, seconds, event.node, event.rank, {})
    elif event.name == STEP:
        spent = {str(name): float(seconds) for name, seconds in data.get("seconds", {}).items()}
        order = sorted(spent, key=lambda name: (name not in _FIRST, name in _LAST))
        at -= sum(spent.values())
        for name in order:
            yield _slice(name, at, spent[name], event.node, event.rank, {"step": event.step})
            at += spent[name]
        if event.rank == 0:
            for name in ("loss", "learning_rate", "gradient_norm"):
                if isinstance(data.get(name), int | float):
                    yield {"ph": "C", "name": name, "pid": 0, "ts": _micros(at), "args": {name: data[name]}}
    elif event.name in _MARKS:
        name = event.name.replace("_", " ") + (f" {event.step}" if isinstance(event.step, int) else "")
        scope = "t" if event.rank >= 0 else "p"
        mark = {"ph": "i", "name": name, "pid": event.node, "tid": max(event.rank, 0), "ts": _micros(at), "s": scope}
        yield {**mark, "args": data}


def _slice(name: str, start: float, seconds: float, process: int, thread: int, more: dict[str, Any]) -> dict[str, Any]:
    shown = {"ph": "X", "name": name.replace("_", " "), "pid": process, "tid": thread, "cat": "ebbflow"}
    return {**shown, "ts": _micros(start), "dur": _micros(max(seconds, 0.0)), "args": more}


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)


def add_command(commands: Any) -> None:
    parser = commands.add_parser("trace", help="write a job's timeline as JSON for ui.perfetto.dev")
    parser.add_argument("job", metavar="JOB", help="name of a job, 'latest', a folder or an s3:// URI")
    parser.add_argument("--store", default=None, metavar="URI", help="the job's store, if not known to this machine")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="default: JOB.trace.json; -: print it")
    parser.set_defaults(run=_write)


def _write(arguments: argparse.Namespace) -> int:
    trace = build_trace(read_job(arguments.job, arguments.store))
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    out = arguments.out or Path(f"{trace['otherData']['job']}.trace.json")
    if str(out) == "-":
        sys.stdout.write(f"{text}\n")
        return 0
    try:
        out.write_text(text)
    except OSError as error:
        print(f"{out} cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {len(trace['traceEvents']):,} events, {len(text) / 1e6:.1f} MB; open it at https://ui.perfetto.dev")
    return 0

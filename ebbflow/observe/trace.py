"""`ebbflow trace JOB`: timeline of a job in the Trace Event Format.

ui.perfetto.dev and chrome://tracing open this format.

Each node is a process and each rank a thread. A slice is an interval of one ledger class, so a step
is split into its waits and its useful part. Commits, notices and failures are marks; loss and speed
are counters.

`ebbflow trace JOB --otlp URL` sends the generations, the saves and the steps of the lowest rank as
spans to an OpenTelemetry collector, in OTLP's JSON encoding over HTTP
(opentelemetry.io/docs/specs/otlp), which needs no package.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import math
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import (
    CommitFailedPayload,
    CommitPayload,
    GenerationEndedPayload,
    OutcomePayload,
    PhasePayload,
    StepPayload,
)
from ebbflow.core.events import (
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
    RESTORE,
    STEP,
    EndReason,
    Event,
    LedgerClass,
    find_last_event,
    is_event,
    select_events,
)
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.process import run_command
from ebbflow.core.untrusted_text import guard_terminal, one_line
from ebbflow.cost.errors import ReportError
from ebbflow.cost.jobs import read_job

_MARKS = frozenset(
    {COMMIT, COMMIT_FAILED, FAULT_DETECTED, FAULT_INJECTED, GUARD, NOTICE, OUTCOME, RESTORE}
)
_BATCH = 1000  # spans in a request
_POST_SECONDS = 20.0  # time limit of a request
_GANG = -1  # the process that shows generations and nodes
# The order in which a step spends its time; what is not named here comes between.
_FIRST = (LedgerClass.DATA_WAIT,)
_LAST = (LedgerClass.CHECKPOINT_STALL,)


class TraceSource(TypedDict):
    """Origin of a trace: the job, and the Unix time of its first event."""

    job: str
    start_unix: float


class Trace(TypedDict):
    """Trace of a job, in the JSON format that Perfetto reads."""

    traceEvents: list[JsonObject]
    displayTimeUnit: str
    otherData: TraceSource


def build_trace(events: Sequence[Event]) -> Trace:
    """Build the trace of a job from its events; times count from the first event."""
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    zero = ordered[0].t_wall
    found = [*_names(ordered), *_spans(ordered, zero)]
    for event in ordered:
        found += _slices(event, zero)
    return {
        "traceEvents": found,
        "displayTimeUnit": "ms",
        "otherData": {"job": ordered[0].job, "start_unix": zero},
    }


def build_spans(events: Sequence[Event]) -> list[JsonObject]:
    """Build OTLP spans (as JSON) of a job, its generations, and their saves and steps.

    Trace and span ids depend only on the job's name and the span, so sending a job twice creates no
    second span.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    job = ordered[0].job
    last: dict[int, float] = {}
    lowest: dict[int, int] = {}
    for event in ordered:
        last[event.generation] = max(last.get(event.generation, 0.0), event.t_wall)
        if event.name == STEP:
            lowest[event.generation] = min(lowest.get(event.generation, event.rank), event.rank)
    ends = {event.generation: event for event in select_events(ordered, GenerationEndedPayload)}
    outcome = find_last_event(ordered, OutcomePayload)

    def span(
        name: str,
        key: str,
        parent: str,
        start: float,
        end: float,
        data: Mapping[str, Json],
        bad: bool = False,
    ) -> dict:
        found = {
            "traceId": _identify(job, 32),
            "spanId": _identify(f"{job} {key}", 16),
            "name": name,
            "kind": 1,
            "startTimeUnixNano": str(round(1e9 * start)),
            "endTimeUnixNano": str(round(1e9 * max(start, end))),
            "attributes": [
                {"key": f"ebbflow.{key}", "value": _attribute(value)} for key, value in data.items()
            ],
            "status": {"code": 2 if bad else 0},
        }
        return found | ({"parentSpanId": _identify(f"{job} {parent}", 16)} if parent else {})

    data = {"job": job}
    if outcome is not None:
        data["outcome"] = str(outcome.payload.outcome)
    failed = outcome is not None and outcome.payload.outcome is Outcome.FAILED
    found = [span(f"job {job}", "job", "", ordered[0].t_wall, ordered[-1].t_wall, data, failed)]
    for event in ordered:
        number = event.generation
        wall = event.t_wall
        generation = f"generation {number}"
        where = {"generation": number, "node": event.node, "rank": event.rank, "step": event.step}
        if event.name == GENERATION_STARTED:
            end = ends.get(number)
            if end is None:
                more = {}
            else:
                more = {"reason": end.payload.reason, "culprit": end.payload.culprit}
            if end is None:
                until = last[number]
            else:
                until = end.t_wall
            bad = end is not None and end.payload.reason in [*EndReason]
            found.append(
                span(
                    generation, generation, "job", wall, until, {"generation": number, **more}, bad
                )
            )
        elif is_event(event, CommitPayload) or is_event(event, CommitFailedPayload):
            name = event.name.replace("_", " ")
            key = f"{generation} {name} {event.step} {event.rank}"
            start = wall - float(event.payload.seconds or 0.0)
            found.append(
                span(
                    name,
                    key,
                    generation,
                    start,
                    wall,
                    {**event.data, **where},
                    event.name != COMMIT,
                )
            )
        elif is_event(event, StepPayload) and event.rank == lowest[number]:
            step = event.payload
            seconds = {kind: float(value) for kind, value in (step.seconds or {}).items()}
            figures: dict[str, float | None] = {
                f"{kind}_seconds": value for kind, value in seconds.items()
            }
            figures["loss"] = (
                step.loss if step.loss is not None and math.isfinite(step.loss) else None
            )
            figures["tokens"] = step.tokens
            start = wall - sum(seconds.values())
            found.append(
                span(
                    "step",
                    f"{generation} step {event.step}",
                    generation,
                    start,
                    wall,
                    {**where, **figures},
                )
            )
    return found


def send_spans(url: str, job: str, spans: Sequence[JsonObject]) -> None:
    """Post the spans in batches.

    Raises ReportError if the collector cannot be reached or rejects spans.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ReportError(f"{url} is no address of a collector; for example http://localhost:4318")
    if parts.path.rstrip("/").endswith("/v1/traces"):
        address = url
    else:
        address = f"{url.rstrip('/')}/v1/traces"
    words = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    headers = {
        name.strip(): value.strip()
        for name, _, value in (part.partition("=") for part in words.split(","))
        if name
    }
    resource = {"service.name": "ebbflow", "ebbflow.job": job}
    named = [{"key": key, "value": _attribute(value)} for key, value in resource.items()]
    for start in range(0, len(spans), _BATCH):
        scope = {"scope": {"name": "ebbflow"}, "spans": spans[start : start + _BATCH]}
        body = {"resourceSpans": [{"resource": {"attributes": named}, "scopeSpans": [scope]}]}
        text = json.dumps(body, allow_nan=False).encode()
        try:
            request = urllib.request.Request(
                address, text, {**headers, "Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=_POST_SECONDS) as answer:
                said = answer.read()
            refused = (json.loads(said or b"{}") or {}).get("partialSuccess") or {}
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if start:
                after = f" after {start:,} of {len(spans):,} spans"
            else:
                after = ""
            raise ReportError(
                f"{address}: {one_line(error)}{after}; fix: the URL of a collector's OTLP/HTTP port"
            ) from error
        if int(refused.get("rejectedSpans") or 0):
            raise ReportError(
                f"{address} refused {refused['rejectedSpans']} spans: "
                f"{one_line(refused.get('errorMessage'))}"
            )


def main(words: Sequence[str]) -> int:
    """Run the command `trace`. Return the exit code.

    Args:
        words: the name of the command, and its options.
    """
    guard_terminal()
    parser = argparse.ArgumentParser(
        prog="ebbflow trace",
        description="Write a job's timeline as JSON for ui.perfetto.dev, or send it by OTLP.",
    )
    parser.add_argument(
        "job", metavar="JOB", help="name of a job, 'latest', a folder or an s3:// URI"
    )
    parser.add_argument(
        "--store", default=None, metavar="URI", help="the job's store, if not known to this machine"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="FILE",
        help="default: JOB.trace.json; -: print it",
    )
    parser.add_argument(
        "--otlp",
        default=None,
        metavar="URL",
        help="send spans to this collector, such as http://localhost:4318",
    )
    arguments = parser.parse_args(list(words)[1:])
    return run_command(lambda: _write(arguments))


def _names(events: Sequence[Event]) -> Iterator[JsonObject]:
    yield _meta("process_name", _GANG, 0, "generations")
    for node in sorted({event.node for event in events if event.generation > 0}):
        yield _meta("process_name", node, 0, f"node {node}")
    for node, rank in sorted({(event.node, event.rank) for event in events if event.rank >= 0}):
        yield _meta("thread_name", node, rank, f"rank {rank}")


def _meta(kind: str, process: int, thread: int, name: str) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _spans(events: Sequence[Event], zero: float) -> Iterator[JsonObject]:
    """Yield the slices of all generations, and of each node in them.

    A slice without a recorded end lasts until the last event of the generation or node.
    """
    last: dict[tuple[int, int | None], float] = {}
    for event in events:
        last[event.generation, None] = last[event.generation, event.node] = event.t_wall
    kinds = {GENERATION_STARTED: GENERATION_ENDED, NODE_STARTED: NODE_ENDED}
    ends = {
        (event.name, event.generation, event.node): event
        for event in events
        if event.name in kinds.values()
    }
    for event in events:
        if event.name not in kinds:
            continue
        gang = event.name == GENERATION_STARTED
        end = ends.get((kinds[event.name], event.generation, event.node))
        if end is not None:
            until = end.t_wall
        else:
            until = last[event.generation, None if gang else event.node]
        if gang:
            name = f"generation {event.generation}"
        else:
            name = f"node {event.node} of generation {event.generation}"
        arguments = {**event.data, **({} if end is None else end.data)}
        yield _slice(
            name,
            event.t_wall - zero,
            until - event.t_wall,
            _GANG,
            0 if gang else event.node + 1,
            arguments,
        )


def _slices(event: Event, zero: float) -> Iterator[JsonObject]:
    at = event.t_wall - zero
    payload = event.payload
    if isinstance(payload, PhasePayload):
        seconds = float(payload.seconds)
        yield _slice(str(payload.ledger_class), at - seconds, seconds, event.node, event.rank, {})
    elif isinstance(payload, StepPayload):
        spent = {str(name): float(seconds) for name, seconds in (payload.seconds or {}).items()}
        order = sorted(spent, key=lambda name: (name not in _FIRST, name in _LAST))
        at -= sum(spent.values())
        for name in order:
            yield _slice(name, at, spent[name], event.node, event.rank, {"step": event.step})
            at += spent[name]
        if event.rank == 0:
            curves = {
                "loss": payload.loss,
                "learning_rate": payload.learning_rate,
                "gradient_norm": payload.gradient_norm,
            }
            for name, value in curves.items():
                if value is not None and math.isfinite(value):
                    yield {
                        "ph": "C",
                        "name": name,
                        "pid": 0,
                        "ts": _micros(at),
                        "args": {name: value},
                    }
    elif event.name in _MARKS:
        name = event.name.replace("_", " ") + (
            f" {event.step}" if isinstance(event.step, int) else ""
        )
        if event.rank >= 0:
            scope = "t"
        else:
            scope = "p"
        mark = {
            "ph": "i",
            "name": name,
            "pid": event.node,
            "tid": max(event.rank, 0),
            "ts": _micros(at),
            "s": scope,
        }
        yield {**mark, "args": event.data}


def _slice(
    name: str, start: float, seconds: float, process: int, thread: int, more: JsonObject
) -> JsonObject:
    shown = {
        "ph": "X",
        "name": name.replace("_", " "),
        "pid": process,
        "tid": thread,
        "cat": "ebbflow",
    }
    return {**shown, "ts": _micros(start), "dur": _micros(max(seconds, 0.0)), "args": more}


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)


def _identify(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _attribute(value: Any) -> JsonObject:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float) and math.isfinite(value):
        return {"doubleValue": value}
    if value is None:
        return {}
    return {"stringValue": str(value)}


def _write(arguments: argparse.Namespace) -> int:
    events = read_job(arguments.job, arguments.store)
    if arguments.otlp is not None:
        spans = build_spans(events)
        send_spans(arguments.otlp, events[0].job, spans)
        print(f"{len(spans):,} spans sent to {arguments.otlp}, trace {spans[0]['traceId']}")
        return 0
    trace = build_trace(events)
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    out = arguments.out or Path(f"{events[0].job}.trace.json")
    if str(out) == "-":
        sys.stdout.write(f"{text}\n")
        return 0
    try:
        out.write_text(text)
    except OSError as error:
        print(f"{out} cannot be written: {error}", file=sys.stderr)
        return 1
    print(
        f"{out}: {len(trace['traceEvents']):,} events, {len(text) / 1e6:.1f} MB; open it at "
        "https://ui.perfetto.dev"
    )
    return 0

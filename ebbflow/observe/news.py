"""News about a job for notification channels: start, notices, failures and budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebbflow.core.event_payloads import BudgetPayload, NoticePayload
from ebbflow.core.events import COMMIT, PREPARED, Event, is_event, select_events
from ebbflow.core.terms import BUDGET_THRESHOLDS
from ebbflow.cost.amounts import format_usd
from ebbflow.cost.report.report import RunReport


class News(NamedTuple):
    """A one-line message about a job, for notification channels."""

    key: str  # a message with the same key is not sent twice
    t_wall: float
    text: str


def list_news(events: Sequence[Event], report: RunReport) -> Iterator[News]:
    """Yield all messages about a job so far, from its events and its report.

    The events are in order of their wall time.
    """
    yield from _list_event_news(events, report)
    yield from _list_failure_news(report)
    yield from _list_budget_news(events, report)


def _list_event_news(events: Sequence[Event], report: RunReport) -> Iterator[News]:
    step = 0  # of the newest commit before the event
    for event in events:
        if event.name == COMMIT:
            step = max(step, event.step or 0)
        if event.name == PREPARED:
            if step:
                words = f"starts again after the commit of step {step:,}"
            else:
                words = "starts"
            yield News(
                f"start:{event.t_wall:.3f}", event.t_wall, f"{words}{_describe_capacity(report)}"
            )
        elif is_event(event, NoticePayload) and event.payload.source:
            notice = event.payload
            if notice.seconds_left is None:
                time_left = ""
            else:
                time_left = f", {notice.seconds_left:.0f} s left"
            words = f"notice ({notice.source}, {notice.action or 'unknown'}) to node {event.node}"
            yield News(
                f"notice:{event.generation}:{event.node}:{notice.source}:{notice.action}",
                event.t_wall,
                f"{words}{time_left}; response: {notice.does or 'unknown'}",
            )


def _list_failure_news(report: RunReport) -> Iterator[News]:
    for failure in report.events.get("failures") or []:
        if failure["culprit"]:
            culprit = f" ({failure['culprit']})"
        else:
            culprit = ""
        key = f"failure:{failure['generation']}:{failure['what']}"
        yield News(
            key,
            failure["t_wall"],
            f"interruption: {str(failure['what']).replace('_', ' ')}{culprit}",
        )


def _list_budget_news(events: Sequence[Event], report: RunReport) -> Iterator[News]:
    budget = float(report.progress.get("budget_usd") or math.inf)
    spent = float(report.total_usd)
    stopped = any(  # a job stops while the money for its last save is left
        event.payload.threshold >= 1 and event.payload.budget_usd == budget
        for event in select_events(events, BudgetPayload)
    )
    for share in BUDGET_THRESHOLDS:
        if spent >= share * budget or (share == 1 and stopped):
            text = f"{share:.0%} of the budget {format_usd(budget)} is spent: {format_usd(spent)}"
            if spent < share * budget:
                text = (
                    f"the job stops within its budget {format_usd(budget)}: {format_usd(spent)} "
                    "is spent"
                )
            yield News(f"budget:{share}:{budget}", events[-1].t_wall, text)


def _describe_capacity(report: RunReport) -> str:
    chosen = None if report.plan is None else report.plan["chosen"]
    if not chosen:
        return ""
    place = chosen.get("zone") or chosen.get("region") or ""
    expected = chosen.get("expected_usd")
    if expected:
        cost = f", about {format_usd(expected)} (estimated)"
    else:
        cost = ""
    market = str(chosen["market"]).replace("_", "-")
    if (report.plan or {}).get("simulated"):
        simulated = ", simulated"
    else:
        simulated = ""
    return (
        f" on {chosen.get('nodes') or 1} × {chosen['instance_type']} {market} {place}".rstrip()
        + cost
        + simulated
    )

"""One `RunReport` from a job's events. Every renderer and the JSON show these numbers and no others.

It works on any part of a log that begins at its beginning: a job that failed, was killed or is still going on has a
report too, with its first failure first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ebbflow.cost.amounts import USD_DECIMALS, round_amount
from ebbflow.cost.capacity.placement import read_attempts
from ebbflow.cost.errors import LedgerError, ReportError
from ebbflow.cost.ledger.generations import RecordedGeneration, find_final_outcome, find_later_refusal, read_generations
from ebbflow.cost.ledger.ledger import Ledger, LedgerLine, fold
from ebbflow.cost.ledger.timeline import MICRO
from ebbflow.cost.report.figures import compute_actual_figures, compute_money_figures
from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import (
    BATCH_ATTEMPT,
    BUDGET,
    CERTIFICATE,
    CONFIGURED,
    FAULT_DETECTED,
    FAULT_INJECTED,
    GENERATION_ENDED,
    GUARD,
    NOTICE,
    OUTCOME,
    PLAN,
    PREFLIGHT,
    RESTORE,
    ROLLBACK,
    STEP,
    Event,
    LedgerClass,
)
from ebbflow.infra.segments import Damage

if TYPE_CHECKING:
    import pandas


SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The numbers of a job. Field names are the public contract of report.json; dollars are Decimal with six places.

    interruptions: generations that ended unplanned, whatever the cause; failures: those that our or the user's code
    caused. redone_steps: step executions thrown away. loss_curve: [step, loss], a redone step with the loss of its
    last execution, None where the loss was not finite. savings_usd: the useful step time alone at the
    on-demand price, less the total; negative when everything else cost more than the market saved; None without a
    price. plan: what was expected; actual: what came of it.
    events: counts by name, failures (first one first), notable events, damage (parts of the event log that are lost),
    generations (the step it went on from, the last one it took, its paid rank-seconds, its end). configuration: each
    key with its value and its source (default, file:line, environment or --set); empty where nobody recorded it. money:
    owner, project, forecast, dollars by cause and hindsight (`cost.report.figures`); empty in reports written
    before there was one.
    running: the launcher that runs the job now (since_utc, host, user, pid, command, heartbeat_age_seconds); outcome
    and exit code are then None, and all figures are so far.
    """

    job: str
    outcome: Outcome | None
    interruptions: int
    failures: int
    redone_steps: int
    weights_sha256: str | None
    loss_curve: list[tuple[int, float | None]]
    ledger: tuple[LedgerLine, ...]
    total_usd: Decimal
    paid_microseconds: int
    savings_usd: Decimal | None
    plan: dict[str, Any] | None
    actual: dict[str, Any]
    events: dict[str, Any]
    configuration: list[dict[str, Any]] = field(default_factory=list)
    money: dict[str, Any] = field(default_factory=dict)
    running: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int | None:
        return None if self.outcome is None else self.outcome.exit_code

    @property
    def state(self) -> str:
        """The outcome, or "running"."""
        return "running" if self.outcome is None else str(self.outcome)

    @property
    def paid_rank_seconds(self) -> float:
        return self.paid_microseconds / MICRO

    def to_json(self) -> dict[str, Any]:
        """Plain JSON without NaN. Dollars are numbers with at most six decimals, so their shortest form is exact."""
        return _finite(
            {
                "schema": SCHEMA,
                "job": self.job,
                "outcome": None if self.outcome is None else str(self.outcome),
                "exit_code": self.exit_code,
                "interruptions": self.interruptions,
                "failures": self.failures,
                "redone_steps": self.redone_steps,
                "weights_sha256": self.weights_sha256,
                "loss_curve": [list(point) for point in self.loss_curve],
                "ledger": [_line_json(line) for line in self.ledger],
                "total_usd": float(self.total_usd),
                "paid_rank_seconds": self.paid_rank_seconds,
                "savings_usd": None if self.savings_usd is None else float(self.savings_usd),
                "plan": self.plan,
                "actual": self.actual,
                "events": self.events,
                "configuration": self.configuration,
                "money": self.money,
                "running": self.running,
            }
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunReport:
        """The inverse of `to_json`. Raises ReportError for another schema."""
        if data.get("schema") != SCHEMA:
            raise ReportError(f"report schema {data.get('schema')!r}, this version reads {SCHEMA}")
        plain = ("job", "interruptions", "failures", "redone_steps", "weights_sha256", "plan", "actual", "events")
        return cls(
            **{name: data[name] for name in plain},
            configuration=data.get("configuration", []),  # reports before it was recorded have none
            money=data.get("money", {}),
            running=data.get("running"),
            outcome=None if data["outcome"] is None else Outcome(data["outcome"]),
            loss_curve=[(int(step), loss) for step, loss in data["loss_curve"]],
            ledger=tuple(_line_from_json(line) for line in data["ledger"]),
            total_usd=_usd(data["total_usd"]),
            paid_microseconds=round(data["paid_rank_seconds"] * MICRO),
            savings_usd=None if data["savings_usd"] is None else _usd(data["savings_usd"]),
        )


def build_report(
    events: Sequence[Event], *, running: dict[str, Any] | None = None, damage: Sequence[Damage] = ()
) -> RunReport:
    """The report of a job from its events, in any order.

    running: the launcher that runs the job now (`RunReport.running`), None where the job has ended. damage: of its log
    (`ebbflow.infra.events.read_log`), which the report names. Raises ReportError without any event, LedgerError for
    contradictory ones.
    """
    if not events:
        raise ReportError("no events: nothing of this job was recorded")
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    done = find_final_outcome(ordered)
    if done is not None and find_later_refusal(ordered) is not None:  # the job did not run with the refused settings
        ordered = [event for event in ordered if event.name != CONFIGURED or event.run == done.run]
    generations = read_generations(ordered, running=running is not None)
    ledger = _fold(ordered, running is not None, damage)
    outcome_event = find_final_outcome(ordered)
    plan = next((event.data for event in reversed(ordered) if event.name == PLAN), None)
    unplanned = [generation for generation in generations.values() if generation.unplanned]
    outcome = None if running else _outcome(ordered, generations)
    return RunReport(
        job=ordered[0].job,
        outcome=outcome,
        interruptions=len(unplanned),
        failures=sum(generation.user_code for generation in unplanned),
        redone_steps=ledger.redone_steps,
        weights_sha256=None if outcome_event is None else outcome_event.data.get("weights_sha256"),
        loss_curve=read_loss_curve(ordered),
        ledger=ledger.lines,
        total_usd=ledger.total_usd,
        paid_microseconds=ledger.paid_microseconds,
        savings_usd=_savings(ledger),
        plan=None if plan is None else _plan_summary(plan),
        actual=compute_actual_figures(ordered, generations, ledger),
        events={
            "counts": _counts(ordered),
            "failures": list_failures(ordered, generations),
            "notable": list_notable_events(ordered),
            "generations": _generation_lines(ordered, generations, ledger),
            "run": ordered[-1].run,
            "damage": [{"segment": one.segment, "line": one.line, "what": one.what} for one in damage],
            "message": None if running else _message(ordered),
            "refused": _refused(ordered),
            "certificate": next((event.data for event in reversed(ordered) if event.name == CERTIFICATE), None),
        },
        configuration=next((event.data["settings"] for event in reversed(ordered) if event.name == CONFIGURED), []),
        money=compute_money_figures(ordered, generations, ledger),
        running=running,
    )


def _fold(events: Sequence[Event], running: bool, damage: Sequence[Damage]) -> Ledger:
    """The ledger. A LedgerError names the damage of the log, which is the likely cause."""
    try:
        return fold(events, running=running)
    except LedgerError as error:
        if not damage:
            raise
        places = "".join(f"\n  damage: {one.text}" for one in damage[:10])
        raise LedgerError(f"{error}\n  the event log is damaged in {len(damage)} places{places}") from error


def read_loss_curve(events: Sequence[Event]) -> list[tuple[int, float | None]]:
    """(step, training loss) by step. All ranks know the same loss; a redone step shows its last execution."""
    latest: dict[int, tuple[int, float | None]] = {}
    for event in events:
        if event.name != STEP or event.step is None or "loss" not in event.data:
            continue
        if event.step in latest and latest[event.step][0] > event.generation:
            continue
        latest[event.step] = (event.generation, _finite(event.data["loss"]))
    return [(step, latest[step][1]) for step in sorted(latest)]


def _generation_lines(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> list[dict[str, Any]]:
    return [
        {
            "generation": generation.number,
            "from_step": generation.parent_step,
            "last_step": max((event.step or 0 for event in events if _is_step_of(event, generation)), default=None),
            "paid_rank_seconds": sum(
                bill.rank_microseconds for bill in ledger.nodes if bill.node.generation == generation.number
            )
            / MICRO,
            "ended": generation.reason,
            "culprit": generation.culprit,
        }
        for generation in generations.values()
    ]


def _is_step_of(event: Event, generation: RecordedGeneration) -> bool:
    return event.name == STEP and event.generation == generation.number


def _outcome(events: list[Event], generations: dict[int, RecordedGeneration]) -> Outcome:
    """How the job ended: what was recorded last, else what the last thing recorded means."""
    recorded = find_final_outcome(events)
    if recorded is not None:
        return Outcome(recorded.data["outcome"])
    newest = generations[max(generations)] if generations else None
    if newest is not None:
        if newest.planned:
            return Outcome(newest.reason)
        return Outcome.FAILED if newest.user_code else Outcome.INTERRUPTED
    plan = next((event.data for event in reversed(events) if event.name == PLAN), None)
    if plan is not None and plan.get("refusal"):
        return Outcome(plan["refusal"]["outcome"])
    if plan is None and any(_is_refusal(event) for event in events):
        return Outcome.PREFLIGHT
    return Outcome.INTERRUPTED


def _is_refusal(event: Event) -> bool:
    """A preflight that forbade the run; one that passed, and no plan after it, is a run that was interrupted."""
    results = event.data.get("results") or [] if event.name == PREFLIGHT else []
    return any(result.get("status") == "failed" and result.get("severity") == "error" for result in results)


def _refused(events: Sequence[Event]) -> dict[str, str] | None:
    """Run and outcome of the last run of a completed job, where its checks refused it; None: they did not."""
    refused = find_later_refusal(events)
    return None if refused is None else {"run": refused.run, "outcome": refused.data["outcome"]}


def _message(events: Sequence[Event]) -> str | None:
    """Of the outcome, and that a run after it was refused."""
    recorded, refused = find_final_outcome(events), find_later_refusal(events)
    message = None if recorded is None else recorded.data.get("message")
    if refused is None:
        return message
    why = f"run {refused.run} was refused ({refused.data['outcome']}: {refused.data.get('message')})"
    return "; ".join(filter(None, [message, f"{why}, and the job stays as it was"]))


def _savings(ledger: Ledger) -> Decimal | None:
    """The useful work alone at the on-demand price, less the total. Without a completed step there are none."""
    return None if ledger.useful_on_demand_usd is None else round_amount(ledger.useful_on_demand_usd - ledger.total_usd)


def _plan_summary(plan: dict[str, Any]) -> dict[str, Any]:
    """What the report keeps of a plan: the decision, not the hundreds of pools that it was made from."""
    dropped = {"ranked", "rejected"}
    summary = {name: value for name, value in plan.items() if name not in dropped}
    counts = plan.get("counts") or {"ranked": len(plan.get("ranked", [])), "": len(plan.get("rejected", []))}
    return {**summary, "ranked": counts["ranked"], "rejected": sum(counts.values()) - counts["ranked"]}


def _counts(events: Sequence[Event]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in events:
        counts[event.name] = counts.get(event.name, 0) + 1
    return dict(sorted(counts.items()))


def _line_json(line: LedgerLine) -> dict[str, Any]:
    return {
        "class": str(line.ledger_class),
        "rank_seconds": line.rank_seconds,
        "usd": float(line.usd),
        "kind": line.kind,
    }


def _line_from_json(data: dict[str, Any]) -> LedgerLine:
    return LedgerLine(
        ledger_class=LedgerClass(data["class"]),
        rank_microseconds=round(data["rank_seconds"] * MICRO),
        usd=_usd(data["usd"]),
        kind=data["kind"],
    )


def _usd(number: float) -> Decimal:
    return round_amount(Decimal(str(number)), USD_DECIMALS)


def _finite(value: Any) -> Any:
    """The same value with None for NaN and infinities, which JSON and web pages cannot carry."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


_NOTABLE = {BUDGET, FAULT_DETECTED, FAULT_INJECTED, GENERATION_ENDED, GUARD, NOTICE, OUTCOME}


def list_failures(events: Sequence[Event], generations: dict[int, RecordedGeneration]) -> list[dict[str, Any]]:
    """{seconds, generation, what, culprit} of each failure, by time; seconds count from the first event.

    A failure is a generation that ended unplanned, a job of AWS Batch that did not succeed, a failed check, a refused
    plan, a commit that could not be restored, or a store that was restored from an older snapshot.
    """
    found = [_cut_short(events, generation) for generation in generations.values() if generation.unplanned]
    causes = {attempt.job_id: attempt.cause for attempt in read_attempts(events).attempts}
    for event in events:
        found += _other(event)
    last = {str(event.data.get("job_id")): event for event in events if event.name == BATCH_ATTEMPT}  # of each job
    for event in last.values():
        found += _of_batch(event, causes)
    start = min((event.t_wall for event in events), default=0.0)
    found.sort(key=lambda failure: failure["t_wall"])
    return [{"seconds": failure["t_wall"] - start, **failure} for failure in found]


def list_notable_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """{seconds, generation, name, step, text} of the events that a reader wants to see, by time."""
    start = min((event.t_wall for event in events), default=0.0)
    return [
        {
            "seconds": event.t_wall - start,
            "generation": event.generation,
            "name": event.name,
            "step": event.step,
            "text": ", ".join(f"{key} {value}" for key, value in event.data.items() if value not in (None, "")),
        }
        for event in events
        if event.name in _NOTABLE or (event.name == RESTORE and event.data.get("rejected"))
    ]


def _cut_short(events: Sequence[Event], generation: RecordedGeneration) -> dict[str, Any]:
    """Dated by its first sign: the detected fault, else the recorded end, else the last thing heard of it."""
    mine = [event for event in events if event.generation == generation.number]
    detected = next((event for event in mine if event.name == FAULT_DETECTED), None)
    ended = next((event for event in mine if event.name == GENERATION_ENDED), None)
    sign = detected or ended
    culprit = str(detected.data.get("culprit") or "") if detected is not None else ""
    notice = next((event for event in mine if event.name == NOTICE and event.data.get("does") == "leave"), None)
    told = (
        "" if notice is None else f"node {notice.node} had a notice by {notice.data['source']}: {notice.data['action']}"
    )
    what = generation.reason or "no end recorded: killed or lost"
    return _failure(
        generation.ended_wall if sign is None else sign.t_wall,
        generation.number,
        f"generation {generation.number}: {what}",
        culprit or generation.culprit or told,
    )


def _other(event: Event) -> list[dict[str, Any]]:
    if event.name == PREFLIGHT:
        return [
            _failure(event.t_wall, event.generation, f"preflight: {result.get('title') or result.get('id')}",
                     str(result.get("detail") or ""))
            for result in event.data.get("results", [])
            if isinstance(result, dict) and result.get("status") == "failed" and result.get("severity") != "warning"
        ]  # fmt: skip
    if event.name == PLAN and event.data.get("refusal"):
        refusal = event.data["refusal"]
        return [_failure(event.t_wall, event.generation, f"plan refused: {refusal['outcome']}", refusal["message"])]
    if event.name == RESTORE:
        return [
            _failure(event.t_wall, event.generation, f"commit {rejected.get('key')} rejected",
                     str(rejected.get("reason")) + (f"; lost: {rejected['lost']}" if "lost" in rejected else ""))
            for rejected in event.data.get("rejected") or []
        ]  # fmt: skip
    if event.name == ROLLBACK:
        has = f"goes on from step {event.data.get('found_step')}" if event.data.get("found_key") else "begins anew"
        what = f"the store was restored from an older snapshot: the commit of step {event.step} is missing"
        return [_failure(event.t_wall, event.generation, what, f"accepted with --accept-rollback; the job {has}")]
    return []


def _of_batch(event: Event, causes: Mapping[str, str]) -> list[dict[str, Any]]:
    """causes: by the job's id, as the agents' events correct Batch's."""
    cause = causes.get(str(event.data.get("job_id"))) or str(event.data.get("cause") or "unknown")
    if cause == "ended":
        return []
    at = min(event.t_wall, event.data.get("stopped_utc") or event.t_wall)
    what = f"Batch job in queue {event.data.get('queue') or '?'}: {cause.replace('_', ' ')}"
    return [_failure(at, event.generation, what, str(event.data.get("reason") or ""))]


def _failure(t_wall: float, generation: int, what: str, culprit: str) -> dict[str, Any]:
    return {"t_wall": t_wall, "generation": generation, "what": what, "culprit": culprit}


def loss_frame(report: RunReport) -> pandas.DataFrame:
    """Columns step (int), loss (float, NaN where it was not finite)."""
    import pandas

    steps = [step for step, _ in report.loss_curve]
    losses = [loss for _, loss in report.loss_curve]
    return pandas.DataFrame({"step": pandas.Series(steps, dtype="int64"), "loss": pandas.Series(losses, dtype="float")})


def ledger_frame(report: RunReport) -> pandas.DataFrame:
    """Columns class, rank_seconds, usd (Decimal, so that the column's sum is exactly the total), kind."""
    import pandas

    rows = [(str(line.ledger_class), line.rank_seconds, line.usd, line.kind) for line in report.ledger]
    return pandas.DataFrame(rows, columns=["class", "rank_seconds", "usd", "kind"])


def events_frame(events: Sequence[Event]) -> pandas.DataFrame:
    """One row per event, its fields as columns; `data` stays a dictionary."""
    import pandas

    return pandas.DataFrame([vars(event) for event in events], columns=list(Event.__dataclass_fields__))

"""Report of a job, built from its events. All renderers and report.json show the same numbers.

The events may be any prefix of the log: a job that failed, was killed or is still running has a
report too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, cast

import ebbflow.core.events as ev
from ebbflow.core.config.load import SettingRow
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import BatchAttemptPayload, OutcomePayload
from ebbflow.core.events import Event, LedgerClass, select_events, without_nan
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.launchers import RunningJob
from ebbflow.core.rank_logs import LogLine, NativeWarnings
from ebbflow.core.segments import Damage
from ebbflow.cost.amounts import round_amount
from ebbflow.cost.capacity.placement import read_attempts
from ebbflow.cost.errors import LedgerError, ReportError
from ebbflow.cost.ledger.generations import (
    RecordedGeneration,
    find_final_outcome,
    find_last,
    find_later_refusal,
    read_generations,
)
from ebbflow.cost.ledger.ledger import Ledger, LedgerLine, fold
from ebbflow.cost.ledger.pricing import select_plans
from ebbflow.cost.ledger.timeline import MICRO
from ebbflow.cost.plan_json import PlanJson, PlanSummary
from ebbflow.cost.report.charts import build_charts, compute_progress, find_kept_steps
from ebbflow.cost.report.figures import (
    STEP_COLUMNS,
    compute_actual_figures,
    compute_money_figures,
    list_step_figures,
)
from ebbflow.cost.report.parts import (
    ActualFigures,
    CertificateRow,
    Charts,
    CheckRow,
    EventFigures,
    Failure,
    GenerationRow,
    LastOutput,
    MoneyFigures,
    NotableEvent,
    ProgressFigures,
    PromiseRow,
    ReportJson,
    RootCause,
)
from ebbflow.diagnose.bundle import redact
from ebbflow.diagnose.job import diagnose_job

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
_FIELDS = (  # of report.json; old reports lack the last five
    "schema",
    "job",
    "outcome",
    "exit_code",
    "interruptions",
    "failures",
    "redone_steps",
    "weights_sha256",
    "loss_curve",
    "ledger",
    "total_usd",
    "paid_rank_seconds",
    "savings_usd",
    "plan",
    "actual",
    "events",
    "configuration",
    "money",
    "progress",
    "charts",
    "running",
)
_EVIDENCE = (
    "rank",
    "step",
    "phase",
    "where",
    "because",
    "certainty",
    "cascades",
    "dump",
    "next_action",
    "usd_lost",
)
_TRACEBACK = "Traceback (most recent call last)"
_FEW_LINES = 15
_MOST_LINES = 60
_LONGEST_LINE = 400
_NOTABLE = {
    ev.BUDGET,
    ev.FAULT_DETECTED,
    ev.FAULT_INJECTED,
    ev.GENERATION_ENDED,
    ev.GUARD,
    ev.NOTICE,
    ev.OUTCOME,
}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Figures of a job. The field names are the public contract of report.json."""

    job: str
    outcome: Outcome | None  # outcome of the job; None while it is running
    interruptions: int  # number of generations with an unplanned end, whatever the cause
    failures: (
        int  # number of these interruptions that were caused by Ebbflow's code or the user's code
    )
    redone_steps: int  # number of executed steps whose result was discarded
    weights_sha256: str | None
    # pairs (step, loss), ordered by step. A redone step has the loss of its last execution; a
    # non-finite loss is None.
    loss_curve: list[tuple[int, float | None]]
    ledger: tuple[LedgerLine, ...]  # paid time and dollars by class
    total_usd: Decimal  # total cost, with six decimals like all dollar amounts of a report
    paid_microseconds: int
    # the cost of the same machines on demand (`Ledger.same_on_demand_usd`), less `total_usd`; None if
    # that price is unknown. It is negative if interruptions cost more than the cheaper market saved.
    savings_usd: Decimal | None
    plan: PlanSummary | None  # the newest plan
    actual: ActualFigures  # measured figures (`cost.report.figures.compute_actual_figures`)
    # number of events by name, failures and notable events ordered by time, damage to the event
    # log, and generations (parent step, last step, paid rank-seconds, end)
    events: EventFigures
    # each key with its value and source (default, file:line, environment or --set); empty if it was
    # not recorded
    configuration: list[SettingRow] = field(default_factory=list)
    # owner, forecast, dollars by cause and hindsight (`cost.report.figures.compute_money_figures`);
    # empty in old reports
    money: MoneyFigures = field(default_factory=MoneyFigures)
    # steps, estimated end and cost, and the work that killing the job now would lose
    # (`cost.report.charts.compute_progress`)
    progress: ProgressFigures = field(default_factory=ProgressFigures)
    # series, marks, lanes and ranks for plots (`cost.report.charts.build_charts`); empty in old
    # reports
    charts: Charts = field(default_factory=Charts)
    # the launcher that is running the job (since_utc, host, user, pid, command,
    # heartbeat_age_seconds); None if the job is not running
    running: RunningJob | None = None

    def __getitem__(self, name: str) -> Json:
        """Return a field as a JSON value.

        The artifact `run_report` was a dictionary in older releases.
        """
        return cast(JsonObject, self.to_json())[name]

    def __reduce__(self) -> tuple[Callable[[ReportJson], RunReport], tuple[ReportJson]]:
        """Pickle the report as JSON, so that other versions of Ebbflow can read the artifact
        `run_report`.
        """
        return RunReport.from_json, (self.to_json(),)

    @property
    def exit_code(self) -> int | None:
        if self.outcome is None:
            return None
        return self.outcome.exit_code

    @property
    def state(self) -> str:
        """The outcome or, while the job runs, its phase: starting, running or restarting."""
        if self.outcome is None:
            return str(self.progress.get("phase") or "running")
        return str(self.outcome)

    @property
    def paid_rank_seconds(self) -> float:
        return self.paid_microseconds / MICRO

    def to_json(self) -> ReportJson:
        """Convert to JSON values without NaN. Dollars are rounded to six decimals."""
        ledger = [
            {
                "class": str(line.ledger_class),
                "rank_seconds": line.rank_seconds,
                "usd": float(line.usd),
                "kind": line.kind,
            }
            for line in self.ledger
        ]
        values = vars(self) | {"schema": SCHEMA, "exit_code": self.exit_code, "ledger": ledger}
        values |= {
            "outcome": self.outcome and str(self.outcome),
            "paid_rank_seconds": self.paid_rank_seconds,
        }
        values["total_usd"] = float(self.total_usd)
        if self.savings_usd is None:
            values["savings_usd"] = None
        else:
            values["savings_usd"] = float(self.savings_usd)
        return without_nan({name: values[name] for name in _FIELDS})

    @classmethod
    def from_json(cls, data: ReportJson) -> RunReport:
        """Restore a report from the result of `to_json`.

        Raises:
            ReportError: The data has another schema version.
        """
        if data.get("schema") != SCHEMA:
            raise ReportError(f"report schema {data.get('schema')!r}, this version reads {SCHEMA}")
        ledger = [
            LedgerLine(
                ledger_class=LedgerClass(line["class"]),
                rank_microseconds=round(line["rank_seconds"] * MICRO),
                usd=_parse_usd(line["usd"]),
                kind=line["kind"],
            )
            for line in data["ledger"]
        ]
        outcome = data["outcome"]
        savings_usd = data["savings_usd"]
        return cls(
            job=data["job"],
            outcome=None if outcome is None else Outcome(outcome),
            interruptions=data["interruptions"],
            failures=data["failures"],
            redone_steps=data["redone_steps"],
            weights_sha256=data["weights_sha256"],
            loss_curve=[(int(step), loss) for step, loss in data["loss_curve"]],
            ledger=tuple(ledger),
            total_usd=_parse_usd(data["total_usd"]),
            paid_microseconds=round(data["paid_rank_seconds"] * MICRO),
            savings_usd=None if savings_usd is None else _parse_usd(savings_usd),
            plan=data["plan"],
            actual=data["actual"],
            events=data["events"],
            configuration=data.get("configuration", []),
            money=data.get("money", {}),
            progress=data.get("progress", {}),
            charts=data.get("charts", {}),
            running=data.get("running"),
        )


def build_report(
    events: Sequence[Event],
    *,
    running: RunningJob | None = None,
    damage: Sequence[Damage] = (),
    logs: Callable[[], Iterable[LogLine]] = tuple,
) -> RunReport:
    """Build the report of a job from its events, in any order.

    Args:
        running: The launcher that is running the job (`RunReport.running`); None if the job has
            ended.
        damage: Damage to the event log, from `ebbflow.core.events.read_log`. The report lists it.
        logs: Function that returns the output of the ranks. It is called only if something failed.

    Raises:
        ReportError: There are no events.
        LedgerError: The events contradict each other.
    """
    if not events:
        raise ReportError("no events: nothing of this job was recorded")
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    final = find_final_outcome(ordered)
    refusal = find_later_refusal(ordered)
    # The job did not run with the settings of the refused run
    if final is not None and refusal is not None:
        ordered = [
            event for event in ordered if event.name != ev.CONFIGURED or event.run == final.run
        ]
    generations = read_generations(ordered, running=running is not None)
    ledger = _fold(ordered, running is not None, damage)
    plan = find_last(ordered, ev.PLAN)
    configured = find_last(ordered, ev.CONFIGURED)
    unplanned = [generation for generation in generations.values() if generation.unplanned]
    counts = Counter(event.name for event in ordered)
    usual_usd = ledger.same_on_demand_usd
    charts = build_charts(ordered, generations, ledger)
    failures = list_failures(ordered, generations)
    if failures:
        output = list(logs())
    else:
        output = []
    promise = find_last(ordered, ev.PROMISE)
    certificate = find_last(ordered, ev.CERTIFICATE)
    kept = find_kept_steps(ordered, generations)  # all ranks record the same loss
    return RunReport(
        job=ordered[0].job,
        outcome=None if running else _infer_outcome(ordered, generations),
        interruptions=len(unplanned),
        failures=sum(generation.user_code for generation in unplanned),
        redone_steps=ledger.redone_steps,
        weights_sha256=None if final is None else final.payload.weights_sha256,
        loss_curve=[
            (event.step or 0, without_nan(event.payload.loss))
            for event in kept
            if event.payload.loss is not None
        ],
        ledger=ledger.lines,
        total_usd=ledger.total_usd,
        paid_microseconds=ledger.paid_microseconds,
        savings_usd=None if usual_usd is None else round_amount(usual_usd - ledger.total_usd),
        plan=None if plan is None else _summarise_plan(plan, ordered),
        actual=compute_actual_figures(ordered, generations, ledger),
        events={
            "counts": dict(sorted(counts.items())),
            "failures": failures,
            "finding": _find_root(ordered, output) if failures else None,
            "stack": _find_stack(find_deciding_failure(failures), output),
            "notable": list_notable_events(ordered),
            "generations": _list_generations(ordered, generations, ledger),
            "run": ordered[-1].run,
            "damage": [
                {"segment": flaw.segment, "line": flaw.line, "what": flaw.what} for flaw in damage
            ],
            "message": None if running else _make_message(final, refusal),
            "refused": None
            if refusal is None
            else {"run": refusal.run, "outcome": str(refusal.payload.outcome)},
            "promise": None if promise is None else cast(PromiseRow, promise.data),
            "checks": _list_checks(ordered),
            "certificate": None if certificate is None else cast(CertificateRow, certificate.data),
        },
        configuration=[] if configured is None else configured.data["settings"],
        money=compute_money_figures(ordered, generations, ledger),
        progress=compute_progress(
            ordered, charts, ledger, generations, running=running is not None
        ),
        charts=charts,
        running=running,
    )


def find_deciding_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure of the last failed generation; None if there is no failure.

    The job survived all failures of earlier generations.
    """
    return next(
        (
            failure
            for failure in failures
            if failure.get("generation") == failures[-1].get("generation")
        ),
        None,
    )


def list_failures(
    events: Sequence[Event], generations: dict[int, RecordedGeneration]
) -> list[Failure]:
    """List the failures of a job by time as {seconds, t_wall, generation, what, culprit, evidence
    (if any)}.

    A failure is a generation with an unplanned end, a Batch job that did not succeed, a failed
    check, a refused plan, a commit that could not be restored, or a store that was restored from an
    older snapshot. Later failures usually follow from the first failure. `seconds` counts from the
    job's first event.
    """
    found = [
        _describe_interruption(events, generation)
        for generation in generations.values()
        if generation.unplanned
    ]
    for event in events:
        found += _describe_failures(event)
    causes = {attempt.job_id: attempt.cause for attempt in read_attempts(events).attempts}
    last = {event.payload.job_id: event for event in select_events(events, BatchAttemptPayload)}
    for job_id, event in last.items():
        attempt = event.payload
        cause = causes.get(job_id) or attempt.cause or "unknown"
        if cause != "ended":
            stopped = min(event.t_wall, attempt.stopped_utc or event.t_wall)
            where = f"Batch job in queue {attempt.queue or '?'}"
            if attempt.queue == "kubernetes":
                where = "pods on Kubernetes"
            what = f"{where}: {cause.replace('_', ' ')}"
            found.append(_failure(stopped, event.generation, what, attempt.reason or ""))
    start = min((event.t_wall for event in events), default=0.0)
    found.sort(key=lambda failure: failure["t_wall"])
    return [{**failure, "seconds": failure["t_wall"] - start} for failure in found]


def list_notable_events(events: Sequence[Event]) -> list[NotableEvent]:
    """List the events that a report shows individually, by time, as {seconds, generation, name,
    step, text}.
    """
    start = min((event.t_wall for event in events), default=0.0)
    return [
        {
            "seconds": event.t_wall - start,
            "generation": event.generation,
            "name": event.name,
            "step": event.step,
            "text": ", ".join(
                f"{key.replace('_', ' ')} {f'{value:.6g}' if isinstance(value, float) else value}"
                for key, value in event.data.items()
                if value not in (None, "")
            ),
        }
        for event in events
        if event.name in _NOTABLE or (event.name == ev.RESTORE and event.data.get("rejected"))
    ]


def loss_frame(report: RunReport) -> pandas.DataFrame:
    """Make a DataFrame with the columns step (int) and loss (float, NaN for a non-finite loss)."""
    import pandas

    steps = [step for step, _ in report.loss_curve]
    losses = [loss for _, loss in report.loss_curve]
    return pandas.DataFrame(
        {"step": pandas.Series(steps, dtype="int64"), "loss": pandas.Series(losses, dtype="float")}
    )


def ledger_frame(report: RunReport) -> pandas.DataFrame:
    """Make a DataFrame with the columns class, rank_seconds, usd and kind.

    `usd` is Decimal, so that sums are exact.
    """
    import pandas

    rows = [
        (str(line.ledger_class), line.rank_seconds, line.usd, line.kind) for line in report.ledger
    ]
    return pandas.DataFrame(rows, columns=["class", "rank_seconds", "usd", "kind"])


def throughput_frame(events: Sequence[Event]) -> pandas.DataFrame:
    """Make a DataFrame with one row per executed step (`cost.report.figures.list_step_figures`).

    NaN means unknown.
    """
    import pandas

    frame = pandas.DataFrame(list_step_figures(events), columns=list(STEP_COLUMNS))
    whole = {"step": "int64", "generation": "int64", "kept": "bool"}
    return frame.astype({name: whole.get(name, "float64") for name in STEP_COLUMNS})


def _find_stack(failure: Failure | None, output: Sequence[LogLine]) -> LastOutput | None:
    """Return the failed rank's last traceback with its causes, else its last few lines."""
    if failure is None:
        return None
    mine = [line for line in output if line.generation == failure.get("generation")]
    recorded = (failure.get("evidence") or {}).get("rank")
    rank = recorded if isinstance(recorded, int) else None
    rank = next(
        (line.rank for line in mine if rank is None and line.text.startswith(_TRACEBACK)), rank
    )
    texts = [*NativeWarnings().remove_from([line.text for line in mine if line.rank == rank])]
    starts = [at for at, text in enumerate(texts) if text.startswith(_TRACEBACK)]
    while len(starts) > 1 and any(
        " exception" in text for text in texts[max(0, starts[-1] - 3) : starts[-1]]
    ):
        starts.pop()  # this exception followed from the one before it
    shown = "\n".join((texts[starts[-1] :] if starts else texts[-_FEW_LINES:])[-_MOST_LINES:])
    lines = [text[:_LONGEST_LINE] for text in redact(shown)[0].split("\n")]  # reports are passed on
    if shown:
        return {"rank": rank, "lines": lines}
    return None


def _find_root(events: Sequence[Event], output: Sequence[LogLine]) -> RootCause | None:
    """Return the root cause that `ebbflow diagnose` finds, or None."""
    findings = diagnose_job(events, output).findings
    # What a job survived that ended well is history
    finding = next((finding for finding in findings if finding.role in ("root", "history")), None)
    if finding is None:
        return None
    root = finding.to_json()
    return {
        "symptom": root["symptom"],
        "title": root["title"],
        "family": root["family"],
        "confidence": root["confidence"],
        "fix": root["fix"],
    }


def _list_checks(events: Sequence[Event]) -> list[CheckRow]:
    """List the results of the newest preflight: title, status and detail."""
    newest = find_last(events, ev.PREFLIGHT)
    if newest is None:
        results = []
    else:
        results = newest.data.get("results") or []
    return [
        {
            "title": str(result["title"] or ""),
            "status": str(result.get("status") or ""),
            "detail": str(result.get("detail") or ""),
        }
        for result in results
        if "title" in result
    ]


def _fold(events: Sequence[Event], running: bool, damage: Sequence[Damage]) -> Ledger:
    """Compute the ledger from the events.

    The message of an error lists the damage to the log as its likely cause.
    """
    try:
        return fold(events, running=running)
    except LedgerError as error:
        if not damage:
            raise
        places = "".join(f"\n  damage: {flaw.text}" for flaw in damage[:10])
        raise LedgerError(
            f"{error}\n  the event log is damaged in {len(damage)} places{places}"
        ) from error


def _list_generations(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> list[GenerationRow]:
    steps: dict[int, int] = {}
    for event in events:
        if event.name == ev.STEP:
            steps[event.generation] = max(steps.get(event.generation, 0), event.step or 0)
    micros: Counter[int] = Counter()
    for bill in ledger.nodes:
        micros[bill.node.generation] += bill.rank_microseconds
    return [
        {
            "generation": generation.number,
            "from_step": generation.parent_step,
            "last_step": steps.get(generation.number),
            "paid_rank_seconds": micros[generation.number] / MICRO,
            "ended": generation.reason,
            "culprit": generation.culprit,
        }
        for generation in generations.values()
    ]


def _infer_outcome(events: list[Event], generations: dict[int, RecordedGeneration]) -> Outcome:
    """Return the recorded outcome of the job.

    If none was recorded, return the outcome that the last events imply.
    """
    recorded = find_final_outcome(events)
    if recorded is not None:
        return recorded.payload.outcome
    if generations:
        return _infer_from_generation(generations[max(generations)])
    plan = find_last(events, ev.PLAN)
    if plan is not None and plan.data.get("refusal"):
        return Outcome(plan.data["refusal"]["outcome"])
    checks = []
    for event in events:
        if event.name == ev.PREFLIGHT:
            checks.extend(event.data.get("results") or [])
    refused = any(
        check.get("status") == "failed" and check.get("severity") == "error" for check in checks
    )
    # A run that passed preflight and made no plan was interrupted.
    if plan is None and refused:
        return Outcome.PREFLIGHT
    return Outcome.INTERRUPTED


def _infer_from_generation(newest: RecordedGeneration) -> Outcome:
    if newest.planned:
        return Outcome(newest.reason)
    if newest.user_code:
        return Outcome.FAILED
    return Outcome.INTERRUPTED


def _make_message(
    final: Event[OutcomePayload] | None, refusal: Event[OutcomePayload] | None
) -> str | None:
    """Return the outcome's message, with a note if preflight refused a later run."""
    if final is None:
        message = None
    else:
        message = final.payload.message
    if refusal is None:
        return message
    why = f"run {refusal.run} was refused ({refusal.payload.outcome}: {refusal.payload.message})"
    return "; ".join(filter(None, [message, f"{why}, and the job stays as it was"]))


def _summarise_plan(newest: Event, events: Sequence[Event]) -> PlanSummary:
    """Return the newest plan with the lists of ranked and rejected pools replaced by their lengths.

    The cheapest on-demand pool is that of the job's first plan, which is about the whole job.
    """
    plan = cast(PlanJson, newest.data)
    summary = {name: value for name, value in plan.items() if name not in ("ranked", "rejected")}
    chosen = select_plans(events)
    if chosen:
        cheapest = cast(PlanJson, chosen[0].data).get("cheapest_on_demand")
        if cheapest:
            summary["cheapest_on_demand"] = cheapest
    counts = plan.get("counts") or {
        "ranked": len(plan.get("ranked", [])),
        "": len(plan.get("rejected", [])),
    }
    ranked = counts["ranked"]
    rejected = sum(counts.values()) - ranked
    return cast(PlanSummary, {**summary, "ranked": ranked, "rejected": rejected})


def _parse_usd(number: float) -> Decimal:
    return round_amount(Decimal(str(number)))


def _describe_interruption(events: Sequence[Event], generation: RecordedGeneration) -> Failure:
    """Describe the unplanned end of a generation as a failure.

    The failure's time is the time of the detected fault. If no fault was detected, it is the
    recorded end of the generation, else the generation's last event.
    """
    mine = [event for event in events if event.generation == generation.number]
    detected = next((event for event in mine if event.name == ev.FAULT_DETECTED), None)
    sign = detected or next((event for event in mine if event.name == ev.GENERATION_ENDED), None)
    if detected is None:
        culprit = ""
    else:
        culprit = str(detected.data.get("culprit") or "")
    notice = next(
        (event for event in mine if event.name == ev.NOTICE and event.data.get("does") == "leave"),
        None,
    )
    if notice is None:
        noticed = ""
    else:
        noticed = (
            f"node {notice.node} had a notice by {notice.data['source']}: {notice.data['action']}"
        )
    found = _failure(
        generation.ended_wall if sign is None else sign.t_wall,
        generation.number,
        f"generation {generation.number}: {generation.reason or 'no end recorded: killed or lost'}",
        culprit or generation.culprit or noticed,
    )
    if detected is None:
        known = {}
    else:
        known = {name: detected.data.get(name) for name in _EVIDENCE}
    evidence = {name: value for name, value in known.items() if value not in (None, "", [])}
    if evidence:
        return {**found, "evidence": evidence}
    return found


def _describe_failures(event: Event) -> list[Failure]:
    """Return the failures recorded in one preflight, plan, restore or rollback event; empty for
    other events.
    """

    def failure(what: str, culprit: str) -> Failure:
        return _failure(event.t_wall, event.generation, what, culprit)

    if event.name == ev.PREFLIGHT:
        return [
            failure(
                f"preflight: {result.get('title') or result.get('id')}",
                str(result.get("detail") or ""),
            )
            for result in event.data.get("results", [])
            if isinstance(result, dict)
            and result.get("status") == "failed"
            and result.get("severity") != "warning"
        ]
    if event.name == ev.PLAN and event.data.get("refusal"):
        refusal = event.data["refusal"]
        return [failure(f"plan refused: {refusal['outcome']}", refusal["message"])]
    if event.name == ev.RESTORE:
        return [
            failure(
                f"commit {rejected.get('key')} rejected",
                str(rejected.get("reason"))
                + (f"; lost: {rejected['lost']}" if "lost" in rejected else ""),
            )
            for rejected in event.data.get("rejected") or []
        ]
    if event.name == ev.ROLLBACK:
        if event.data.get("found_key"):
            has = f"goes on from step {event.data.get('found_step')}"
        else:
            has = "begins anew"
        what = (
            f"the store was restored from an older snapshot: the commit of step {event.step} is "
            "missing"
        )
        return [failure(what, f"accepted with --accept-rollback; the job {has}")]
    return []


def _failure(t_wall: float, generation: int, what: str, culprit: str) -> Failure:
    # `list_failures` counts the seconds from the job's first event.
    return {
        "seconds": 0.0,
        "t_wall": t_wall,
        "generation": generation,
        "what": what,
        "culprit": culprit,
    }

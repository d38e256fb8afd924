"""A report's figures as rows and lines of text, which terminal, Metaflow card and HTML page share."""

import time
from collections.abc import Sequence
from decimal import Decimal

from ebbflow.core.config.load import DEFAULT, value_text
from ebbflow.core.events import FAULT_INJECTED, LedgerClass, describe_network
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import (
    NONE,
    apportion,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    format_share,
    format_usd,
    usd_decimals,
)
from ebbflow.cost.capacity.placement import UNKNOWN
from ebbflow.cost.ledger.instances import SCALE_DOWN_SECONDS
from ebbflow.cost.ledger.ledger import MEASURED
from ebbflow.cost.ledger.pricing import SIMULATED, UNPRICED
from ebbflow.cost.plan_json import PlanSummary
from ebbflow.cost.prices.quote import format_time
from ebbflow.cost.report.parts import ActualFigures, AttemptRow, SaveFigures
from ebbflow.cost.report.report import RunReport

_MOST_CHANGES = 12  # of a price, in one line
LEDGER_HEADER = ("class", "rank-seconds", "share", "USD", "figure")
CAUSE_HEADER = ("what it was paid for", "rank-seconds", "share", "USD")
GENERATION_HEADER = (
    "generation",
    "from step",
    "last step",
    "paid rank-seconds",
    "ended",
    "culprit",
)
ATTEMPT_HEADER = ("attempt", "ended", "waited", "hours", "planned", "USD/h", "planned", "USD")
PLACE_HEADER = ("attempt", "where", "why")
_DAMAGE_SHOWN = 10
_CLOCKS_APART_SECONDS = 1.0
_LONGEST_CAUSE = 48  # characters; a cause may hold text from outside


def format_ledger_rows(report: RunReport) -> list[tuple[str, ...]]:
    """Format the ledger as rows with the columns of `LEDGER_HEADER`. The last row is the total.

    The displayed amounts sum to the displayed totals. Shares are shares of the total paid time.
    """
    amounts = _format_amounts(report, [(line.rank_seconds, line.usd) for line in report.ledger])
    paid = report.paid_rank_seconds
    rows = []
    for line, (seconds, dollars) in zip(report.ledger, amounts, strict=True):
        name = str(line.ledger_class).replace("_", " ")
        if line.ledger_class is LedgerClass.VOLUMES:  # which have no time of their own
            rows.append((name, NONE, NONE, dollars, line.kind))
            continue
        share = format_percent(line.rank_seconds / paid if paid else None)
        rows.append((name, seconds, share, dollars, line.kind))
    if {line.kind for line in report.ledger} - {MEASURED}:
        kind = "estimated"
    else:
        kind = MEASURED
    return [*rows, (*_format_total(report, 1.0 if paid else None), kind)]


def format_cause_rows(report: RunReport) -> list[tuple[str, ...]]:
    """Format the dollars by cause as rows with the columns of `CAUSE_HEADER`.

    The last row is the total.

    The displayed amounts sum to the displayed totals. Shares are shares of the total dollars.
    """
    causes = report.money.get("causes") or []
    if not causes:
        return []
    amounts = _format_amounts(report, [(line["rank_seconds"], line["usd"]) for line in causes])
    total = float(report.total_usd)
    rows = [
        (
            shorten(one_line(line["cause"]), _LONGEST_CAUSE),
            time,
            format_percent(line["usd"] / total if total else None),
            dollars,
        )
        for line, (time, dollars) in zip(causes, amounts, strict=True)
    ]
    return [*rows, _format_total(report, 1.0 if total else None)]


def shorten(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length - 1]}…"


def format_key_figures(report: RunReport) -> dict[str, str]:
    """Return the known key figures as text, by name. All renderers show this text unchanged."""
    actual = report.actual
    hours = report.actual.get("wall_hours")
    figures = {
        "job": one_line(report.job),
        "outcome": format_outcome(report),
        "total": NONE if is_unpriced(report) else format_usd(report.total_usd),
        "savings": format_usd(report.savings_usd, usd_decimals(report.total_usd)),
        "regret": format_regret(report),
        "budget": format_budget(report),
        "paid by": format_owner(report),
        "prices": describe_prices(report),
        "paid time": f"{format_seconds(report.paid_rank_seconds)} rank-seconds",
        "wall time": format_duration(None if hours is None else 3600 * hours),
        "speed": f"{format_number(actual.get('tokens_per_second'), 0)} {get_weight_unit(report)}/s",
        "MFU": format_mfu(report),
        "GPU memory": format_gpu_memory(report),
        "network": describe_network(network, network["before"])
        if (network := actual.get("network"))
        else NONE,
        **{one_line(name): one_line(text) for name, text in (actual.get("profile") or {}).items()},
        **_quality(report),
        "per 1,000 rollouts": NONE
        if is_unpriced(report)
        else format_usd(actual.get("usd_per_1000_rollouts")),
        "final loss": format_number(get_final_loss(report)),
        "commits": format_count(actual.get("commits", 0), "commit"),
        "saves": _saves(actual.get("saves") or {}),
        "interruptions": format_count(report.interruptions, "interruption"),
        "failures": format_count(report.failures, "failure"),
        "redone": format_count(report.redone_steps, "step"),
        "goodput": format_percent(actual.get("goodput")),
        "unattributed": format_percent(actual.get("unattributed_share"), 2),
        "weights": report.weights_sha256 or NONE,
        **_promise(report),
        **_certificate(report),
    }
    return {name: figure for name, figure in figures.items() if not _is_unknown(figure)}


def format_gpu_memory(report: RunReport) -> str:
    """Format the largest memory peak of a rank's GPU, beside the plan's estimate."""
    rows = report.actual.get("gpu_memory") or []
    if not rows:
        return NONE
    worst = max(rows, key=lambda row: row["reserved_bytes"])
    gib = 2**30
    text = (
        f"peak {worst['allocated_bytes'] / gib:.2f} GiB allocated, "
        f"{worst['reserved_bytes'] / gib:.2f} GiB reserved on rank {worst['rank']}"
    )
    chosen = None if report.plan is None else report.plan["chosen"]
    fit = None if chosen is None else chosen.get("fit")
    if chosen is None or not fit:
        return text
    tensors = sum(size for name, size in fit.items() if name != "allowance")
    return (
        f"{text}; the plan estimated {tensors / gib:.2f} GiB of tensors and "
        f"{sum(fit.values()) / gib:.2f} GiB in all on {chosen.get('gpu', 'its GPU')}"
    )


def format_mfu(report: RunReport) -> str:
    """Format the model FLOPs utilisation, such as "41.0 % of measured peak", or the reason why it
    is not shown.
    """
    withheld = report.actual.get("mfu_withheld")
    if withheld:
        return f"withheld: {one_line(withheld)}"
    return format_share(report.actual.get("mfu"), "measured peak")


def format_outcome(report: RunReport) -> str:
    """Format the outcome with its exit code.

    For a running job, format the job's start, host and command.
    """
    if report.running is None:
        return f"{report.outcome} (exit code {report.exit_code})"
    running = {name: one_line(str(value)) for name, value in report.running.items()}
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.running["since_utc"]))
    by = f"`{running['command']}` of {running['user']}, pid {running['pid']}"
    return f"running since {since} on host {running['host']} ({by}); all figures are so far"


def get_weight_unit(report: RunReport) -> str:
    """Return the unit in which batch sizes, speeds and losses are counted; "tokens" for text."""
    return one_line(report.actual.get("weight_unit") or "tokens")


def get_loss_unit(report: RunReport) -> str:
    unit = get_weight_unit(report)
    if unit == "tokens":
        return "nats per token"
    return f"per {unit.removesuffix('s')}"


def describe_prices(report: RunReport) -> str:
    """Describe the kind of the job's prices, such as "recorded" or "simulated: priced as if on …"."""
    kind = one_line(report.actual.get("price_kind", UNPRICED))
    if kind == SIMULATED:
        return f"simulated: priced as if on {one_line(format_pool(report.plan))}"
    if _nothing_paid(report):
        chosen = (report.plan or {}).get("chosen")
        if chosen:
            planned = f"it was to run on {one_line(format_pool(report.plan))}"
        else:
            planned = "it has no plan"
        return f"none: nothing of the job has started, so that nothing was paid for; {planned}"
    if kind == UNPRICED:
        if (report.plan or {}).get("backend") == "slurm":
            return "unpriced: slurm.partitions has no usd_per_node_hour; node-hours are listed"
        return "unpriced: the job has no plan and states no cost.usd_per_node_hour"
    return kind


def is_unpriced(report: RunReport) -> bool:
    """Return whether the job's paid time has no known price."""
    return (
        report.actual.get("price_kind", UNPRICED) == UNPRICED
        and not report.total_usd
        and not _nothing_paid(report)
    )


def format_pool(plan: PlanSummary | None) -> str:
    """Format the chosen pool of a plan, such as "2 × g5.xlarge spot in use1-az4"; "n/a" if there is
    none.
    """
    chosen = (plan or {}).get("chosen")
    if not chosen:
        return NONE
    pool = (
        f"{chosen['nodes']} × {chosen['instance_type']} {str(chosen['market']).replace('_', '-')}"
    )
    place = chosen.get("zone") or chosen.get("region")  # old plans have neither
    if place:
        return f"{pool} in {place}"
    return pool


def get_final_loss(report: RunReport) -> float | None:
    if report.loss_curve:
        return report.loss_curve[-1][1]
    return None


def get_comparison_header(report: RunReport) -> tuple[str, str, str]:
    """Return the header of `format_comparison_rows`.

    For a simulated run, the header says that planned figures apply to the pool, and actual figures
    to this machine.
    """
    if (report.plan or {}).get("simulated"):
        return "plan against actual", "planned on the pool (estimated)", "actual on this machine"
    return "plan against actual", "planned (estimated)", "actual (measured)"


def format_comparison_rows(report: RunReport) -> list[tuple[str, str, str]]:
    """Format planned and actual figures as rows (figure, planned, actual); [] without a plan."""
    chosen = (report.plan or {}).get("chosen")
    if not chosen:
        return []
    actual = report.actual
    # The newest plan of a resumed job covers only the remaining work: hours and dollars are those
    # of the first plan.
    forecast = report.money.get("forecast") or {
        "hours": chosen.get("expected_hours"),
        "compute_usd": chosen.get("expected_usd"),
        "interruptions": chosen.get("interruptions"),
    }
    rows = [
        ("hours", format_number(forecast["hours"]), format_number(actual.get("wall_hours"))),
        ("dollars", format_usd(forecast["compute_usd"]), format_usd(report.total_usd)),
        (
            f"{get_weight_unit(report)}/s",
            format_number(chosen.get("tokens_per_second"), 0),
            format_number(actual.get("tokens_per_second"), 0),
        ),
        (
            "MFU",
            format_share(chosen.get("mfu"), "data sheet peak"),
            format_share(actual.get("mfu"), "measured peak"),
        ),
        ("interruptions", format_number(forecast["interruptions"], 4), str(report.interruptions)),
    ]
    return [row for row in rows if not (_is_unknown(row[1]) and _is_unknown(row[2]))]


def format_generation_rows(report: RunReport) -> list[tuple[str, str, str, str, str, str]]:
    """Format the generations as rows with the columns of `GENERATION_HEADER`, oldest first.

    The result is empty for a job with one generation. The displayed seconds sum to the ledger's
    total, less the seconds of AWS Batch nodes that never joined a generation.
    """
    lines = report.events.get("generations", [])
    if len(lines) < 2:
        return []
    paid = apportion([Decimal(str(line["paid_rank_seconds"])) for line in lines], 2)
    return [
        (
            str(line["generation"]),
            f"{line['from_step']:,}",
            NONE if line["last_step"] is None else f"{line['last_step']:,}",
            f"{paid_seconds:,}",
            one_line(line["ended"] or "not recorded").replace("_", " "),
            one_line(line["culprit"] or ""),
        )
        for line, paid_seconds in zip(lines, paid, strict=True)
    ]


def format_configuration_rows(report: RunReport, *, defaults: bool) -> list[tuple[str, str, str]]:
    """Format the keys of the configuration as rows (key, value, source).

    Args:
        defaults: If True, format the keys that have their default value; if False, the keys that
            were set.
    """
    return [
        (one_line(row["key"]), one_line(value_text(row["value"])), one_line(row["source"]))
        for row in report.configuration
        if (row["source"] == DEFAULT) is defaults
    ]


def explain_figures(report: RunReport) -> list[str]:
    """Return lines that explain how each kind of figure was obtained, and which costs are not
    counted.
    """
    if _nothing_paid(report) or is_unpriced(report):
        exact = ""
    else:
        exact = "exact at that price, "
    lines = [
        *describe_damage(report),
        "measured: losses, steps, speed, and all time that agents and ranks recorded",
        f"dollars: {_price_in_full(report)}; {exact}no invoice (taxes, credits, storage of "
        "commits and transfer left out)",
    ]
    if report.money.get("light_steps_away"):
        lines.append(
            "not counted: jobs of the steps around training (start, preflight, plan, prepare, "
            "report …), which ran on other machines; they are in the provider's bill, for AWS "
            "Batch with the run's tags"
        )
    lines += _explain_estimated_classes(report)
    lines += format_node_prices(report)
    lines += [one_line(line) for line in (report.plan or {}).get("prices", [])]
    if (report.plan or {}).get("chosen"):
        lines.append("estimated: the plan's hours, dollars, speed and interruptions")
    share = report.actual.get("unattributed_share") or 0.0
    if share > 0.01:
        lines.append(
            f"caution: {format_percent(share, 2)} of the paid time is unattributed, more than 1 %"
        )
    apart = abs((report.actual.get("network") or {}).get("clock_offset_seconds") or 0.0)
    if apart > _CLOCKS_APART_SECONDS:
        lines.append(
            f"caution: the clocks of the nodes are {format_duration(apart)} apart: times of "
            "events, and the wall time, are wrong by up to as much; paid time is not, because "
            "each node's own steady clock measures it"
        )
    if (report.money.get("hindsight") or {}).get("usd") is not None:
        lines.append(
            "regret: against the cheapest use of the recorded prices of the same machines, with "
            "all prices known in advance and capacity always available; estimated, an upper "
            "bound of what could have been saved"
        )
    if report.savings_usd is not None:
        lines.append(
            "savings: the same machines on demand (start-up, useful work, evaluation and saves "
            "once, without what interruptions and waits added), less the total"
        )
    planned = (report.plan or {}).get("cheapest_on_demand")
    if planned and not _nothing_paid(report):
        lines.append(
            f"beside the cheapest on-demand pool in time, {one_line(planned['pool'])}: "
            f"{format_usd(planned['usd'])} (estimated by the plan)"
        )
    return lines


def describe_damage(report: RunReport) -> list[str]:
    """Describe the damage to the event log, one line per damaged place; [] for an intact log."""
    damage = report.events.get("damage") or []  # old reports lack it
    if not damage:
        return []
    places = format_count(len(damage), "place")
    lines = [f"DAMAGED: the event log is damaged in {places}; figures are computed from the rest"]
    for flaw in damage[:_DAMAGE_SHOWN]:
        number = flaw.get("line")
        if number:
            line = f" line {number}"
        else:
            line = ""
        lines.append(f"damaged: {one_line(flaw['segment'])}{line}: {one_line(flaw['what'])}")
    if len(damage) > _DAMAGE_SHOWN:
        lines.append(
            f"damaged: {len(damage) - _DAMAGE_SHOWN:,} more places are in report.json "
            "(events.damage)"
        )
    return lines


def describe_finding(report: RunReport) -> str:
    """Describe the root cause that `ebbflow diagnose` finds in the job, with its first fix.

    Return "" if it finds no cause.
    """
    found = report.events.get("finding")
    if not found:
        return ""
    if found.get("fix"):
        fix = f"; {one_line(found['fix'].partition('; ')[0])}"
    else:
        fix = ""
    if (report.events.get("counts") or {}).get(FAULT_INJECTED):
        rehearsed = "; a fault was rehearsed"
    else:
        rehearsed = ""
    return (
        f"{one_line(found['title'])} ({found['confidence']:.0%}){rehearsed}{fix}; see: "
        f"{one_line(found['symptom'])}"
    )


def format_failures(report: RunReport) -> list[str]:
    """Format the failures as lines, oldest first."""
    return [
        f"after {format_duration(failure['seconds'])}: "
        f"{one_line(failure['what']).replace('_', ' ')}"
        + (f" ({one_line(failure['culprit'])})" if failure["culprit"] else "")
        for failure in report.events.get("failures", [])
    ]


def format_regret(report: RunReport) -> str:
    """Format the regret, such as "$0.0012 (34.0 %) over $0.0035 in hindsight, estimated".

    Regret is the money that could have been saved if all prices had been known in advance
    (`cost.report.figures.compute_hindsight`).
    """
    found = report.money.get("hindsight")
    if not found:
        return NONE
    decimals = usd_decimals(report.total_usd)
    regret = format_usd(found["regret_usd"], decimals)
    optimum = format_usd(found["usd"], decimals)
    return (
        f"{regret} ({format_percent(found.get('regret_share'))}) over {optimum} in hindsight, "
        "estimated"
    )


def format_budget(report: RunReport) -> str:
    """Format the spent share of the budget, such as "62.0 % of $5.0000, notified at 50 %".

    Return "n/a" without a budget.
    """
    limit = (report.plan or {}).get("budget_usd")
    if not limit:
        return NONE
    notified = [format_percent(share, 0) for share in report.money.get("thresholds") or []]
    return f"{format_percent(float(report.total_usd) / limit)} of {format_usd(limit)}" + (
        f", notified at {', '.join(notified)}" if notified else ""
    )


def format_owner(report: RunReport) -> str:
    owner, project = (one_line(report.money.get(name) or NONE) for name in ("owner", "project"))
    if owner == project == NONE:
        return NONE
    return f"{owner}, project {project}"


def format_node_prices(report: RunReport) -> list[str]:
    """Format the prices of the job's nodes as lines.

    If the nodes had several pools or kinds of price, one line per pair of these shows its cost. One
    line shows each pool's price that changed while it was paid. A last line shows how old the last
    price is if its source stopped answering.
    """
    found = report.money.get("prices") or []
    nodes = sum(line["nodes"] for line in found)
    decimals = usd_decimals(report.total_usd)
    lines = []
    if len(found) > 1:
        lines = [
            f"prices: {line['nodes']} of {nodes} nodes on {one_line(line['pool'] or NONE)}, "
            f"{format_usd(line['usd'], decimals)}: {one_line(line['kind'])}"
            for line in found
        ]
    for line in found:
        curve = line.get("curve") or []
        if len(curve) > 1:
            shown = curve[:_MOST_CHANGES]
            steps = [f"${usd:.4f} from {format_time(at)}" for at, usd in shown]
            more = len(curve) - len(shown)
            rest = f", and {more} more" if more else ""
            lines.append(
                f"price per node-hour of {one_line(line['pool'] or NONE)}: {', '.join(steps)}{rest}"
            )
    silence = report.money.get("price_silence")
    if silence:
        lines.append(f"prices: {one_line(silence)}")
    return lines


def format_attempt_rows(attempts: Sequence[AttemptRow]) -> list[tuple[str, ...]]:
    """Format planned and actual figures of the AWS Batch attempts as rows with the columns of
    `ATTEMPT_HEADER`.
    """
    return [
        (
            str(attempt["number"]),
            (one_line(attempt["ended"] or "") or UNKNOWN).replace("_", " "),
            format_duration(attempt["actual"]["wait_seconds"]),
            format_number(attempt["actual"]["hours"]),
            format_number(attempt["planned"]["hours"]),
            format_usd(attempt["actual"]["usd_per_hour"], 4),
            format_usd(attempt["planned"]["usd_per_hour"], 4),
            format_usd(attempt["actual"]["usd"], 4),
        )
        for attempt in attempts
    ]


def format_placement_rows(attempts: Sequence[AttemptRow]) -> list[tuple[str, str, str]]:
    """Format where and why each AWS Batch attempt was placed, as rows with the columns of
    `PLACE_HEADER`.
    """
    return [
        (str(attempt["number"]), one_line(attempt["where"]), one_line(attempt["why"]))
        for attempt in attempts
    ]


def _explain_estimated_classes(report: RunReport) -> list[str]:
    """Return one line for each way in which the report's classes of time were estimated."""
    billed = {LedgerClass.IDLE, LedgerClass.MINIMUM_CHARGE, LedgerClass.BOOT}
    estimated = {line.ledger_class for line in report.ledger if line.kind != MEASURED}
    inferred = [
        str(kind).replace("_", " ")
        for kind in LedgerClass
        if kind in estimated - billed - {LedgerClass.SCALE_DOWN, LedgerClass.VOLUMES}
    ]
    rules = [str(kind).replace("_", " ") for kind in LedgerClass if kind in estimated & billed]
    lines = []
    if inferred:
        why = "a node's end was not recorded, so it is billed to its last recorded event"
        if report.money.get("attempts"):
            why += (
                ", or to the stop time that AWS Batch reports: time before its first event is "
                "start-up, time after the last an interruption or idle; the sum is Batch's, the "
                "division compares two clocks"
            )
        lines.append(f"estimated: {', '.join(inferred)}: {why}")
    if rules:
        lines.append(
            f"estimated: {', '.join(rules)}: by the provider's billing rules, for instances with "
            "a known id"
        )
    if LedgerClass.SCALE_DOWN in estimated:
        lines.append(
            f"estimated: scale down: {SCALE_DOWN_SECONDS:g} s assumed after each job of AWS Batch "
            "whose instance was not reclaimed"
        )
    if LedgerClass.VOLUMES in estimated:
        lines.append(
            "estimated: volumes: cost.volume_gib_per_node of gp3 per node at its list price, for all "
            "paid time"
        )
    return lines


def _format_amounts(
    report: RunReport, amounts: Sequence[tuple[float, Decimal | float]]
) -> list[tuple[str, str]]:
    """Format pairs of (rank-seconds, dollars), rounded so that each column sums to its displayed
    total.
    """
    decimals = usd_decimals(report.total_usd)
    time = apportion([Decimal(str(seconds)) for seconds, _ in amounts], 2)
    dollars = apportion([Decimal(str(usd)) for _, usd in amounts], decimals)
    unpriced = is_unpriced(report)
    return [
        (f"{seconds:,}", NONE if unpriced else format_usd(usd, decimals))
        for seconds, usd in zip(time, dollars, strict=True)
    ]


def _format_total(report: RunReport, share: float | None) -> tuple[str, str, str, str]:
    if is_unpriced(report):
        total = NONE
    else:
        total = format_usd(report.total_usd, usd_decimals(report.total_usd))
    return "total", format_seconds(report.paid_rank_seconds), format_percent(share), total


def _is_unknown(figure: str) -> bool:
    return figure.split(" ")[0] == NONE


def _quality(report: RunReport) -> dict[str, str]:
    """Format the quality of the model: loss and entropy for text, else the metrics of the
    workload's evaluation.
    """
    actual = report.actual
    if get_weight_unit(report) == "tokens":
        quality = {
            "held-out loss": f"{format_number(actual.get('held_out_loss'))} nats per token",
            "unigram entropy": f"{format_number(actual.get('unigram_entropy_nats'))} nats per token",
            "loss / entropy": format_number(actual.get("held_out_ratio"), 3),
            "tokens per byte": format_number(actual.get("tokens_per_byte"), 3),
        }
        if actual.get("rows"):
            quality["rows read"] = _format_rows(actual)
        return quality
    return {
        one_line(name).replace("_", " "): value if isinstance(value, str) else format_number(value)
        for name, value in (actual.get("metrics") or {}).items()
    }


def _format_rows(actual: ActualFigures) -> str:
    """Format the number of data rows that were read, and the changes made to them."""
    parts = [f"{actual.get('rows'):,.0f}"]
    empty = actual.get("empty_rows")
    if empty:
        parts.append(f"{empty:,.0f} without text")
    repaired = actual.get("repaired_rows")
    if repaired:
        parts.append(f"half characters replaced in {repaired:,.0f}")
    return ", ".join(parts)


def _promise(report: RunReport) -> dict[str, str]:
    """Format how exactly a job resumes, such as "bit for bit, not proven; same data by its
    sampler".
    """
    found = report.events.get("promise")
    if not found:
        return {}
    if _saved_nothing(report):
        return {"resume": "nothing was saved"}
    tried = (report.events.get("certificate") or {}).get("holds")
    proof = {None: "not proven", True: "proven", False: "DISPROVED"}[tried]
    if found.get("level") != "bit for bit":
        proof = ""
    same_data = found.get("same_data")
    if same_data:
        data = f"same data by {one_line(same_data)}"
    else:
        data = "perhaps other data"
    words = [
        ", ".join(filter(None, [one_line(found.get("level") or NONE), proof])),
        data,
        "every commit verified",
    ]
    stall = (report.actual.get("saves") or {}).get("stall_seconds")
    if stall is not None:
        words += [f"{1000 * stall:.1f} ms stall per commit"]
    return {"resume": "; ".join([*words, *map(one_line, found.get("reasons") or [])])}


def _saved_nothing(report: RunReport) -> bool:
    """Return whether a job that ended by itself has no commit.

    Killed jobs do not count, because their events may lack the last commits.
    """
    resumed = any(generation.get("from_step") for generation in report.events["generations"])
    return report.outcome is not None and not resumed and not report.actual.get("commits")


def _certificate(report: RunReport) -> dict[str, str]:
    found = report.events.get("certificate")
    if not found:
        return {}
    if found.get("holds"):
        verdict = "holds"
    else:
        verdict = "DOES NOT HOLD"
    tried = format_count(len(found.get("interruptions") or []), "interruption")
    return {
        "certificate": (
            f"resume {verdict}: {tried} of {format_count(found.get('steps') or 0, 'step')}, bit "
            "for bit"
        )
    }


def _saves(found: SaveFigures) -> str:
    """Format the measured and the predicted time lost to checkpoints and redone steps; "n/a" if
    neither is known.
    """
    lost = found.get("actual_loss")
    predicted = found.get("predicted_loss")
    if lost is None:
        known = []
    else:
        known = [f"stalls and redone steps {format_share(lost, 'paid time')}"]
    if predicted is not None:
        known += [f"predicted {format_percent(predicted)}"]
    skipped = found.get("skipped")
    if known and skipped:
        known[-1] += f"; {skipped:,} left out"
    return ", ".join(known) or NONE


def _nothing_paid(report: RunReport) -> bool:
    return report.actual.get("price_kind", UNPRICED) == UNPRICED and not report.paid_microseconds


def _price_in_full(report: RunReport) -> str:
    """Describe the job's prices.

    If the planned pool's quote was applied, add the quote in dollars per hour.
    """
    chosen = (report.plan or {}).get("chosen") or {}
    text = describe_prices(report)
    quoted = chosen.get("quoted_usd_per_hour")
    # The quote is for the planned pool. `format_node_prices` describes the prices of other
    # machines.
    if not quoted or report.actual.get("price_kind") not in (SIMULATED, chosen.get("price_kind")):
        return text
    if report.actual.get("price_kind") == SIMULATED:
        known = f" ({one_line(chosen.get('price_kind', NONE))})"
    else:
        known = ""
    volume = float(chosen.get("volume_usd_per_hour") or 0.0)
    if volume:
        known += f" + {format_usd(volume, 4)}/h for its volume"
    return f"{text}, ${one_line(quoted)}/h per node{known}"

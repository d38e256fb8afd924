"""Summary of a job for page, terminal and Metaflow card: title, one sentence, and four numbers
(tiles).
"""

import shlex
from typing import NamedTuple

from ebbflow.core.config.load import value_text
from ebbflow.core.errors import Outcome
from ebbflow.core.events import LedgerClass
from ebbflow.core.json_values import Json
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import (
    NONE,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_usd,
)
from ebbflow.cost.ledger.pricing import SIMULATED
from ebbflow.cost.report.charts import RESTARTING, STARTING
from ebbflow.cost.report.figure_text import describe_damage, get_weight_unit, is_unpriced, shorten
from ebbflow.cost.report.report import RunReport, find_deciding_failure

# A shorter job is mostly start-up, so that its dollars say nothing of the market.
_LEAST_COMPARED_SECONDS = 60.0
_LONGEST_CAUSE = 160
_LONGEST_NAME = 80
_STRAGGLING = 1.3  # times the others' own time, as in the alert EbbflowStraggler
_LOST_SHARE = 0.05  # of each step, as in the guard
_ENDINGS = {
    Outcome.COMPLETED: "Completed",
    Outcome.FAILED: "Failed",
    Outcome.INTERRUPTED: "Interrupted",
    Outcome.BUDGET: "Stopped by its budget",
    Outcome.DEADLINE: "Stopped by its deadline",
    Outcome.NON_FINITE: "Stopped by a non-finite loss",
    Outcome.PREFLIGHT: "Refused by preflight",
    Outcome.CRASH_LOOP: "Stopped by a crash loop",
}


class Tile(NamedTuple):
    """One large number of the report, with its name and explanation.

    `share` (0 to 1) is the filled share of its bar.
    """

    name: str
    number: str
    words: str = ""
    share: float | None = None


def describe_model(report: RunReport) -> str:
    """Describe what the job trains: the user's script or workload, or the size of the built-in
    model; "" if unknown.
    """
    known = {row["key"]: row.get("value") for row in report.configuration}
    script = known.get("script")
    if script:
        return f"script {one_line(str(script).rpartition('/')[2])}"
    workload = known.get("workload")
    if workload:
        return one_line(workload)
    parts = [
        words.format(one_line(known[f"model.{name}"]))
        for name, words in (
            ("num_layers", "{}-layer transformer"),
            ("hidden_size", "width {}"),
            ("num_heads", "{} heads"),
            ("sequence_length", "length {}"),
        )
        if known.get(f"model.{name}")
    ]
    if known.get("model.num_layers"):
        return ", ".join(parts)
    return ""


def describe_title(report: RunReport) -> tuple[str, str]:
    """Return the title and the subtitle of a job's page.

    These are the job's name and the model. For a job without a name, they are the model and the
    job's id.
    """
    name = shorten(one_line(report.job), _LONGEST_NAME)
    model = describe_model(report)
    if name.isdecimal() and model:
        return (model, f"job {name}")
    return (name, model)


def render_verdict(report: RunReport) -> str:
    """Summarize the job in one sentence with its progress or outcome, time, dollars, and cost of
    interruptions.
    """
    if report.outcome is None:
        return f"{_describe_running(report)}: {_ahead(report)}"
    hours = report.actual.get("wall_hours")
    if hours:
        after = f" after {format_duration(3600 * hours)}"
    else:
        after = ""
    if report.outcome is Outcome.COMPLETED:
        after = after.replace(" after", " in")
    ending = _ENDINGS.get(report.outcome, f"Ended ({report.state.replace('_', ' ')})")
    parts = [f"{ending}{after}{_price(report)}"]
    cost = _interruption_cost(report)
    if cost:
        parts += [cost]
    if report.outcome is Outcome.COMPLETED:
        certificate = report.events.get("certificate") or {}
        if certificate.get("holds"):
            parts += ["resume certified bit for bit"]
        if report.weights_sha256:
            parts += [f"final weights {report.weights_sha256[:12]}"]
    else:
        cause = describe_cause(report)
        if cause:
            parts += [cause]
        done = report.progress.get("step")
        total = report.progress.get("steps")
        if done and total:
            parts += [f"{done:,} of {total:,} steps are done"]
    return "; ".join(parts)


def render_progress(report: RunReport) -> str:
    """Render a running job's progress as one line, with the figures of its page.

    Such as "step 120/180 · 67% · loss 2.3100 · 410 samples/s · ETA 40 s · $0.0021 · commit 100".
    """
    found = report.progress
    done = found.get("step") or 0
    total = found.get("steps")
    parts = [f"step {done}"]
    if total:
        parts = [f"step {done}/{total}", f"{100 * done / total:.0f}%"]
    loss = next((loss for step, loss in reversed(report.loss_curve) if step <= done), None)
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    columns = report.charts.get("steps") or {}
    if columns.get("speed"):
        rows = zip(columns["step"], columns["speed"], strict=True)
    else:
        rows = ()
    # Later rows are lost steps that are not yet redone
    speed = next((speed for step, speed in reversed([*rows]) if (step or 0) <= done), None)
    if speed:
        parts.append(f"{speed:,.0f} {get_weight_unit(report)}/s")
    eta = found.get("eta_seconds")
    if eta is not None:
        parts.append(f"ETA {format_duration(eta)}")
    parts.append(_spent(report))
    commit = found.get("commit_step")
    if commit:
        parts.append(f"commit {commit}")
    else:
        parts.append("no commit yet")
    at_risk = found.get("at_risk_usd")
    if at_risk and not is_unpriced(report):
        parts.append(f"{format_usd(at_risk)} at risk")
    return " · ".join(parts)


def describe_cause(report: RunReport) -> str:
    """Return the deciding failure with its culprit, else the outcome's message; "" if both are
    missing.
    """
    failure = find_deciding_failure(report.events.get("failures") or [])
    if not failure:
        return shorten(one_line(report.events.get("message") or ""), _LONGEST_CAUSE)
    what = one_line(failure["what"])
    culprit = one_line(failure.get("culprit") or "")
    return shorten(f"{what.replace('_', ' ')}{f' ({culprit})' if culprit else ''}", _LONGEST_CAUSE)


def describe_stop(report: RunReport) -> str:
    """Describe the work and dollars that killing the job now would lose; "" unless the job is
    running.
    """
    found = report.progress
    if report.outcome is not None or not found:
        return ""
    if report.state == RESTARTING:
        return (
            f"yes, no step runs now; the job goes on from step {found.get('resume_step') or 0:,} "
            "whenever it is started again"
        )
    steps = found.get("at_risk_steps") or 0
    commit = found.get("commit_step")
    if commit:
        since = f"since the commit of step {commit:,}"
    else:
        since = "because nothing is committed yet"
    if not steps:
        if commit:
            return f"yes, a kill now loses no finished step {since}"
        return "yes, no step is finished yet"
    cost = (
        f" ({format_duration(found.get('at_risk_seconds'))}, "
        f"{format_usd(found.get('at_risk_usd'))})"
    )
    if found.get("at_risk_seconds") is not None:
        known = cost
    else:
        known = ""
    return (
        "yes with Ctrl-C or SIGTERM, which saves first and loses none; a kill now loses "
        f"{format_count(steps, 'step')}{known} {since}"
    )


def describe_slowest_rank(report: RunReport, *, if_slow: bool = False) -> str:
    """Say which rank is slow, or that none is; "" if the ranks' times were not compared.

    Args:
        if_slow: Return "" if no rank is slow.
    """
    ranks = report.charts.get("ranks") or []
    judged = [rank for rank in ranks if rank.get("slowest_ratio") and rank.get("slowest_share")]
    if not judged:
        return ""
    worst = judged[0]
    where = (
        f"rank {worst['rank']} on node {one_line(worst['node'])} {one_line(worst['host'])}".strip()
    )
    often = f"in {format_percent(worst['slowest_share'], 0)} of the steps"
    times = f"{format_number(worst['slowest_ratio'], 2)} × the others' median, {often}"
    each = worst.get("lost_step_seconds")
    step = worst.get("step_seconds") or 0.0
    slow = (worst["slowest_ratio"] or 0.0) >= _STRAGGLING or (
        each is not None and each >= _LOST_SHARE * step > 0
    )
    if not slow or (worst["slowest_share"] or 0.0) < max(0.5, 1.5 / len(ranks)):
        if if_slow:
            return ""
        return f"no rank is slow: the one that was slowest most often, {where}, took {times}"
    if each is None:
        return f"{where} is slow: {times}"
    lost = format_duration(worst.get("lost_seconds"))
    if report.total_usd:
        lost += f" and {format_usd(worst.get('lost_usd'))}{describe_simulation(report)}"
    return (
        f"{where} is slow: {1000 * each:,.0f} ms more than the others' median {often}, which "
        f"cost {lost}"
    )


def describe_simulation(report: RunReport) -> str:
    """Return " (simulated prices)" if the job's prices were simulated, else ""."""
    if report.actual.get("price_kind") == SIMULATED:
        return " (simulated prices)"
    return ""


def list_tiles(report: RunReport) -> list[Tile]:
    """List the four large numbers of the report: progress or outcome, dollars, goodput and time."""
    found = report.progress
    running = report.outcome is None
    done = found.get("step") or report.actual.get("steps") or 0
    total = found.get("steps")
    if total:
        share = done / total
    else:
        share = None
    if total:
        steps = f"{done:,} of {total:,} steps"
    else:
        steps = format_count(done, "step")
    if running:
        progress = Tile("progress", NONE if share is None else format_percent(share), steps, share)
    else:
        progress = Tile("outcome", str(report.outcome).replace("_", " "), steps, share)
    useful = report.actual.get("goodput")
    goodput = Tile("goodput", format_percent(useful), "paid time in steps that count", useful)
    return [progress, _dollars(report), goodput, _time(report)]


def summarize_status(report: RunReport) -> list[str]:
    """Return the lines of `ebbflow watch --once`: title, verdict, tiles, and the work that a kill
    now would lose.
    """
    model = describe_model(report)
    lines = [f"{one_line(report.job)}{f': {model}' if model else ''}", render_verdict(report)]
    lines += [
        f"{tile.name:15} {tile.number}{f'  ({tile.words})' if tile.words else ''}"
        for tile in list_tiles(report)
    ]
    lines += [
        f"{line}: ebbflow report {one_line(report.job)}" for line in describe_damage(report)[:1]
    ]
    slow = describe_slowest_rank(report, if_slow=True)
    if slow:
        lines.append(f"{'slow rank':15} {slow}")
    stop = describe_stop(report)
    if stop:
        lines.append(f"{'safe to stop?':15} {stop}")
    return lines


def find_changed_settings(
    report: RunReport, before: RunReport | None
) -> list[tuple[str, str, str]]:
    """List the settings that differ from the earlier job `before`, as (key, value before, value
    now).
    """
    if before is None or not before.configuration or not report.configuration:
        return []
    old, new = (_values(shown) for shown in (before, report))
    return [
        (key, old.get(key, NONE), new.get(key, NONE))
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def script_command(report: RunReport, *options: str) -> str | None:
    """Return the command that runs the job's script on this machine.

    Return None if the job was not started by `ebbflow run SCRIPT`.
    """
    given = {
        row["key"]: row["value"] for row in report.configuration if row["source"] == "argument"
    }
    if not given.get("script"):
        return None
    words: list[Json] = ["ebbflow", "run", given["script"], *options]
    script_args = given.get("script_args")
    if isinstance(script_args, list) and script_args:
        words += ["--", *script_args]
    return shlex.join(one_line(str(word)) for word in words)


def reproduce_command(report: RunReport) -> str:
    """Return the command that runs the same configuration again under a new name.

    Return "" if no configuration was recorded.
    """
    rows = report.configuration
    own = script_command(report)
    if own is not None or not rows:
        return own or ""
    sources = [str(row["source"]).rpartition(":") for row in rows]
    files = [path for path, _, line in sources if path and line.isdecimal()]
    words = ["ebbflow", "run", *(["--config", shlex.quote(one_line(files[0]))] if files else [])]
    for row in rows:
        if row["source"] == "--set":
            words += [
                "--set",
                shlex.quote(f"{one_line(row['key'])}={one_line(value_text(row['value']))}"),
            ]
    return " ".join(words)


def _describe_running(report: RunReport) -> str:
    """Describe the phase of a running job, such as "Restarting from step 60 (12 steps lost)"."""
    found = report.progress
    if report.state == STARTING:
        return f"Starting ({found.get('doing')})"
    if report.state == RESTARTING:
        lost = format_count(found.get("lost_steps") or 0, "step")
        return f"Restarting from step {found.get('resume_step') or 0:,} ({lost} lost)"
    return "Running"


def _ahead(report: RunReport) -> str:
    found = report.progress
    done = found.get("step") or 0
    total = found.get("steps")
    eta = found.get("eta_seconds")
    if total:
        steps = f"{done:,} of {total:,} steps ({format_percent(done / total, 0)})"
    else:
        steps = format_count(done, "step")
    if is_unpriced(report):
        spent = "price unknown"
    else:
        spent = f"{format_usd(report.total_usd)} spent{describe_simulation(report)}"
    end = ""
    if eta is not None:
        if is_unpriced(report):
            price = ""
        else:
            price = f" for about {format_usd(found.get('forecast_usd'))}"
        end = f"; ends in about {format_duration(eta)}{price} (estimated)"
    cost = _interruption_cost(report)
    return f"{steps}, {spent}{end}{f'; {cost}' if cost else ''}"


def _spent(report: RunReport) -> str:
    """Format the dollars that the job has cost, with its budget if there is one.

    If the price is unknown, format the paid time instead.
    """
    if is_unpriced(report):
        return f"{format_duration(report.paid_rank_seconds)} of rank time, price unknown"
    budget = report.progress.get("budget_usd")
    limit = ""
    if budget:
        limit = f" of {format_usd(budget, 2)}"
    return f"{format_usd(report.total_usd)}{limit} spent{describe_simulation(report)}"


def _price(report: RunReport) -> str:
    if not report.paid_microseconds:
        return ", and nothing was paid"
    if is_unpriced(report):
        return ", price unknown"
    text = f" for {format_usd(report.total_usd)}{describe_simulation(report)}"
    total = float(report.total_usd)
    if report.savings_usd is None or report.outcome is not Outcome.COMPLETED or not total:
        return text
    usual = total + float(report.savings_usd)
    if usual <= 0 or _useful_seconds(report) < _LEAST_COMPARED_SECONDS:
        return text
    if usual >= total:
        where = "below"
    else:
        where = "above"
    return (
        f"{text}, {format_percent(abs(1 - total / usual), 0)} {where} the same machines on demand"
    )


def _useful_seconds(report: RunReport) -> float:
    """Return the mean seconds that a rank spent in useful steps."""
    ranks = max(1, len(report.charts.get("ranks") or []))
    useful = [line for line in report.ledger if line.ledger_class is LedgerClass.USEFUL_STEP]
    return sum(line.rank_seconds for line in useful) / ranks


def _interruption_cost(report: RunReport) -> str:
    causes = [
        cause
        for cause in report.money.get("causes") or []
        if str(cause["cause"]).startswith("interruption")
    ]
    if not report.interruptions or not causes:
        return ""
    seconds = sum(cause["rank_seconds"] for cause in causes) / max(
        1, len(report.charts.get("ranks") or [])
    )
    if not seconds:
        return f"{_count_endings(report)} lost no step"
    if is_unpriced(report):
        usd = ""
    else:
        usd = f" and {format_usd(sum(cause['usd'] for cause in causes))}"
    return f"{_count_endings(report)} cost {format_duration(seconds)}{usd}"


def _count_endings(report: RunReport) -> str:
    """Describe the number of interruptions and failures, such as "1 interruption and 2 failures".

    A failure is an error of the code.
    """
    both = (report.interruptions - report.failures, "interruption"), (report.failures, "failure")
    return (
        " and ".join(format_count(*counted) for counted in both if counted[0]) or "0 interruptions"
    )


def _dollars(report: RunReport) -> Tile:
    found = report.progress
    if is_unpriced(report):
        return Tile("spent" if report.outcome is None else "cost", NONE, "the price is unknown")
    budget = found.get("budget_usd")
    forecast = found.get("forecast_usd")
    words: list[str] = []
    if forecast is not None:
        low = format_usd(found.get("low_usd"))
        high = format_usd(found.get("high_usd"))
        if low != high:
            band = f"{low} to {high}, "
        else:
            band = ""
        words.append(f"about {format_usd(forecast)} at the end ({band}estimated)")
    share = None
    if budget:
        share = float(report.total_usd) / budget
        words.append(f"{format_percent(share)} of the budget of {format_usd(budget)}")
    simulated = describe_simulation(report)
    if simulated:
        words.append(simulated.strip(" ()"))
    return Tile(
        "spent" if report.outcome is None else "cost",
        format_usd(report.total_usd),
        "; ".join(words),
        share,
    )


def _time(report: RunReport) -> Tile:
    hours = report.actual.get("wall_hours")
    eta = report.progress.get("eta_seconds")
    wall = format_duration(None if hours is None else 3600 * hours)
    if report.outcome is not None:
        return Tile("wall time", wall, _count_endings(report))
    if eta is None:
        ends = "unknown until steps are timed"
    else:
        ends = f"{format_duration(eta)}"
    return Tile("time to finish", ends, f"estimated; {wall} so far")


def _values(report: RunReport) -> dict[str, str]:
    return {
        one_line(row["key"]): one_line(value_text(row["value"])) for row in report.configuration
    }

"""The plan as text that reads like a change to approve: what is chosen, what else there was, what cannot be and why.

Marks on figures: r recorded on a date, e estimated. No line depends on its leading spaces, which log viewers drop.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime

from cost.candidates import Candidate, Rejection
from cost.catalogue import ADVISOR_RECORDED, ON_DEMAND_RECORDED, REGION
from cost.figures import count, duration, number, percent, plain, usd
from cost.fit import gib
from cost.plan import Plan

WIDTH = 100
BAR = "│"
_LISTED = 8


def render_plan(plan: Plan) -> str:
    """The whole plan, at most 100 columns wide."""
    sections = [_header(plan)]
    if plan.chosen is not None:
        sections += [_chosen(plan, plan.chosen), _ranked(plan)]
    if plan.rejected:
        sections.append(_rejected(plan.rejected))
    sections.append(_kinds())
    if plan.refusal is not None:
        sections.append(_wrapped(plain(f"✗ refused ({plan.refusal.outcome}): {plan.refusal.message}")))
        sections.append(_wrapped(plain(f"hint: {plan.refusal.hint}")))
    lines = ["┌─ capacity plan ".ljust(WIDTH - 1, "─")]
    for index, section in enumerate(sections):
        lines += [BAR] if index else []
        lines += [f"{BAR} {line}".rstrip() for line in section]
    return "\n".join([*lines, "└" + "─" * (WIDTH - 2)])


def _header(plan: Plan) -> list[str]:
    made = datetime.fromtimestamp(plan.made_utc, UTC).strftime("%Y-%m-%d %H:%M UTC")
    work = f"{plan.steps:,} steps, {plan.tokens:,} tokens"
    budget = "no budget" if plan.budget_usd is None else f"budget {usd(plan.budget_usd, 2)}"
    deadline = "no deadline" if plan.deadline_hours is None else f"deadline {number(plan.deadline_hours, 2)} h"
    lines = [f"{work} · {budget} · {deadline}", f"made {made} for backend {plan.backend}"]
    if plan.simulated:
        lines += _wrapped(
            "simulated: this run stays on this machine. The pool is what it would run on in the cloud, "
            "and the run is priced as if it did."
        )
    return lines


def _chosen(plan: Plan, best: Candidate) -> list[str]:
    size = "1 node" if best.nodes == 1 else f"{best.nodes} nodes"
    market = best.market.replace("_", "-")
    price = f"{usd(best.usd_per_hour, 4)}/h per node, {usd(best.gang_usd_per_hour, 4)}/h in all"
    used = (
        f"{best.ranks} of {best.nodes * best.gpu_count} GPUs used" if best.processes_per_node < best.gpu_count else ""
    )
    gpus = (
        f"{size} × {best.processes_per_node} {best.gpu} = {count(best.ranks, 'rank')}, micro-batch {best.micro_batch}"
    )
    hours = f"{number(best.expected_hours)} h ({duration(best.expected_hours * 3600)})"
    speed = (
        f"{number(best.tokens_per_second, 0)} tokens/s, bound by {best.bound}, MFU {percent(best.mfu)}, "
        f"{best.step_seconds:.4g} s per step"
    )
    interval = (
        f"each {plan.interval_steps:,} steps; Young's interval at this hazard: {best.young_interval_steps:,} steps"
    )
    items = [
        ("price", f"{price} ({_price_mark(best)})"),
        ("gang", "; ".join(filter(None, [gpus, used]))),
        ("memory", f"{best.fit.render()} of {gib(best.gpu_memory_bytes)} per GPU (e)"),
        ("speed", f"{speed} (e)"),
        ("hours", f"{hours} with one start (e)"),
        ("dollars", f"{usd(best.expected_usd, 4)}, reserve for the last save {usd(plan.reserve_usd, 4)} (e)"),
        ("interruptions", f"{best.interruptions:.2g} expected at {best.hazard_per_hour:.2g} per hour (e)"),
        ("commits", interval),
        *_limits(plan, best),
    ]
    width = max(len(name) for name, _ in items)
    lines = _wrapped(f"+ {best.nodes} × {best.instance_type} {market}: the cheapest pool that can run this job")
    for name, value in items:
        lines += _wrapped(f"+ {name:<{width}}  {value}", indent=width + 4)
    return lines


def _limits(plan: Plan, best: Candidate) -> list[tuple[str, str]]:
    limits = []
    if plan.deadline_hours is not None:
        slack = plan.deadline_hours - best.expected_hours
        limits.append(("slack", f"{number(slack, 2)} h to the deadline (e)"))
    if plan.budget_usd is not None:
        share = percent((best.expected_usd + plan.reserve_usd) / plan.budget_usd)
        limits.append(("budget", f"{share} of {usd(plan.budget_usd, 2)}, reserve included (e)"))
    return limits


def _ranked(plan: Plan) -> list[str]:
    header = ("", "pool", "GPUs", "$/h", "tokens/s (e)", "hours (e)", "dollars (e)", "memory (e)")
    rows = [header]
    for place, one in enumerate(plan.ranked[:_LISTED], start=1):
        rows.append(
            (
                f"{place}",
                str(one),
                f"{one.ranks} {one.gpu}",
                f"{usd(one.gang_usd_per_hour, 4)} {_price_mark(one)}",
                number(one.tokens_per_second, 0),
                number(one.expected_hours, 3),
                usd(one.expected_usd, 4),
                percent(one.fit.total / one.gpu_memory_bytes, 0),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if 1 <= column <= 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    more = len(plan.ranked) - _LISTED
    return lines + ([f"… and {more} dearer pools"] if more > 0 else [])


def _price_mark(candidate: Candidate) -> str:
    return "r" if candidate.price_kind.startswith("recorded") else "e"


def _rejected(rejected: Sequence[Rejection]) -> list[str]:
    """Grouped by reason, commonest first, with the nearest miss of each as its example."""
    groups: dict[str, list[Rejection]] = {}
    for one in rejected:
        groups.setdefault(one.kind, []).append(one)
    lines = [f"- {len(rejected)} pools rejected:"]
    for kind, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        nearest = min(group, key=lambda one: one.excess)
        lines += _wrapped(f"- {len(group)} × {kind}, such as {nearest}: {nearest.reason}", indent=2)
    return lines


def _kinds() -> list[str]:
    return _wrapped(
        f"r: recorded, {REGION} on-demand prices of {ON_DEMAND_RECORDED}. e: estimated; spot prices and hazards from "
        f"the spot advisor of {ADVISOR_RECORDED}."
    )


def _wrapped(text: str, indent: int = 2) -> list[str]:
    """Lines of at most the width. Continuations begin with a visible dot, since leading spaces may be lost."""
    follow = "·".ljust(indent)
    return textwrap.wrap(text, WIDTH - 3, subsequent_indent=follow, break_on_hyphens=False)

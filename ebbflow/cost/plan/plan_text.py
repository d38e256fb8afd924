"""Render a plan as text: the chosen pool, the other pools in order, and the rejected pools with
their reasons.

A letter after a figure shows its source: l live, r recorded on a date, e estimated, s simulated, !
stale. The text does not rely on indentation, because log viewers drop leading spaces.
"""

import textwrap
from collections.abc import Sequence
from decimal import Decimal
from itertools import groupby

from ebbflow.core.grouping import group_by_key
from ebbflow.core.untrusted_text import one_line, wrap_line
from ebbflow.cost.amounts import (
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_usd,
)
from ebbflow.cost.plan.plan import RANKED, Plan
from ebbflow.cost.plan.pools import Candidate, PartitionOffer
from ebbflow.cost.plan.refusal import describe_reserve
from ebbflow.cost.plan.throughput import UNCALIBRATED, gib_text
from ebbflow.cost.prices.quote import format_short_age, format_time

WIDTH = 100
BAR = "│"
_LISTED = 8

_COLUMNS = ("", "pool", "place", "GPUs", "$/h", "age", "tokens/s", "hours", "dollars")
# Columns to drop, in this order, if a line is too wide.
_SPARE = ("GPUs", "tokens/s", "age")


def render_plan(plan: Plan) -> str:
    """Render the plan, at most 100 columns wide."""
    sections = [_header(plan)]
    if plan.chosen is not None:
        sections += [_chosen(plan, plan.chosen), _ranked(plan)]
    if plan.partitions:
        sections.append(_list_partitions(plan))
    if plan.key_savings:
        sections.append(_key_savings(plan))
    regions = _regions(plan)
    if regions:
        sections.append(regions)
    if plan.blocks:
        sections.append(_for_sale(plan))
    if plan.rejected:
        sections.append(_rejected(plan))
    sections.append(_notes(plan) if plan.backend == "slurm" else _kinds(plan))
    if plan.refusal is not None:
        sections.append(
            _wrapped(one_line(f"✗ refused ({plan.refusal.outcome}): {plan.refusal.message}"))
        )
        sections.append(_wrapped(one_line(f"hint: {plan.refusal.hint}")))
    lines = ["┌─ capacity plan ".ljust(WIDTH - 1, "─")]
    for index, section in enumerate(sections):
        if index:
            lines += [BAR]
        lines += [f"{BAR} {line}".rstrip() for line in section]
    return "\n".join([*lines, "└" + "─" * (WIDTH - 2)])


def render_brief(plan: Plan, *, width: int = 80) -> list[str]:
    """Render the plan in short: the chosen pool, its dollars and hours, the next three pools, and
    rejections.
    """
    lines = [_partition_line(offer) for offer in plan.partitions[:3]]
    best = plan.chosen
    if best is not None:
        if plan.simulated:
            where = " (simulated: this run stays on this machine)"
        else:
            where = ""
        ahead = plan.live
        dollars = format_usd(best.expected_usd)
        hours = f"{format_number(best.expected_hours, 3)} h"
        chance = None
        if ahead is not None:
            dollars += (
                f" expected (p10 {format_usd(ahead.p10_usd)}, p90 {format_usd(ahead.p90_usd)})"
            )
            hours += (
                f" median (p10 {format_number(ahead.p10_hours, 3)}, p90 "
                f"{format_number(ahead.p90_hours, 3)})"
            )
            chance = ahead.deadline_probability
        if plan.budget_usd is None:
            limit = ""
        else:
            limit = f" of ${plan.budget_usd:.2f}"
        if chance is None:
            in_time = ""
        else:
            in_time = f" · P(in time) {format_percent(chance)}"
        lines += [f"{best}{where}", f"{dollars}{limit} · {hours}{in_time} · estimated"]
        others = [group[0] for group in _same_but_for_the_zone(plan.ranked)[1:4]]
        names = [
            f"{other.nodes} × {other.instance_type} {other.market} {format_usd(other.expected_usd)}"
            for other in others
        ]
        if names:
            lines += [f"next: {' · '.join(names)}".replace("_", "-")]
    if plan.key_savings:
        lines.append(_key_savings(plan)[0])
    rejected = {kind: count for kind, count in plan.counts.items() if kind != RANKED and count}
    if rejected:
        ordered = sorted(rejected, key=lambda kind: -rejected[kind])
        kinds = ", ".join(f"{rejected[kind]} × {kind}" for kind in ordered)
        lines.append(f"rejected: {format_count(sum(rejected.values()), 'pool')}: {kinds}")
    if plan.refusal is not None:
        lines.append(
            f"refused ({plan.refusal.outcome}): {plan.refusal.message}; hint: {plan.refusal.hint}"
        )
    return [piece for line in lines for piece in wrap_line(line, width)]


def _partition_line(offer: PartitionOffer) -> str:
    """Render a partition in one line, such as "spot: 2 nodes, $24.00/h, 2 idle"."""
    parts = [f"{one_line(offer.name)}: {format_count(offer.nodes, 'node')}"]
    if offer.usd_per_node_hour is not None:
        parts.append(f"{format_usd(offer.usd_per_node_hour * offer.nodes)}/h")
    if offer.usd is not None:
        parts.append(f"{format_usd(offer.usd)} for the rest")
    elif offer.node_hours is not None:
        parts.append(f"{format_number(offer.node_hours, 3)} node-hours for the rest")
    if offer.node_states:
        parts.append(one_line(offer.node_states))
    return ", ".join(parts)


def _header(plan: Plan) -> list[str]:
    made = format_time(plan.made_utc)
    work = f"{plan.steps:,} steps, {plan.tokens:,.0f} {one_line(plan.weight_unit)}"
    if plan.budget_usd is None:
        budget = "no budget"
    else:
        budget = f"budget {format_usd(plan.budget_usd, 2)}"
    if plan.deadline_hours is None:
        deadline = "no deadline"
    else:
        deadline = f"deadline {format_number(plan.deadline_hours, 2)} h"
    lines = [f"{work} · {budget} · {deadline}", f"made {made} for backend {plan.backend}"]
    if plan.done_steps:
        spent = f"{plan.done_steps:,} steps are done and {format_usd(plan.spent_usd)} spent"
        lines += _wrapped(
            f"the job goes on: {spent}; what follows is of the {plan.steps:,} steps that are left"
        )
    if plan.simulated:
        lines += _wrapped(
            "simulated: this run stays on this machine. The pool is what it would run on in the "
            "cloud, and the run is priced as if it did."
        )
    return lines


def _list_partitions(plan: Plan) -> list[str]:
    """Render the partitions as a table, the preferred one first.

    Lines below it explain why Slurm would refuse a partition.
    """
    rows = [("", "partition", "nodes", "$/h", "limit", "state", "start", "node-hours", "dollars")]
    for number, offer in enumerate(plan.partitions, start=1):
        price = offer.usd_per_node_hour
        rows.append(
            (
                f"{number}",
                one_line(offer.name) + (" (preemptible)" if offer.preemptible else ""),
                f"{offer.nodes}",
                "unknown" if price is None else format_usd(price * offer.nodes, 4),
                "Slurm's" if offer.max_hours is None else f"{offer.max_hours:g} h",
                one_line(offer.node_states) or "unknown",
                _describe_start(plan, offer.start_utc),
                "unknown" if offer.node_hours is None else format_number(offer.node_hours, 3),
                "unknown" if offer.usd is None else format_usd(offer.usd, 4),
            )
        )
    problems = []
    for offer in plan.partitions:
        if offer.problem:
            problems += _wrapped(one_line(f"{offer.name}: {offer.problem}"))
    return [*_table(rows), *problems]


def _describe_start(plan: Plan, start_utc: float | None) -> str:
    """Render Slurm's estimate of a start, relative to the plan."""
    if start_utc is None:
        return "unknown"
    seconds = start_utc - plan.made_utc
    return "now" if seconds < 60 else f"in {format_duration(seconds)}"


def _notes(plan: Plan) -> list[str]:
    lines = []
    for text in (*plan.prices, *plan.notes):
        lines += _wrapped(one_line(text))
    return lines


def _chosen(plan: Plan, best: Candidate) -> list[str]:
    if best.nodes == 1:
        size = "1 node"
    else:
        size = f"{best.nodes} nodes"
    price = (
        f"{format_usd(best.price.usd_float, 4)}/h per node, "
        f"{format_usd(best.price.usd_float * best.nodes, 4)}/h in all"
    )
    volume = float(best.price.volume_usd_per_hour)
    if volume:
        price += f" (+ {format_usd(volume * best.nodes, 4)}/h for volumes)"
    if best.processes_per_node < best.gpu_count:
        used = f"{best.ranks} of {best.nodes * best.gpu_count} GPUs used"
    else:
        used = ""
    ranks = format_count(best.ranks, "rank")
    gpus = (
        f"{size} × {best.processes_per_node} {best.gpu} = {ranks}, micro-batch {best.micro_batch}"
    )
    speed = (
        f"{format_number(best.tokens_per_second, 0)} {one_line(plan.weight_unit)}/s, bound by "
        f"{best.bound}, MFU {format_percent(best.mfu)}, {best.step_seconds:.4g} s per step"
    )
    items = [
        ("price", f"{price} ({_price_mark(best)})"),
        ("known", one_line(best.price.kind)),
        ("gang", "; ".join(filter(None, [gpus, used]))),
        ("memory", f"{best.fit.render()} of {gib_text(best.gpu_memory_bytes)} per GPU (e)"),
        ("speed", f"{speed} ({one_line(best.speed_kind)})"),
        *_chance(plan),
        ("hours", _hours(plan, best)),
        ("dollars", _dollars(plan, best)),
        (
            "interruptions",
            f"{best.interruptions:.2g} expected at {best.hazard_per_hour:.2g} per hour "
            f"({one_line(best.hazard_kind)})",
        ),
        (
            "commits",
            f"{plan.interval}; Daly's interval at this hazard: {best.daly_interval_steps:,} steps",
        ),
        *_limits(plan, best),
    ]
    width = max(len(name) for name, _ in items)
    alike = [pool for pool in plan.ranked if (pool.outlook is None) is (best.outlook is None)]
    if all(best.expected_usd <= pool.expected_usd for pool in alike):
        likely = "the cheapest pool that can run this job"
    else:
        likely = "cheaper pools would probably miss the deadline"
    lines = _wrapped(one_line(f"+ {best}: {likely}"))
    for name, value in items:
        lines += _wrapped(f"+ {name:<{width}}  {value}", indent=width + 4)
    return lines


def _chance(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan's line with the probability of meeting deadline and budget.

    Return an empty list without a deadline.
    """
    ahead = plan.live
    if ahead is None or ahead.deadline_probability is None or plan.deadline_hours is None:
        return []
    chance = f"{format_percent(ahead.deadline_probability)} within {plan.deadline_hours:g} h (s)"
    if ahead.on_demand_share and plan.chosen is not None and plan.chosen.market == "spot":
        chance += f"; {format_percent(ahead.on_demand_share)} of the runs end on demand"
    return [("P(in time)", chance)]


def _hours(plan: Plan, best: Candidate) -> str:
    """Format the hours from now to the end of the job, including waits for capacity."""
    hours = (
        f"{format_number(best.expected_hours)} h ({format_duration(best.expected_hours * 3600)})"
    )
    ahead = plan.live
    if ahead is None:
        return f"{hours} (e)"
    return (
        f"{hours} median, p10 {format_number(ahead.p10_hours)}, p90 "
        f"{format_number(ahead.p90_hours)} h (s)"
    )


def _dollars(plan: Plan, best: Candidate) -> str:
    if best.price.volume_usd_per_hour:
        compute = "compute with volumes"
    else:
        compute = "compute"
    parts = (
        f"{compute} {format_usd(best.compute_usd, 4)} + storage {format_usd(best.storage_usd, 4)}"
    )
    if best.transfer_usd:
        parts += f" + transfer {format_usd(best.transfer_usd, 4)}"
    per_step = f"{format_usd(1000 * best.usd_per_step, 4)} per 1,000 useful steps"
    purpose = describe_reserve(plan.price_watch, best, plan.backend)
    reserve = f"{purpose} {format_usd(plan.reserve_usd, 4)} (e)"
    usd = format_usd(best.expected_usd, 4)
    ahead = plan.live
    if ahead is None:
        return f"{usd} (e) = {parts}; {per_step}; {reserve}"
    return (
        f"{usd} expected, p10 {format_usd(ahead.p10_usd, 4)}, p90 {format_usd(ahead.p90_usd, 4)} "
        f"(s) = {parts}; {per_step}; {reserve}"
    )


def _limits(plan: Plan, best: Candidate) -> list[tuple[str, str]]:
    limits = []
    if plan.deadline_hours is not None:
        left = plan.deadline_hours - (plan.made_utc - plan.started_utc) / 3600
        limits.append(
            ("slack", f"{format_number(left - best.expected_hours, 2)} h to the deadline (e)")
        )
    if plan.budget_usd is not None:
        share = format_percent(
            (plan.spent_usd + best.expected_usd + plan.reserve_usd) / plan.budget_usd
        )
        limits.append(
            ("budget", f"{share} of {format_usd(plan.budget_usd, 2)}, reserve included (e)")
        )
    return limits


def _ranked(plan: Plan) -> list[str]:
    groups = _same_but_for_the_zone(plan.ranked)
    speed = f"{one_line(plan.weight_unit)}/s"
    rows = [tuple(speed if column == "tokens/s" else column for column in _COLUMNS)]
    for number_of_row, group in enumerate(groups[:_LISTED], start=1):
        pool = group[0]
        others = len(group) - 1
        rows.append(
            (
                f"{number_of_row}",
                f"{pool.nodes} × {pool.instance_type} {pool.market.replace('_', '-')}",
                one_line(pool.place) + (f" +{others}" if others else ""),
                f"{pool.ranks} {pool.gpu}",
                f"{format_usd(pool.price.usd_float * pool.nodes, 4)} {_price_mark(pool)}",
                format_short_age((pool.price.age_hours or 0.0) * 3600),
                format_number(pool.tokens_per_second, 0)
                + (" u" if pool.speed_kind == UNCALIBRATED else ""),
                format_number(pool.expected_hours, 3),
                format_usd(pool.expected_usd, 4),
            )
        )
    more = plan.counts.get(RANKED, len(plan.ranked)) - sum(map(len, groups[:_LISTED]))
    if any(len(group) > 1 for group in groups[:_LISTED]):
        folded = "; +n: as many other zones at the same price"
    else:
        folded = ""
    if any(group[0].speed_kind == UNCALIBRATED for group in groups[:_LISTED]):
        uncalibrated = "; u: uncalibrated, no published run of this GPU is in the fit"
    else:
        uncalibrated = ""
    legend = (
        f"age: since the price was last known to hold; {speed}, hours and dollars are "
        f"estimated{folded}{uncalibrated}"
    )
    return [*_table(rows), *([f"… and {more} more pools"] if more > 0 else []), *_wrapped(legend)]


def _key_savings(plan: Plan) -> list[str]:
    """Return one line for each key whose value, if changed, would save more than 5 %."""
    lines = []
    for saving in plan.key_savings:
        dollars = f"{format_usd(saving.usd)}, {format_usd(saving.saved_usd)} less (e)"
        lines += _wrapped(f"cheaper with {saving.key}: {saving.value} → {dollars}")
    return lines


def _regions(plan: Plan) -> list[str]:
    """Return one line per region, with its best pool and the cost of moving there; [] for a single
    region.
    """
    best: dict[str, Candidate] = {}
    for pool in plan.ranked:
        best.setdefault(pool.region or "", pool)
    first = next(iter(best.values()), None)
    if first is None or len(best) < 2:
        return []
    lines = [f"{first.region}: stay, {format_usd(first.expected_usd, 4)}, {first}"]
    for pool in list(best.values())[1:]:
        more = format_usd(pool.expected_usd - first.expected_usd, 4)
        away = f"of which transfer {format_usd(pool.transfer_usd, 4)}, {pool}"
        lines.append(
            f"{pool.region}: moving costs {more} more, {format_usd(pool.expected_usd, 4)}, {away}"
        )
    regions = []
    for text in lines:
        regions.extend(_wrapped(f"region {text} (e)"))
    return regions


def _for_sale(plan: Plan) -> list[str]:
    lines = []
    for block in plan.blocks:
        begin = format_time(plan.made_utc + 3600 * block.case.wait_hours)
        buy = (
            "aws ec2 purchase-capacity-block --instance-platform Linux/UNIX --region "
            f"{block.region}"
        )
        lines += _wrapped(
            f"for sale: Capacity Block of {block.nodes} × {block.instance_type} in "
            f"{block.place}, {begin}: {format_usd(block.expected_usd, 2)} in all, done in "
            f"{format_number(block.expected_hours, 1)} h (e); buy: {buy} "
            f"--capacity-block-offering-id {block.reservation}"
        )
    return lines


def _same_but_for_the_zone(ranked: Sequence[Candidate]) -> list[list[Candidate]]:
    """Group adjacent pools of the ranking that differ only in their zone.

    Each group becomes one row of the table.
    """

    def key(pool: Candidate) -> tuple[str | float | Decimal | None, ...]:
        return (
            pool.instance_type,
            pool.nodes,
            pool.market,
            pool.region,
            pool.price.usd_per_hour,
            pool.price.age_hours,
        )

    return [list(group) for _, group in groupby(ranked, key)]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = list(range(len(_COLUMNS)))
    for name in _SPARE:
        if sum(widths[column] for column in shown) + 2 * (len(shown) - 1) > WIDTH - 2:
            shown.remove(_COLUMNS.index(name))
    lines = []
    for row in rows:
        cells = []
        for column in shown:
            # Names are aligned to the left, numbers to the right.
            if 1 <= column <= 3:
                cells.append(row[column].ljust(widths[column]))
            else:
                cells.append(row[column].rjust(widths[column]))
        lines.append("  ".join(cells))
    return lines


def _price_mark(candidate: Candidate) -> str:
    mark = candidate.price.kind[:1]
    if candidate.price.is_stale:
        return f"{mark}!"
    return mark


def _rejected(plan: Plan) -> list[str]:
    """Return one line per kind of rejection, most frequent first: count, and the pool closest to
    running the job.
    """
    groups = group_by_key((rejection.kind, rejection) for rejection in plan.rejected)
    counts = {kind: plan.counts.get(kind, len(group)) for kind, group in groups.items()}
    lines = [f"- {sum(counts.values())} pools rejected:"]
    for kind in sorted(groups, key=lambda kind: -counts[kind]):
        nearest = min(groups[kind], key=lambda rejection: rejection.excess)
        lines += _wrapped(
            f"- {counts[kind]} × {kind}, such as {nearest}: {nearest.reason}", indent=2
        )
    return lines


def _kinds(plan: Plan) -> list[str]:
    """Return the legend: the sources of the prices, the assumptions, and the meaning of the letters
    after figures.
    """
    said = []
    for text in (*plan.prices, *plan.notes):
        said.extend(_wrapped(one_line(text)))
    if any(pool.price.is_stale for pool in plan.ranked):
        stale = " !: older than cost.max_price_age_hours."
    else:
        stale = ""
    marks = f"l: live. r: recorded. e: estimated. s: simulated.{stale}"
    return [*said, *_wrapped(marks)]


def _wrapped(text: str, indent: int = 2) -> list[str]:
    """Wrap text to the width.

    Continuation lines begin with a visible dot, because log viewers drop leading spaces.
    """
    follow = "·".ljust(indent)
    return textwrap.wrap(text, WIDTH - 3, subsequent_indent=follow, break_on_hyphens=False)

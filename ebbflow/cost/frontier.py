"""Pareto front of a job's time and cost, over all pools, markets, numbers of nodes and checkpoint
intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.json_values import JsonObject
from ebbflow.cost.amounts import format_duration, format_number, format_percent, format_usd
from ebbflow.cost.plan.candidates import PlanInputs, feasible_pools
from ebbflow.cost.plan.live_forecast import Forecaster
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.plan.pools import Candidate
from ebbflow.cost.plan.refusal import needed_usd
from ebbflow.cost.report.render_html import escape, fill_page, render_html_table
from ebbflow.cost.report.render_text import format_table

_SECONDS = (60.0, 300.0, 900.0, 3600.0)

_HEADER = ("", "pool", "place", "checkpoints", "hours", "p90", "dollars", "p90", "P(in time)")

_LEGEND = (
    "hours, dollars, P(in time): simulated, as the job would be placed from there; *: the plan's "
    "choice; !: beyond cost.budget_usd, or less likely in time than cost.confidence"
)


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A pool and a checkpoint interval that no other choice beats in both expected hours and
    expected dollars.
    """

    pool: Candidate
    interval: str  # the checkpoint interval as text
    # budget that the whole job needs with this choice: dollars spent so far, expected dollars, and
    # the reserve for the last checkpoint
    needed_usd: float
    # whether the choice meets the budget, and the deadline with at least the probability
    # `cost.confidence`
    within: bool

    def to_json(self) -> JsonObject:
        pool = self.pool
        ahead = self.pool.outlook
        names = (
            "instance_type",
            "nodes",
            "market",
            "region",
            "zone",
            "expected_hours",
            "expected_usd",
        )
        return {
            **{name: getattr(pool, name) for name in names},
            "interval": self.interval,
            "interval_seconds": pool.interval_seconds,
            "p90_hours": ahead and ahead.p90_hours,
            "p90_usd": ahead and ahead.p90_usd,
            "deadline_probability": ahead and ahead.deadline_probability,
            "needed_usd": self.needed_usd,
            "within": self.within,
            "kind": "estimated",
        }


def find_frontier(config: RunConfig, sources: PlanInputs) -> list[FrontierPoint]:
    """Return the Pareto front of expected hours and dollars for the remaining work, the fastest
    choice first.

    Instance types, regions, zones and ranks per node are as configured. All markets, numbers of
    nodes and checkpoint intervals are tried. Budget and deadline are ignored.
    """
    free = config.changed("cost", deadline_hours=None, budget_usd=None)
    free = free.changed("cluster", nodes="auto", market="auto")
    intervals = {"as configured": {}, "auto": {"interval": "auto"}}
    intervals |= {
        format_duration(s): {"interval": "seconds", "interval_seconds": s} for s in _SECONDS
    }
    found = [
        (pool, words)
        for words, values in intervals.items()
        for pool in feasible_pools(free.changed("checkpoint", **values), sources)
    ]
    judged = sorted(found, key=lambda pair: (pair[0].expected_hours, pair[0].expected_usd))
    resorts = [pool for pool, _ in judged if _may_take_over(config, pool)]
    forecaster = Forecaster(config, sources, resorts)
    points = []
    for pool, words in _undominated(judged):
        if pool.case.work_hours:
            pool = forecaster.simulate(pool)
        points.append(_judge(config, sources, pool, words))
    points.sort(key=lambda point: (point.pool.expected_hours, point.pool.expected_usd))
    front: list[FrontierPoint] = []
    for point in points:
        if not front or point.pool.expected_usd < front[-1].pool.expected_usd:
            front.append(point)
    return front


def render_frontier(front: Sequence[FrontierPoint], plan: Plan) -> str:
    """Render the front as a table.

    `*` marks the plan's choice; `!` marks choices that exceed budget or deadline.
    """
    rows = _rows(front, plan)
    if not rows:
        return "no pool can run the job: `ebbflow plan` without --frontier shows why"
    return "\n".join(
        [*(line.rstrip() for line in format_table(rows, _HEADER, left=4, width=None)), _LEGEND]
    )


def render_frontier_page(front: Sequence[FrontierPoint], plan: Plan) -> str:
    """Render the front as one self-contained HTML page: a chart and the table."""
    rows = _rows(front, plan)
    if plan.done_steps:
        what = f"the {plan.steps:,} steps that are left"
    else:
        what = f"{plan.steps:,} steps"
    main = (
        '<header id="header"><h1>Dollars against time to finish</h1><p '
        f'class="verdict">{len(rows)} choices for {what}</p></header><section '
        f'id="front">{_chart(front, rows)}{render_html_table(_HEADER, rows)}<p '
        f'class="quiet">{escape(_LEGEND)}</p></section>'
    )
    return fill_page(
        main, '{"figures":[]}', "Ebbflow frontier", running=False, written=plan.made_utc
    )


def _may_take_over(config: RunConfig, pool: Candidate) -> bool:
    """Return whether the job, as configured, may fall back to this on-demand pool."""
    cluster = config.cluster
    return (
        cluster.market == "auto"
        and pool.market == "on_demand"
        and cluster.nodes in ("auto", pool.nodes)
    )


def _undominated(judged: Sequence[tuple[Candidate, str]]) -> list[tuple[Candidate, str]]:
    """Return the pools for which no faster pool has lower mean dollars.

    Args:
        judged: Pools and checkpoint intervals, the fastest first.
    """
    kept: list[tuple[Candidate, str]] = []
    for pool, interval in judged:
        if not kept or pool.expected_usd < kept[-1][0].expected_usd:
            kept.append((pool, interval))
    return kept


def _judge(config: RunConfig, sources: PlanInputs, pool: Candidate, interval: str) -> FrontierPoint:
    budget = config.cost.budget_usd
    needed = needed_usd(config, sources, pool)
    chance = pool.outlook and pool.outlook.deadline_probability
    within = (budget is None or needed <= budget) and (
        chance is None or chance >= config.cost.confidence
    )
    return FrontierPoint(pool=pool, interval=interval, needed_usd=needed, within=within)


def _chart(front: Sequence[FrontierPoint], rows: Sequence[tuple[str, ...]]) -> str:
    """Draw each choice as a dot at (expected hours, expected dollars).

    The dot's tooltip is its row of the table.
    """
    if not front:
        return ""
    most_hours = max(frontier_point.pool.expected_hours for frontier_point in front) or 1.0
    most_usd = max(frontier_point.pool.expected_usd for frontier_point in front) or 1.0
    dots = []
    for point, row in zip(front, rows, strict=True):
        x = 60 + 480 * point.pool.expected_hours / most_hours
        y = 210 - 190 * point.pool.expected_usd / most_usd
        dots.append(
            f'<circle class="{"c1" if point.within else "c4"}" r="5" cx="{x:.1f}" cy="{y:.1f}">'
            f"<title>{escape(', '.join(filter(None, row)))}</title></circle>"
        )
    labels = (
        f'<text x="52" y="24" text-anchor="end">{escape(format_usd(most_usd, 2))}</text><text '
        f'x="540" y="228" text-anchor="end">{format_number(most_hours, 1)} h</text><line '
        'class="grid" x1="60" x2="548" y1="210" y2="210"/><line class="grid" x1="60" x2="60" '
        'y1="14" y2="210"/>'
    )
    name = "expected dollars by expected hours of each choice"
    return (
        f'<svg viewBox="0 0 560 234" role="img" aria-label="{name}">{labels}{"".join(dots)}</svg>'
    )


def _rows(front: Sequence[FrontierPoint], plan: Plan) -> list[tuple[str, ...]]:
    rows = []
    for point in front:
        pool = point.pool
        ahead = point.pool.outlook
        known = ("instance_type", "nodes", "market", "region", "zone")
        chosen = plan.chosen is not None and all(
            getattr(pool, name) == getattr(plan.chosen, name) for name in known
        )
        if chosen:
            mark = "*"
        else:
            mark = "" if point.within else "!"
        rows.append(
            (
                mark,
                f"{pool.nodes} × {pool.instance_type} {pool.market.replace('_', '-')}",
                pool.place,
                point.interval,
                format_number(pool.expected_hours, 3),
                format_number(ahead and ahead.p90_hours, 3),
                format_usd(pool.expected_usd, 2),
                format_usd(ahead and ahead.p90_usd, 2),
                format_percent(ahead and ahead.deadline_probability),
            )
        )
    return rows

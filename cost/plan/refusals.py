"""Why a plan is refused: which limit binds, the arithmetic, and the smallest changes that would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ebbflow.cost.catalogue import ON_DEMAND_REGION, on_demand_recorded
from ebbflow.cost.plan.candidates import (
    AUTO_NODES,
    ELSEWHERE,
    HAZARD_UNKNOWN,
    MISSES_DEADLINE,
    NO_ON_DEMAND_PRICE,
    NO_QUEUE,
    NO_SPOT_PRICE,
    Sources,
    candidates,
)
from ebbflow.cost.plan.pools import Candidate, Pool, Rejection
from ebbflow.cost.prices.quote import refresh_command
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.outcome import Outcome

OVER_BUDGET = "over the budget"


def reserve_usd(config: RunConfig, pool: Candidate) -> float:
    """The gang's price of `checkpoint.deadline_seconds`: kept back for the last save and the drain."""
    return pool.gang_usd_per_hour * config.checkpoint.deadline_seconds / 3600


def needed_usd(config: RunConfig, sources: Sources, pool: Candidate) -> float:
    """Of the budget, were the job to go on in this pool."""
    return sources.progress.spent_usd + pool.expected_usd + reserve_usd(config, pool)


def within_budget(
    config: RunConfig, sources: Sources, ranked: Sequence[Candidate]
) -> tuple[list[Candidate], list[Rejection]]:
    """The pools that the budget bears, in their order, and the others as rejected; all pools where it bears none,
    the one that needs least first, so that the refusal can say what would do.

    The cheapest pool need not be one of them: the reserve of a dear gang that is quickly done may be too much.
    """
    budget = config.cost.budget_usd
    if budget is None:
        return list(ranked), []
    borne = [pool for pool in ranked if needed_usd(config, sources, pool) <= budget]
    if not borne:
        return sorted(ranked, key=lambda pool: needed_usd(config, sources, pool)), []
    kept = set(map(id, borne))
    return borne, [_rejection(config, sources, pool) for pool in ranked if id(pool) not in kept]


def _rejection(config: RunConfig, sources: Sources, pool: Candidate) -> Rejection:
    budget, spent = config.cost.budget_usd or 0.0, sources.progress.spent_usd
    needed = needed_usd(config, sources, pool)
    reason = (
        f"needs ${needed:.4f} = ${pool.expected_usd:.4f} + ${reserve_usd(config, pool):.4f} reserve for the last save"
        + (f" + ${spent:.4f} spent so far" if spent else "")
        + f", cost.budget_usd is ${budget:.4f}"
    )
    where = {name: getattr(pool, name) for name in Pool.__dataclass_fields__}
    return Rejection(**where, kind=OVER_BUDGET, reason=reason, excess=needed / budget if budget else needed)


def budget_hint(config: RunConfig, sources: Sources, cheapest: Candidate, needed_usd: float) -> str:
    """The budget that would do, and the steps that this one buys."""
    enough = math.ceil(needed_usd * 100) / 100
    hint = f"set cost.budget_usd to {enough:.2f} or more"
    left = sources.steps_left(config)
    by_step = cheapest.expected_usd / left if left else 0.0
    over = needed_usd - (config.cost.budget_usd or 0.0)
    for steps in (left - math.ceil(share * over / by_step) for share in _SHARES) if by_step else ():
        if steps <= 0:
            return hint
        fewer = _changed(config, "training", max_steps=sources.progress.done_steps + steps)
        if _usd_on(cheapest, fewer, sources) <= (config.cost.budget_usd or 0.0):
            return f"{hint}, or training.max_steps to {fewer.training.max_steps} or fewer"
    return hint


# Of the excess, in whole prices of steps: starts and saves do not shrink with the steps, so that more must go.
_SHARES = (1.0, 1.01, 1.05, 1.25, 1.5, 2.0)


def _usd_on(pool: Candidate, config: RunConfig, sources: Sources) -> float:
    """What the job needs of the budget in the pool's region on its type; infinite where it cannot run."""
    config = _changed(config, "cluster", instance_types=[pool.instance_type])
    config = _changed(config, "cost", regions=[pool.region])
    return min((needed_usd(config, sources, one) for one in candidates(config, sources)), default=math.inf)


def cheapest_without_deadline(config: RunConfig, sources: Sources) -> Candidate | None:
    """What would need least if there were time enough."""
    unlimited = candidates(_changed(config, "cost", deadline_hours=None), sources)
    return min(unlimited, key=lambda one: needed_usd(config, sources, one), default=None)


def fastest_without_deadline(config: RunConfig, sources: Sources) -> tuple[Candidate, float]:
    """The first that would be done of those that the budget bears, or what needs least where it bears none; and the
    hours of the first of all. Raises ValueError when nothing fits, deadline or not.
    """
    every = sorted(candidates(_changed(config, "cost", deadline_hours=None), sources), key=lambda one: one.expected_usd)
    borne, first_hours = within_budget(config, sources, every)[0], min(one.expected_hours for one in every)
    if config.cost.budget_usd is not None and needed_usd(config, sources, borne[0]) > config.cost.budget_usd:
        return borne[0], first_hours
    return min(borne, key=lambda one: one.expected_hours), first_hours


def enough_hours(sources: Sources, pool: Candidate) -> float:
    """The deadline, from the job's start, that the pool is expected to keep."""
    started = sources.progress.started_utc
    return pool.expected_hours + (0.0 if started is None else (sources.now_utc - started) / 3600)


def later(hours: float) -> str:
    return f"set cost.deadline_hours to {math.ceil(hours * 100) / 100:g} or more"


def deadline_hint(config: RunConfig, sources: Sources, hours: float) -> str:
    """The deadline that would do, or more nodes that keep this one. hours: as `enough_hours` gives them."""
    hint = later(hours)
    better = next((text for text, changed in _larger(config) if any(candidates(changed, sources))), None)
    return f"{hint}, or {better}" if better else hint


def capacity_hint(config: RunConfig, sources: Sources, rejected: tuple[Rejection, ...]) -> str:
    """The first small change with which some pool can run the job."""
    if not rejected:
        families = sorted({kind.name.split(".")[0] for kind in sources.catalogue.types})
        return f"cluster.instance_types may name any of {', '.join(families)}, or stay empty for all"
    unpriced = config.cost.prices == "static" and any(rejection.kind == NO_SPOT_PRICE for rejection in rejected)
    lacking = [region for region in config.cost.regions if region not in on_demand_recorded()]
    ways = [f"run {refresh_command(lacking)}"] if lacking else []
    ways += ["set cost.prices to live"] if unpriced else []
    for text, changed in _places(config):
        if any(candidates(changed, sources)):
            return ", or ".join([", ".join(ways), text] if ways else [text])
    if ways and any(candidates(_changed(config, "cost", regions=[ON_DEMAND_REGION], zones=[]), sources)):
        return ", or ".join(ways)  # the queues are elsewhere, where only a price is lacking
    for text, changed in _changes(config):
        if any(candidates(changed, sources)):
            return text
    if any(rejection.kind == NO_QUEUE for rejection in rejected):
        return "add a queue that takes such machines to batch.queues (`ebbflow deploy` makes queues)"
    return "no single change makes it fit: use a smaller model, or more nodes and gradient accumulation together"


def _places(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    cost = config.cost
    if cost.zones:
        yield "leave cost.zones empty", _changed(config, "cost", zones=[])
    where_queues_are = config.cluster.backend == "batch" and config.batch.region is not None
    if ON_DEMAND_REGION not in cost.regions and not where_queues_are:
        regions = [*cost.regions, ON_DEMAND_REGION]
        yield f"add {ON_DEMAND_REGION} to cost.regions", _changed(config, "cost", regions=regions, zones=[])


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    cluster, accumulation = config.cluster, config.training.gradient_accumulation_steps
    if config.parallel.mode == "ddp":
        yield "set parallel.mode to fsdp2", _changed(config, "parallel", mode="fsdp2")
    for factor in (2, 4, 8, 16):
        steps = accumulation * factor
        text = f"set training.gradient_accumulation_steps to {steps}"
        yield text, _changed(config, "training", gradient_accumulation_steps=steps)
    if not config.fsdp.use_mixed_precision:
        yield "set fsdp.use_mixed_precision to true", _changed(config, "fsdp", use_mixed_precision=True)
    if config.parallel.recompute != "full":
        yield "set parallel.recompute to full", _changed(config, "parallel", recompute="full")
    if cluster.processes_per_node != "auto":
        text = "set cluster.processes_per_node to auto: one rank per GPU"
        yield text, _changed(config, "cluster", processes_per_node="auto")
    yield from _larger(config)
    if cluster.market != "auto":
        yield "set cluster.market to auto", _changed(config, "cluster", market="auto")
    if cluster.instance_types:
        yield "leave cluster.instance_types empty", _changed(config, "cluster", instance_types=[])
    ranks = 1 if cluster.processes_per_node == "auto" else cluster.processes_per_node
    for nodes in AUTO_NODES:
        size = nodes * ranks * accumulation
        if size >= config.training.batch_size or config.training.batch_size % size:
            batch = math.ceil(config.training.batch_size / size) * size
            changed = _changed(_changed(config, "training", batch_size=batch), "cluster", nodes=nodes)
            yield f"set training.batch_size to {batch} and cluster.nodes to {nodes}", changed


def _larger(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    nodes = config.cluster.nodes
    if nodes == "auto":
        return
    for more in AUTO_NODES:
        if more > nodes:
            yield f"set cluster.nodes to {more}", _changed(config, "cluster", nodes=more)
    if config.cluster.processes_per_node != "auto":
        for more in AUTO_NODES:
            text = f"set cluster.nodes to {more} and cluster.processes_per_node to auto: one rank per GPU"
            yield text, _changed(config, "cluster", nodes=more, processes_per_node="auto")


def _changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why the job must not start: the outcome it ends with, the arithmetic, and what would make it possible.

    enough: the least value of the limit that binds, dollars or hours, that would do; None when no limit binds.
    """

    outcome: Outcome
    message: str
    hint: str
    enough: float | None = None


def refusal(
    config: RunConfig,
    sources: Sources,
    ranked: list[Candidate],
    rejected: tuple[Rejection, ...],
) -> Refusal | None:
    """None: the job may start on `ranked[0]`, which is what `within_budget` puts there."""
    if ranked:
        return _over_budget(config, sources, ranked[0])
    late = [rejection for rejection in rejected if rejection.kind == MISSES_DEADLINE]
    if late:
        fastest = min(late, key=lambda rejection: rejection.excess)
        message = f"no pool meets the deadline; the fastest, {fastest}, {fastest.reason}"
        pool, first_hours = fastest_without_deadline(config, sources)
        hours = enough_hours(sources, pool)
        needed, budget = needed_usd(config, sources, pool), config.cost.budget_usd
        hint = deadline_hint(config, sources, hours)
        if budget is not None and needed > budget:
            message += f". The budget binds as well: with time enough {pool} would need ${needed:.4f} of ${budget:.4f}"
            hint = f"{later(hours)}, and cost.budget_usd to {math.ceil(needed * 100) / 100:.2f} or more"
        elif pool.expected_hours > first_hours:
            message += f". The first that the budget bears, {pool}, would need {pool.expected_hours:.4g} h"
        return Refusal(outcome=Outcome.DEADLINE, message=message, hint=hint, enough=hours)
    hint = capacity_hint(config, sources, rejected)
    return Refusal(outcome=Outcome.NO_CAPACITY, message=_nothing_fits(config, rejected), hint=hint)


def _over_budget(config: RunConfig, sources: Sources, cheapest: Candidate) -> Refusal | None:
    budget, spent = config.cost.budget_usd, sources.progress.spent_usd
    needed = needed_usd(config, sources, cheapest)
    if budget is None or needed <= budget:
        return None
    other = cheapest.storage_usd + cheapest.transfer_usd
    message = (
        f"cost.budget_usd is ${budget:.4f}; the cheapest pool that can do it, {cheapest}, needs ${needed:.4f} = "
        f"{cheapest.paid_hours:.4g} h × {cheapest.nodes} × ${cheapest.usd_per_hour:.4f}/h "
        f"+ ${other:.4f} storage and transfer + ${reserve_usd(config, cheapest):.4f} reserve for the last save"
        + (f" + ${spent:.4f} spent so far" if spent else "")
    )
    hint = budget_hint(config, sources, cheapest, needed)
    if config.cost.deadline_hours is not None and (slow := cheapest_without_deadline(config, sources)) is not None:
        total = needed_usd(config, sources, slow)
        if total <= budget:
            message += (
                f". The deadline binds as well: {slow} would do it for ${total:.4f} in {slow.expected_hours:.4g} h"
            )
    return Refusal(outcome=Outcome.BUDGET, message=message, hint=hint, enough=needed)


def _nothing_fits(config: RunConfig, rejected: tuple[Rejection, ...]) -> str:
    if not rejected:
        return f"no instance type of the catalogue begins with {', '.join(config.cluster.instance_types)}"
    nearest = min(rejected, key=_distance)
    return f"none of {len(rejected)} pools can run the job; the nearest, {nearest}: {nearest.reason}"


def _distance(rejection: Rejection) -> tuple[int, float]:
    """How far a pool is from running the job: first those that want only a queue or a price, then those too
    small, then others."""
    wanting = (NO_QUEUE, HAZARD_UNKNOWN, NO_SPOT_PRICE, NO_ON_DEMAND_PRICE, ELSEWHERE, "does not fit")
    return wanting.index(rejection.kind) if rejection.kind in wanting else len(wanting), rejection.excess

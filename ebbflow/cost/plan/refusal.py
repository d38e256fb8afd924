"""Refuse a job whose pools exceed its budget or deadline, and suggest configuration changes that
would help.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ebbflow.core.config.device_settings import choose_loss_chunk
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.terms import PRICE_RISE, PriceWatch
from ebbflow.cost.catalogue import ON_DEMAND_REGION, on_demand_recorded
from ebbflow.cost.plan.candidates import (
    AUTO_NODES,
    ELSEWHERE,
    MISSES_DEADLINE,
    NO_ON_DEMAND_PRICE,
    NO_QUEUE,
    NO_SPOT_PRICE,
    OVER_BUDGET,
    PlanInputs,
    feasible_pools,
)
from ebbflow.cost.plan.guarantee import finish_usd, guaranteed_hours, refuse_unguaranteed
from ebbflow.cost.plan.live_forecast import Forecaster, chance_in_time
from ebbflow.cost.plan.pools import Candidate, Pool, Rejection, get_idle_seconds
from ebbflow.cost.prices.quote import refresh_command

_DEFAULT = "default"  # source of a value that nobody wrote
# Not the key of `--set KEY=VALUE`, which is to be pasted
_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b(?!=)")
# Steps to cut, relative to the excess divided by the price of a step. Starts and checkpoints cost
# the same with fewer.
_SHARES = (1.0, 1.01, 1.05, 1.25, 1.5, 2.0)
# Longer deadlines to try, relative to the configured one.
_LONGER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
# Gradient accumulation to try, relative to the configured one.
_ACCUMULATION_FACTORS = (2, 4, 8, 16)
# Cheapest pools whose probability to meet a longer deadline is simulated.
_TRIED_POOLS = 3


@dataclass(frozen=True, kw_only=True)
class PlanRefusal:
    """The reason why a job must not start."""

    outcome: Outcome  # deadline exceeded, budget exceeded, or no capacity
    message: str  # the numbers that led to the refusal
    hint: str  # a change of the configuration that would allow the job
    # smallest sufficient deadline in hours, or budget in dollars, depending on which limit is
    # exceeded; None if there is no capacity
    enough: float | None = None

    def with_sources(self, sources: Mapping[str, str]) -> PlanRefusal:
        """Return the refusal with the places where the user set the keys that it names.

        A key is then shown as, for example, "cost.budget_usd (job.yaml:3)".

        Args:
            sources: the source of each key, as `LoadedConfig.sources` has them.
        """
        named: set[str] = set()

        def add_source(match: re.Match[str]) -> str:
            key = match.group()
            source = sources.get(key, _DEFAULT)
            if source == _DEFAULT or key in named:
                return key
            named.add(key)
            return f"{key} ({source})"

        message = _KEY.sub(add_source, self.message)
        return replace(self, message=message, hint=_KEY.sub(add_source, self.hint))


def reserve_usd(config: RunConfig, pool: Candidate) -> float:
    """Return the dollars that the budget keeps in reserve for the end of the job.

    They pay for all nodes during the last checkpoint (`checkpoint.deadline_seconds`), for a rise of
    a watched price that is not known yet, and for the time for which AWS Batch keeps machines.
    """
    return pool.reserve_usd(
        PriceWatch.of(config),
        config.checkpoint.deadline_seconds,
        get_idle_seconds(config.cluster.plan_for),
    )


def describe_reserve(watch: PriceWatch, pool: Candidate, backend: str) -> str:
    """Describe the purpose of `reserve_usd`. `backend`: as in `cluster.plan_for`."""
    purposes = ["the last save"]
    idle_seconds = get_idle_seconds(backend)
    if idle_seconds:
        purposes.append(f"{idle_seconds / 60:g} min of idle machines")
    if pool.market == "spot" and watch.seconds:
        purposes.append(f"a price {PRICE_RISE:g} times as high")
    *others, last = purposes
    if not others:
        return f"reserve for {last}"
    return f"reserve for {', '.join(others)} and {last}"


def needed_usd(config: RunConfig, sources: PlanInputs, pool: Candidate) -> float:
    """Return the dollars that the whole job needs if it continues in this pool, including past
    spending.
    """
    return sources.progress.spent_usd + pool.expected_usd + reserve_usd(config, pool)


def split_by_budget(
    config: RunConfig, sources: PlanInputs, ranked: Sequence[Candidate]
) -> tuple[list[Candidate], list[Rejection]]:
    """Divide ranked pools into pools within the budget and rejections of all other pools.

    The order of the pools is unchanged.

    If no pool is within the budget, return all pools and no rejections. The pool that needs the
    smallest budget then comes first, so that the refusal can name it.

    The pool with the lowest expected cost can exceed the budget while another one does not, because
    a more expensive gang needs a larger reserve for the last checkpoint.
    """
    budget = config.cost.budget_usd
    if budget is None:
        return list(ranked), []
    borne = [pool for pool in ranked if needed_usd(config, sources, pool) <= budget]
    if not borne:
        return sorted(ranked, key=lambda pool: needed_usd(config, sources, pool)), []
    kept = set(map(id, borne))
    return borne, [_rejection(config, sources, pool) for pool in ranked if id(pool) not in kept]


def budget_hint(
    config: RunConfig, sources: PlanInputs, cheapest: Candidate, needed_usd: float
) -> str:
    """Return a hint: raise the budget to `needed_usd`, or lower the number of steps until the
    budget suffices.
    """
    enough = math.ceil(needed_usd * 100) / 100
    hint = f"set cost.budget_usd to {enough:.2f} or more"
    left = sources.steps_left(config)
    if left:
        by_step = cheapest.expected_usd / left
    else:
        by_step = 0.0
    over = needed_usd - (config.cost.budget_usd or 0.0)
    for steps in (left - math.ceil(share * over / by_step) for share in _SHARES) if by_step else ():
        if steps <= 0:
            return hint
        fewer = config.changed("training", max_steps=sources.progress.done_steps + steps)
        if _usd_on(cheapest, fewer, sources) <= (config.cost.budget_usd or 0.0):
            return f"{hint}, or training.max_steps to {fewer.training.max_steps} or fewer"
    return hint


def cheapest_without_deadline(config: RunConfig, sources: PlanInputs) -> Candidate | None:
    """Return the pool that needs the smallest budget, ignoring the deadline; None if no pool can
    run the job.
    """
    unlimited = feasible_pools(config.changed("cost", deadline_hours=None), sources)
    return min(unlimited, key=lambda pool: needed_usd(config, sources, pool), default=None)


def fastest_without_deadline(config: RunConfig, sources: PlanInputs) -> tuple[Candidate, float]:
    """Find the fastest pool, ignoring the deadline.

    Returns:
        (pool, hours). pool: the fastest pool within the budget or, if there is none, the one that
        needs the smallest budget. hours: expected hours of the fastest of all pools, whatever it
        costs.

    Raises:
        ValueError: No pool can run the job.
    """
    every = sorted(
        feasible_pools(config.changed("cost", deadline_hours=None), sources),
        key=lambda pool: pool.expected_usd,
    )
    borne = split_by_budget(config, sources, every)[0]
    first_hours = min(pool.expected_hours for pool in every)
    if (
        config.cost.budget_usd is not None
        and needed_usd(config, sources, borne[0]) > config.cost.budget_usd
    ):
        return borne[0], first_hours
    return min(borne, key=lambda pool: pool.expected_hours), first_hours


def sufficient_hours(config: RunConfig, sources: PlanInputs, pool: Candidate) -> float:
    """Return a `cost.deadline_hours` (counted from the job's start) that the pool is expected to
    meet.

    For a new job, the value is also large enough for on-demand capacity to guarantee it.
    """
    started = sources.progress.started_utc
    if started is not None:
        return pool.expected_hours + (sources.now_utc - started) / 3600
    if sources.runs_here(config):
        every = []
    else:
        every = feasible_pools(config.changed("cost", deadline_hours=None), sources)
    return max(pool.expected_hours, guaranteed_hours(config, list(every), pool, sources.now_utc))


def later_deadline_hint(hours: float) -> str:
    return f"set cost.deadline_hours to {math.ceil(hours * 100) / 100:g} or more"


def deadline_hint(config: RunConfig, sources: PlanInputs, hours: float) -> str:
    """Return a hint: extend the deadline to `hours`, or use more nodes if that meets the configured
    deadline.
    """
    hint = later_deadline_hint(hours)
    better = next(
        (text for text, changed in _larger(config) if _can_meet_deadline(changed, sources)), None
    )
    if better:
        return f"{hint}, or {better}"
    return hint


def capacity_hint(config: RunConfig, sources: PlanInputs, rejected: tuple[Rejection, ...]) -> str:
    """Return a hint: the first of several small changes of the configuration that lets a pool run
    the job.
    """
    if not rejected:
        families = sorted({kind.name.split(".")[0] for kind in sources.catalogue.types})
        return (
            f"cluster.instance_types may name any of {', '.join(families)}, or stay empty for all"
        )
    unpriced = config.cost.prices == "static" and any(
        rejection.kind == NO_SPOT_PRICE for rejection in rejected
    )
    lacking = [region for region in config.cost.regions if region not in on_demand_recorded()]
    if lacking:
        ways = [f"run {refresh_command(lacking)}"]
    else:
        ways = []
    if unpriced:
        ways += ["set cost.prices to live"]
    for text, changed in _places(config):
        if any(feasible_pools(changed, sources)):
            return ", or ".join([", ".join(ways), text] if ways else [text])
    if ways and any(
        feasible_pools(config.changed("cost", regions=[ON_DEMAND_REGION], zones=[]), sources)
    ):
        return ", or ".join(ways)  # the queues are in another region, which only lacks a price
    for text, changed in _changes(config):
        if any(feasible_pools(changed, sources)):
            return text
    if any(rejection.kind == NO_QUEUE for rejection in rejected):
        return "add a queue with such machines to batch.queues (`ebbflow deploy` creates queues)"
    return (
        "no single change makes it fit: use a smaller model, or more nodes and gradient "
        "accumulation together"
    )


def find_refusal(
    config: RunConfig, sources: PlanInputs, ranked: list[Candidate], rejected: tuple[Rejection, ...]
) -> PlanRefusal | None:
    """Return the reason why the job must not start in the best pool, `ranked[0]`; None if it may
    start.
    """
    if ranked:
        return _over_budget(config, sources, ranked[0]) or _unguaranteed(
            config, sources, ranked, rejected
        )
    late = [rejection for rejection in rejected if rejection.kind == MISSES_DEADLINE]
    if late:
        fastest = min(late, key=lambda rejection: rejection.excess)
        message = f"no pool meets the deadline; the fastest, {fastest}, {fastest.reason}"
        pool, first_hours = fastest_without_deadline(config, sources)
        hours = sufficient_hours(config, sources, pool)
        needed = needed_usd(config, sources, pool)
        if pool.market == "on_demand":
            # A new job must also be guaranteed within the budget
            needed = max(needed, sources.progress.spent_usd + finish_usd(config, pool))
        budget = config.cost.budget_usd
        hint = deadline_hint(config, sources, hours)
        if budget is not None and needed > budget:
            message += (
                f". The budget is exceeded as well: {pool} would need ${needed:.4f} of "
                f"${budget:.4f}"
            )
            hint = (
                f"{later_deadline_hint(hours)}, and cost.budget_usd to "
                f"{math.ceil(needed * 100) / 100:.2f} or more"
            )
        elif pool.expected_hours > first_hours:
            message += (
                f". The fastest within the budget, {pool}, would need {pool.expected_hours:.4g} h"
            )
        return PlanRefusal(outcome=Outcome.DEADLINE, message=message, hint=hint, enough=hours)
    hint = capacity_hint(config, sources, rejected)
    return PlanRefusal(
        outcome=Outcome.NO_CAPACITY, message=_nothing_fits(config, rejected), hint=hint
    )


def refuse_unlikely(
    config: RunConfig, sources: PlanInputs, ranked: Sequence[Candidate]
) -> PlanRefusal | None:
    """Refuse a new job that has only Spot pools and is unlikely to meet its deadline.

    It is unlikely below a probability of `cost.confidence`. Return None if the job may start.

    With an on-demand pool to fall back to, the guarantee of that pool decides (`guarantee`), and
    `warn_unlikely` says what the probability is. A job that has started, or that runs on this
    machine, is never refused.
    """
    started = sources.progress.started_utc is not None
    if started or sources.runs_here(config):
        return None
    if not _is_unlikely(config, ranked) or _falls_back(ranked):
        return None
    deadline = config.cost.deadline_hours
    chance = chance_in_time(ranked[0])
    message = (
        f"{ranked[0]} meets the deadline of {deadline:g} h with {chance:.1%}, without on-demand "
        f"capacity to fall back to; cost.confidence asks for {config.cost.confidence:.1%}"
    )
    ways = []
    if config.cluster.market == "spot":
        free = config.changed("cluster", market="auto")
        if _best_chance(free, sources) >= config.cost.confidence:
            ways.append("set cluster.market to auto, so that on-demand takes over in time")
    elif sources.queues is not None:
        ways.append("add a queue of on-demand machines to batch.queues")
    enough = _likely_hours(config, sources)
    if enough is not None:
        ways.append(later_deadline_hint(enough))
    accepted = math.floor(chance * 100) / 100
    if accepted > 0:
        ways.append(f"set cost.confidence to {accepted:g} to accept this chance")
    hint = ", or ".join(ways) or "use faster or more machines (cluster.nodes)"
    return PlanRefusal(outcome=Outcome.DEADLINE, message=message, hint=hint, enough=enough)


def warn_unlikely(
    config: RunConfig, sources: PlanInputs, ranked: Sequence[Candidate]
) -> str | None:
    """Return a warning if a job with a fallback to on-demand is unlikely to meet its deadline.

    It is unlikely below a probability of `cost.confidence`. Return None if there is no warning.
    """
    if not _is_unlikely(config, ranked) or not _falls_back(ranked):
        return None
    best = ranked[0]
    enough = _likely_hours(config, sources)
    if enough is None:
        hint = ""
    else:
        hint = f"; fix: {later_deadline_hint(enough)}"
    why = "on-demand takes over in time at the planned speed, which is uncertain"
    if best.market == "on_demand":
        why = "its speed, which is uncertain, decides"
    return (
        f"! P(in time) {chance_in_time(best):.1%} is below cost.confidence, "
        f"{config.cost.confidence:.1%}: {why} ({best.speed_kind}){hint}"
    )


def _is_unlikely(config: RunConfig, ranked: Sequence[Candidate]) -> bool:
    if config.cost.deadline_hours is None or not ranked or ranked[0].outlook is None:
        return False
    return chance_in_time(ranked[0]) < config.cost.confidence


def _falls_back(ranked: Sequence[Candidate]) -> bool:
    return any(pool.market == "on_demand" for pool in ranked)


def _likely_hours(config: RunConfig, sources: PlanInputs) -> float | None:
    """Find a `cost.deadline_hours` that the job meets with a probability of `cost.confidence`.

    Return None if none of the values that are tried is enough.
    """
    for factor in _LONGER:
        hours = math.ceil((config.cost.deadline_hours or 0.0) * factor * 100) / 100
        longer = config.changed("cost", deadline_hours=hours)
        if _best_chance(longer, sources) >= config.cost.confidence:
            return hours
    return None


def _best_chance(config: RunConfig, sources: PlanInputs) -> float:
    """Return the highest simulated probability to meet the deadline in any of several pools.

    These are the cheapest and the fastest pools. Return 0 if no pool can run the job or guarantee
    the deadline.
    """
    pools = sorted(feasible_pools(config, sources), key=lambda pool: pool.expected_usd)
    pools = split_by_budget(config, sources, pools)[0]
    if not pools or _unguaranteed(config, sources, pools, ()) is not None:
        return 0.0
    forecaster = Forecaster(config, sources, pools)
    tried = [*pools[:_TRIED_POOLS], min(pools, key=lambda pool: pool.expected_hours)]
    return max(chance_in_time(forecaster.simulate(pool)) for pool in tried)


def _rejection(config: RunConfig, sources: PlanInputs, pool: Candidate) -> Rejection:
    budget = config.cost.budget_usd or 0.0
    spent = sources.progress.spent_usd
    needed = needed_usd(config, sources, pool)
    reason = (
        f"needs ${needed:.4f} = ${pool.expected_usd:.4f} + ${reserve_usd(config, pool):.4f} "
        f"{describe_reserve(PriceWatch.of(config), pool, config.cluster.plan_for)}"
        + (f" + ${spent:.4f} spent so far" if spent else "")
        + f", cost.budget_usd is ${budget:.4f}"
    )
    where = {name: getattr(pool, name) for name in Pool.__dataclass_fields__}
    return Rejection(
        **where, kind=OVER_BUDGET, reason=reason, excess=needed / budget if budget else needed
    )


def _usd_on(pool: Candidate, config: RunConfig, sources: PlanInputs) -> float:
    """Return the smallest sufficient budget for the pool's instance type and region; infinity if
    there is none.
    """
    config = config.changed("cluster", instance_types=[pool.instance_type])
    config = config.changed("cost", regions=[pool.region])
    return min(
        (needed_usd(config, sources, pool) for pool in feasible_pools(config, sources)),
        default=math.inf,
    )


def _can_meet_deadline(config: RunConfig, sources: PlanInputs) -> bool:
    pools = list(feasible_pools(config, sources))
    return bool(pools) and _unguaranteed(config, sources, pools, ()) is None


def _places(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    cost = config.cost
    if cost.zones:
        yield "leave cost.zones empty", config.changed("cost", zones=[])
    where_queues_are = config.cluster.plan_for == "batch" and config.batch.region is not None
    if ON_DEMAND_REGION not in cost.regions and not where_queues_are:
        regions = [*cost.regions, ON_DEMAND_REGION]
        yield (
            f"add {ON_DEMAND_REGION} to cost.regions",
            config.changed("cost", regions=regions, zones=[]),
        )


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    cluster = config.cluster
    accumulation = config.training.gradient_accumulation_steps
    chunk = _loss_chunk(config)
    if chunk:
        yield _apply(config, chunk)
    others = [
        *_precision_and_mode(config),
        *_smaller_micro_batches(config),
        *_recomputation(config),
    ]
    for change in others:
        yield _apply(config, [*chunk, change])
    if cluster.processes_per_node != "auto":
        text = "set cluster.processes_per_node to auto: one rank per GPU"
        yield text, config.changed("cluster", processes_per_node="auto")
    yield from _larger(config)
    if cluster.market != "auto":
        yield "set cluster.market to auto", config.changed("cluster", market="auto")
    if cluster.instance_types:
        yield "leave cluster.instance_types empty", config.changed("cluster", instance_types=[])
    if cluster.processes_per_node == "auto":
        ranks = 1
    else:
        ranks = cluster.processes_per_node
    for nodes in AUTO_NODES:
        size = nodes * ranks * accumulation
        if size >= config.training.batch_size or config.training.batch_size % size:
            batch = math.ceil(config.training.batch_size / size) * size
            changed = config.changed("training", batch_size=batch).changed("cluster", nodes=nodes)
            yield f"set training.batch_size to {batch} and cluster.nodes to {nodes}", changed
    yield from _memory_changes_together(config)


def _loss_chunk(config: RunConfig) -> list[tuple[str, object]]:
    if config.user_code is not None or config.training.loss_chunk_tokens is not None:
        return []
    return [("training.loss_chunk_tokens", choose_loss_chunk(config.model.vocab_size))]


def _precision_and_mode(config: RunConfig) -> list[tuple[str, object]]:
    changes: list[tuple[str, object]] = []
    if config.fsdp.use_mixed_precision is False:
        changes.append(("fsdp.use_mixed_precision", True))
    if config.parallel.mode == "ddp":
        changes.append(("parallel.mode", "fsdp2"))
    return changes


def _smaller_micro_batches(config: RunConfig) -> list[tuple[str, object]]:
    accumulation = config.training.gradient_accumulation_steps
    return [
        ("training.gradient_accumulation_steps", accumulation * factor)
        for factor in _ACCUMULATION_FACTORS
    ]


def _recomputation(config: RunConfig) -> list[tuple[str, object]]:
    if config.parallel.recompute == "full":
        return []
    return [("parallel.recompute", "full")]


def _memory_changes_together(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield growing combinations of the changes that save GPU memory.

    Smaller micro-batches follow, and at last offloading, which is slow.
    """
    changes = [*_loss_chunk(config), *_precision_and_mode(config), *_recomputation(config)]
    smaller = _smaller_micro_batches(config)
    for count in range(2, len(changes) + 1):
        yield _apply(config, changes[:count])
    for change in smaller:
        yield _apply(config, [*changes, change])
    if not config.fsdp.cpu_offload:
        offload = ("fsdp.cpu_offload", True)
        yield _apply(config, [*changes, offload])
        for change in smaller:
            yield _apply(config, [*changes, offload, change])


def _apply(config: RunConfig, changes: Sequence[tuple[str, object]]) -> tuple[str, RunConfig]:
    """Return the changes as a hint, and the changed configuration."""
    texts = []
    for key, value in changes:
        section, _, name = key.partition(".")
        config = config.changed(section, **{name: value})
        texts.append(f"{key} to {str(value).lower()}")
    return f"set {', '.join(texts)}", config


def _larger(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    nodes = config.cluster.nodes
    if nodes == "auto":
        return
    for more in AUTO_NODES:
        if more > nodes:
            yield f"set cluster.nodes to {more}", config.changed("cluster", nodes=more)
    if config.cluster.processes_per_node != "auto":
        for more in AUTO_NODES:
            text = (
                f"set cluster.nodes to {more} and cluster.processes_per_node to auto: one rank "
                "per GPU"
            )
            yield text, config.changed("cluster", nodes=more, processes_per_node="auto")


def _unguaranteed(
    config: RunConfig, sources: PlanInputs, ranked: list[Candidate], rejected: tuple[Rejection, ...]
) -> PlanRefusal | None:
    """Refuse a new job whose deadline cannot be guaranteed.

    Never refuse a job that has started or runs locally.
    """
    left = sources.hours_left(config)
    budget = config.cost.budget_usd
    started = sources.progress.started_utc
    if left is None or started is not None or sources.runs_here(config):
        return None
    if budget is None:
        usd_left = math.inf
    else:
        usd_left = budget - sources.progress.spent_usd
    found = refuse_unguaranteed(
        config, ranked, rejected, now_utc=sources.now_utc, hours_left=left, usd_left=usd_left
    )
    if found is None:
        return None
    return PlanRefusal(**found)


def _over_budget(config: RunConfig, sources: PlanInputs, cheapest: Candidate) -> PlanRefusal | None:
    budget = config.cost.budget_usd
    spent = sources.progress.spent_usd
    needed = needed_usd(config, sources, cheapest)
    if budget is None or needed <= budget:
        return None
    other = cheapest.storage_usd + cheapest.transfer_usd
    with_volume = " with its volume" if cheapest.price.volume_usd_per_hour else ""
    message = (
        f"cost.budget_usd is ${budget:.4f}; the cheapest pool that can do it, {cheapest}, needs "
        f"${needed:.4f} = {cheapest.paid_hours:.4g} h × {cheapest.nodes} × "
        f"${cheapest.price.node_usd_float:.4f}/h{with_volume} + ${other:.4f} storage and transfer + "
        f"${reserve_usd(config, cheapest):.4f} "
        f"{describe_reserve(PriceWatch.of(config), cheapest, config.cluster.plan_for)}"
        + (f" + ${spent:.4f} spent so far" if spent else "")
    )
    hint = budget_hint(config, sources, cheapest, needed)
    if (
        config.cost.deadline_hours is not None
        and (slow := cheapest_without_deadline(config, sources)) is not None
    ):
        total = needed_usd(config, sources, slow)
        if total <= budget:
            message += (
                f". The deadline matters as well: {slow} would need ${total:.4f} and "
                f"{slow.expected_hours:.4g} h"
            )
    return PlanRefusal(outcome=Outcome.BUDGET, message=message, hint=hint, enough=needed)


def _nothing_fits(config: RunConfig, rejected: tuple[Rejection, ...]) -> str:
    if not rejected:
        return (
            "cluster.instance_types: no instance type of the catalogue begins with "
            f"{', '.join(config.cluster.instance_types)}"
        )
    nearest = min(rejected, key=_distance)
    return (
        f"none of {len(rejected)} pools can run the job; the nearest, {nearest}: {nearest.reason}"
    )


def _distance(rejection: Rejection) -> tuple[int, float]:
    """Return a sort key that puts the pools first that are closest to being usable.

    These are pools without a queue or a price, then pools with too little memory, then all others.
    """
    wanting = (
        NO_QUEUE,
        NO_SPOT_PRICE,
        NO_ON_DEMAND_PRICE,
        ELSEWHERE,
        "does not fit",
    )
    return wanting.index(rejection.kind) if rejection.kind in wanting else len(
        wanting
    ), rejection.excess

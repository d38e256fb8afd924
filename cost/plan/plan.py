"""Rank the pools that can run a job, and decide whether the job may start.

`make_plan` checks every pool that the configuration allows: a pool is ranked by its expected dollars, or rejected with
the reason. The plan is refused if no pool can run the job, if no pool meets the deadline, or if the cheapest pool
exceeds the budget. A refusal shows the numbers and the smallest changes of the configuration that would lift it.

A local run needs no pool. Its plan is made as for Kubernetes, which allows both markets and any number of nodes, and
the run is priced as if it ran in the chosen pool (`simulated`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbflow.cost.catalogue import ON_DEMAND_REGION, RATES_KIND, Catalogue, load_catalogue, on_demand_recorded
from ebbflow.cost.errors import PlanError
from ebbflow.cost.job_history import JobHistory
from ebbflow.cost.plan.candidates import (
    AUTO_NODES,
    ELSEWHERE,
    HAZARD_UNKNOWN,
    MISSES_DEADLINE,
    NO_ON_DEMAND_PRICE,
    NO_PROGRESS,
    NO_QUEUE,
    NO_SPOT_PRICE,
    Candidate,
    JobProgress,
    PlanInputs,
    Pool,
    Rejection,
    feasible_pools,
    judge_pools,
    short_queue_name,
)
from ebbflow.cost.plan.forecast import forecast_quantiles
from ebbflow.cost.plan.throughput import speed_fingerprint
from ebbflow.cost.prices.quote import PriceSource, StaticPrices, refresh_command
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import Outcome
from ebbflow.infra.footprint import ModelShape, causal_lm_shape
from ebbflow.infra.terms import Terms

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState


OVER_BUDGET = "over the budget"


def reserve_usd(config: RunConfig, pool: Candidate) -> float:
    """Return the dollars kept for the last checkpoint: the price of all nodes for `checkpoint.deadline_seconds`."""
    return pool.gang_usd_per_hour * config.checkpoint.deadline_seconds / 3600


def needed_usd(config: RunConfig, sources: PlanInputs, pool: Candidate) -> float:
    """Return the budget that the whole job needs, in dollars, if it continues in this pool."""
    return sources.progress.spent_usd + pool.expected_usd + reserve_usd(config, pool)


def split_by_budget(
    config: RunConfig, sources: PlanInputs, ranked: Sequence[Candidate]
) -> tuple[list[Candidate], list[Rejection]]:
    """Split ranked pools into those within the budget, in their order, and rejections of all others.

    If no pool is within the budget, return all pools and no rejections. The pool that needs the smallest budget then
    comes first, so that the refusal can name it.

    The pool with the lowest expected cost can exceed the budget while another one does not: the more expensive the
    gang, the more is reserved for the last checkpoint.
    """
    budget = config.cost.budget_usd
    if budget is None:
        return list(ranked), []
    borne = [pool for pool in ranked if needed_usd(config, sources, pool) <= budget]
    if not borne:
        return sorted(ranked, key=lambda pool: needed_usd(config, sources, pool)), []
    kept = set(map(id, borne))
    return borne, [_rejection(config, sources, pool) for pool in ranked if id(pool) not in kept]


def _rejection(config: RunConfig, sources: PlanInputs, pool: Candidate) -> Rejection:
    budget, spent = config.cost.budget_usd or 0.0, sources.progress.spent_usd
    needed = needed_usd(config, sources, pool)
    reason = (
        f"needs ${needed:.4f} = ${pool.expected_usd:.4f} + ${reserve_usd(config, pool):.4f} reserve for the last save"
        + (f" + ${spent:.4f} spent so far" if spent else "")
        + f", cost.budget_usd is ${budget:.4f}"
    )
    where = {name: getattr(pool, name) for name in Pool.__dataclass_fields__}
    return Rejection(**where, kind=OVER_BUDGET, reason=reason, excess=needed / budget if budget else needed)


def budget_hint(config: RunConfig, sources: PlanInputs, cheapest: Candidate, needed_usd: float) -> str:
    """Suggest a sufficient budget (`needed_usd`), or a number of steps that the configured budget pays for."""
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


# Steps to cut, relative to the excess in prices of steps. Starts and checkpoints do not shrink with the steps.
_SHARES = (1.0, 1.01, 1.05, 1.25, 1.5, 2.0)


def _usd_on(pool: Candidate, config: RunConfig, sources: PlanInputs) -> float:
    """Return the budget that the job needs on the pool's instance type and region; infinite if it cannot run there."""
    config = _changed(config, "cluster", instance_types=[pool.instance_type])
    config = _changed(config, "cost", regions=[pool.region])
    return min((needed_usd(config, sources, one) for one in feasible_pools(config, sources)), default=math.inf)


def cheapest_without_deadline(config: RunConfig, sources: PlanInputs) -> Candidate | None:
    """Return the pool that needs the smallest budget if the deadline is ignored; None if no pool can run the job."""
    unlimited = feasible_pools(_changed(config, "cost", deadline_hours=None), sources)
    return min(unlimited, key=lambda one: needed_usd(config, sources, one), default=None)


def fastest_without_deadline(config: RunConfig, sources: PlanInputs) -> tuple[Candidate, float]:
    """Find the fastest pools if the deadline is ignored.

    Returns:
        The fastest pool within the budget, and the expected hours of the fastest pool at any price. If no pool is
        within the budget, the pool that needs the smallest budget, and the same hours.

    Raises:
        ValueError: No pool can run the job.
    """
    every = sorted(
        feasible_pools(_changed(config, "cost", deadline_hours=None), sources), key=lambda one: one.expected_usd
    )
    borne, first_hours = split_by_budget(config, sources, every)[0], min(one.expected_hours for one in every)
    if config.cost.budget_usd is not None and needed_usd(config, sources, borne[0]) > config.cost.budget_usd:
        return borne[0], first_hours
    return min(borne, key=lambda one: one.expected_hours), first_hours


def sufficient_hours(sources: PlanInputs, pool: Candidate) -> float:
    """Return a value for `cost.deadline_hours`, counted from the job's start, that the pool is expected to meet."""
    started = sources.progress.started_utc
    return pool.expected_hours + (0.0 if started is None else (sources.now_utc - started) / 3600)


def later_deadline_hint(hours: float) -> str:
    return f"set cost.deadline_hours to {math.ceil(hours * 100) / 100:g} or more"


def deadline_hint(config: RunConfig, sources: PlanInputs, hours: float) -> str:
    """Suggest a deadline of `hours`, or a larger number of nodes that meets the configured deadline."""
    hint = later_deadline_hint(hours)
    better = next((text for text, changed in _larger(config) if any(feasible_pools(changed, sources))), None)
    return f"{hint}, or {better}" if better else hint


def capacity_hint(config: RunConfig, sources: PlanInputs, rejected: tuple[Rejection, ...]) -> str:
    """Suggest the first small change of the configuration that allows at least one pool to run the job."""
    if not rejected:
        families = sorted({kind.name.split(".")[0] for kind in sources.catalogue.types})
        return f"cluster.instance_types may name any of {', '.join(families)}, or stay empty for all"
    unpriced = config.cost.prices == "static" and any(rejection.kind == NO_SPOT_PRICE for rejection in rejected)
    lacking = [region for region in config.cost.regions if region not in on_demand_recorded()]
    ways = [f"run {refresh_command(lacking)}"] if lacking else []
    ways += ["set cost.prices to live"] if unpriced else []
    for text, changed in _places(config):
        if any(feasible_pools(changed, sources)):
            return ", or ".join([", ".join(ways), text] if ways else [text])
    if ways and any(feasible_pools(_changed(config, "cost", regions=[ON_DEMAND_REGION], zones=[]), sources)):
        return ", or ".join(ways)  # the queues are in another region, which only lacks a price
    for text, changed in _changes(config):
        if any(feasible_pools(changed, sources)):
            return text
    if any(rejection.kind == NO_QUEUE for rejection in rejected):
        return "add a queue with such machines to batch.queues (`ebbflow deploy` creates queues)"
    return "no single change makes it fit: use a smaller model, or more nodes and gradient accumulation together"


def _places(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    cost = config.cost
    if cost.zones:
        yield "leave cost.zones empty", _changed(config, "cost", zones=[])
    where_queues_are = config.cluster.plan_for == "batch" and config.batch.region is not None
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
class PlanRefusal:
    """The reason why a job must not start.

    Attributes:
        outcome: Deadline exceeded, budget exceeded, or no capacity.
        message: The numbers that led to the refusal.
        hint: A change of the configuration that would allow the job.
        enough: Smallest sufficient deadline in hours or budget in dollars, whichever is exceeded; None if there is no
            capacity.
    """

    outcome: Outcome
    message: str
    hint: str
    enough: float | None = None


def find_refusal(
    config: RunConfig,
    sources: PlanInputs,
    ranked: list[Candidate],
    rejected: tuple[Rejection, ...],
) -> PlanRefusal | None:
    """Return the reason why the job must not start in the cheapest pool, `ranked[0]`; None if it may start."""
    if ranked:
        return _over_budget(config, sources, ranked[0])
    late = [rejection for rejection in rejected if rejection.kind == MISSES_DEADLINE]
    if late:
        fastest = min(late, key=lambda rejection: rejection.excess)
        message = f"no pool meets the deadline; the fastest, {fastest}, {fastest.reason}"
        pool, first_hours = fastest_without_deadline(config, sources)
        hours = sufficient_hours(sources, pool)
        needed, budget = needed_usd(config, sources, pool), config.cost.budget_usd
        hint = deadline_hint(config, sources, hours)
        if budget is not None and needed > budget:
            message += f". The budget is exceeded as well: {pool} would need ${needed:.4f} of ${budget:.4f}"
            hint = f"{later_deadline_hint(hours)}, and cost.budget_usd to {math.ceil(needed * 100) / 100:.2f} or more"
        elif pool.expected_hours > first_hours:
            message += f". The fastest within the budget, {pool}, would need {pool.expected_hours:.4g} h"
        return PlanRefusal(outcome=Outcome.DEADLINE, message=message, hint=hint, enough=hours)
    hint = capacity_hint(config, sources, rejected)
    return PlanRefusal(outcome=Outcome.NO_CAPACITY, message=_nothing_fits(config, rejected), hint=hint)


def _over_budget(config: RunConfig, sources: PlanInputs, cheapest: Candidate) -> PlanRefusal | None:
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
            message += f". The deadline matters as well: {slow} would need ${total:.4f} and {slow.expected_hours:.4g} h"
    return PlanRefusal(outcome=Outcome.BUDGET, message=message, hint=hint, enough=needed)


def _nothing_fits(config: RunConfig, rejected: tuple[Rejection, ...]) -> str:
    if not rejected:
        return f"no instance type of the catalogue begins with {', '.join(config.cluster.instance_types)}"
    nearest = min(rejected, key=_distance)
    return f"none of {len(rejected)} pools can run the job; the nearest, {nearest}: {nearest.reason}"


def _distance(rejection: Rejection) -> tuple[int, float]:
    """Return the key that sorts rejections, those closest to running the job first.

    Pools without a queue or a price come first, then pools with too little memory, then all others.
    """
    wanting = (NO_QUEUE, HAZARD_UNKNOWN, NO_SPOT_PRICE, NO_ON_DEMAND_PRICE, ELSEWHERE, "does not fit")
    return wanting.index(rejection.kind) if rejection.kind in wanting else len(wanting), rejection.excess


def plan_notes(config: RunConfig, sources: PlanInputs) -> tuple[str, ...]:
    """Return sentences that name the assumptions of the plan and the costs that it leaves out."""
    regions, rates = config.cost.regions, sources.rates
    lines = [f"storage, requests and transfer: {RATES_KIND}; NAT, logs, taxes, credits and Savings Plans are left out"]
    lacking = [region for region in regions if region not in rates.regions]
    if lacking:
        lines.append(f"storage in {', '.join(lacking)}: no list price on record, so it counts as nothing there")
    if not config.store.startswith("s3://"):
        lines.append("transfer: the store is a folder, so nothing is counted for commits and tokens")
    elif config.cost.store_region is None:
        lines.append("transfer: cost.store_region is not set, so the store is taken to lie in each pool's own region")
    else:
        away = [region for region in regions if rates.egress_usd_per_gb(region, config.cost.store_region) is None]
        if away:
            lines.append(f"transfer with {', '.join(away)}: no price on record, so it counts as nothing")
    if sources.queues is not None:
        names = ", ".join(map(short_queue_name, sources.queues))
        lines.append(f"only pools that one of these queues takes: {names}")
    if config.cluster.market != "on_demand":
        waits = "waits after a reclaim as recorded of V100, 2023; the first start is taken to be granted at once"
        lines.append(f"p50, p90 and P(deadline): simulated, staying in the pool; {waits}")
    return tuple(lines)


# 3: remaining work, dollars by kind, quantiles; a plan may be cut to its best pools.
SCHEMA = 3
# Ranked pools in the event and the artifact of a plan; the job's plan.json has all pools.
KEPT_POOLS = 12
# Ranked pools with a Monte Carlo forecast.
LOOKED_AHEAD = 100
# Key of `Plan.counts` for pools that can run the job.
RANKED = "ranked"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of planning a job: every pool that was considered, and whether the job may start.

    Attributes:
        started_utc: Unix time from which the deadline counts, that of the plan with which the job first started.
        simulated: Whether the job runs on this machine and is only priced as if it ran in the chosen pool.
        steps, tokens: Remaining work; `tokens` counts units of `weight_unit`.
        done_steps, spent_usd: Steps and dollars before this plan.
        interval: The checkpoint interval, in words.
        fingerprint: Hash of the settings that decide the speed (`throughput.speed_fingerprint`).
        reserve_usd: Part of the budget that is kept for the last checkpoint.
        prices: Sentences about the origin and the age of the prices.
        notes: Sentences about assumptions and omitted costs.
        ranked: Pools that can run the job, cheapest first.
        counts: Number of rejections by kind, and of ranked pools under `RANKED`. It is complete even if the lists are
            cut.
        on_demand: On-demand dollars per hour by instance type in the chosen pool's region, in case AWS starts another
            type than planned.
    """

    made_utc: float
    started_utc: float
    backend: str
    simulated: bool
    steps: int
    done_steps: int
    spent_usd: float
    tokens: float
    weight_unit: str
    interval: str
    fingerprint: str
    budget_usd: float | None
    deadline_hours: float | None
    reserve_usd: float
    prices: tuple[str, ...]
    notes: tuple[str, ...]
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    counts: dict[str, int]
    refusal: PlanRefusal | None
    on_demand: dict[str, str] = field(default_factory=dict)

    @property
    def chosen(self) -> Candidate | None:
        """The cheapest pool that keeps deadline and budget.

        If no pool keeps the budget, the pool that needs the smallest budget; `refusal` then says so. None if no pool
        can run the job in time.
        """
        return self.ranked[0] if self.ranked else None

    def terms(self, *, spent_usd: float = 0.0, last_notified_threshold: float = 0.0) -> Terms:
        """Return the price, budget and deadline that apply to training.

        Args:
            spent_usd: Cost of earlier attempts.
            last_notified_threshold: Largest share of the budget that earlier attempts reported as reached; 0 if none.

        Raises:
            PlanError: The plan has no pool.
        """
        if self.chosen is None:
            raise PlanError(f"a plan without a pool has no price: {self.refusal.message if self.refusal else ''}")
        return Terms(
            usd_per_rank_second=self.chosen.gang_usd_per_hour / self.chosen.ranks / 3600,
            budget_usd=self.budget_usd,
            spent_usd=spent_usd,
            reserve_usd=self.reserve_usd,
            deadline_utc=None if self.deadline_hours is None else self.started_utc + self.deadline_hours * 3600,
            hazard_per_hour=self.chosen.hazard_per_hour,
            price_kind="simulated" if self.simulated else self.chosen.price_kind.split()[0].rstrip(":"),
            last_notified_threshold=last_notified_threshold,
            step_seconds=self.chosen.step_seconds,
        )

    def as_simulated(self) -> Plan:
        """Return a copy of the plan for a run on this machine, priced as if it ran in the chosen pool."""
        return replace(self, simulated=True)

    def brief(self) -> Plan:
        """Return a copy that is small enough for an event.

        It has the best pools, and of each kind of rejection the pool that is closest to running the job.
        """
        nearest: dict[str, Rejection] = {}
        for one in self.rejected:
            if one.kind not in nearest or one.excess < nearest[one.kind].excess:
                nearest[one.kind] = one
        return replace(self, ranked=self.ranked[:KEPT_POOLS], rejected=tuple(nearest.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data. The key `kinds` describes how each figure is known."""
        chosen = None if self.chosen is None else asdict(self.chosen)
        return {"schema": SCHEMA, **asdict(self), "chosen": chosen, "kinds": figure_kinds()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Build a plan from the result of `to_json`. Raises PlanError if it has another schema."""
        if data.get("schema") != SCHEMA:
            made = f"the plan is of schema {data.get('schema')!r}, this version reads {SCHEMA}"
            raise PlanError(f"{made}: start a new run of the job, which plans anew and goes on from the last commit")
        refusal = data["refusal"]
        fields = {name: data[name] for name in cls.__dataclass_fields__ if name != "on_demand"}
        fields["on_demand"] = data.get("on_demand", {})  # missing in plans of earlier versions
        fields["ranked"] = tuple(map(Candidate.from_json, data["ranked"]))
        fields["rejected"] = tuple(Rejection(**one) for one in data["rejected"])
        fields["prices"], fields["notes"] = tuple(data["prices"]), tuple(data["notes"])
        fields["refusal"] = refusal and PlanRefusal(**{**refusal, "outcome": Outcome(refusal["outcome"])})
        return cls(**fields)


def figure_kinds() -> dict[str, str]:
    """Return how each figure of a candidate is known (such as "estimated"), by the figure's name."""
    on_demand = ", ".join(f"{day}, {region}" for region, day in on_demand_recorded().items())
    return {"on_demand_usd_per_hour": f"recorded {on_demand}", **_KINDS}


_KINDS = {
    "usd_per_hour": "as each pool's price_kind says",
    "hazard_per_hour": "as each pool's hazard_kind says",
    "fit": "estimated",
    "tokens_per_second": "measured, scaled from a measurement, or a prior (estimated), as each pool's speed_kind says",
    "storage_usd": f"estimated at {RATES_KIND}",
    "transfer_usd": f"estimated at {RATES_KIND}",
    **dict.fromkeys(("paid_hours", "expected_hours", "compute_usd", "expected_usd", "interruptions"), "estimated"),
    "outlook": "simulated",
}


def make_plan(
    config: RunConfig,
    *,
    now_utc: float,
    catalogue: Catalogue | None = None,
    simulated: bool = False,
    shape: ModelShape | None = None,
    prices: PriceSource | None = None,
    history: JobHistory | None = None,
    progress: JobProgress = NO_PROGRESS,
    queues: Mapping[str, QueueState] | None = None,
) -> Plan:
    """Rank every pool that `config` allows, and decide whether the job may start.

    The result depends on the arguments only.

    Args:
        now_utc: Unix time of the plan; prices are those in force at this time.
        catalogue: None means the shipped tables.
        simulated: Whether the job runs on this machine. The backend `local` implies it.
        shape: Size of the model. None means the built-in model.
        prices: From `cost.prices.source.open_prices`. None means the static table.
        history: Measurements of earlier jobs. None means that there are none.
        progress: Work that the job has already done. Only the rest is planned.
        queues: AWS Batch queues by name; pools that none of them can run are rejected. None means no such limit.

    Raises:
        CatalogueError: A shipped table has an invalid entry.
    """
    sources = PlanInputs(
        catalogue=load_catalogue() if catalogue is None else catalogue,
        shape=causal_lm_shape(config.model) if shape is None else shape,
        prices=StaticPrices() if prices is None else prices,
        now_utc=now_utc,
        history=JobHistory() if history is None else history,
        progress=progress,
        queues=queues,
    )
    ranked, rejected = _divided(config, sources)
    cost, steps = config.cost, sources.steps_left(config)
    return Plan(
        made_utc=now_utc,
        started_utc=progress.started_utc or now_utc,
        backend=config.cluster.plan_for,
        simulated=simulated or config.cluster.plan_for == "local",
        steps=steps,
        done_steps=progress.done_steps,
        spent_usd=progress.spent_usd,
        tokens=steps * config.training.batch_size * sources.shape.tokens_per_sample,
        weight_unit=sources.shape.weight_unit,
        interval=_interval_text(config),
        fingerprint=speed_fingerprint(config),
        budget_usd=cost.budget_usd,
        deadline_hours=cost.deadline_hours,
        reserve_usd=reserve_usd(config, ranked[0]) if ranked else 0.0,
        prices=sources.prices.describe(now_utc=now_utc, regions=cost.regions, max_age_hours=cost.max_price_age_hours),
        notes=plan_notes(config, sources),
        ranked=tuple(ranked),
        rejected=rejected,
        counts=_counts(len(ranked), rejected),
        refusal=find_refusal(config, sources, ranked, rejected),
        on_demand=_on_demand(config, sources, ranked[0].region) if ranked else {},
    )


def _divided(config: RunConfig, sources: PlanInputs) -> tuple[list[Candidate], tuple[Rejection, ...]]:
    """Return the ranked pools, cheapest first, and the rejected pools. The best pools have a forecast."""
    found = list(judge_pools(config, sources))
    ranked = sorted((one for one in found if isinstance(one, Candidate)), key=_rank)
    ranked, over = split_by_budget(config, sources, ranked)
    ranked[:LOOKED_AHEAD] = [with_outlook(one, sources.hours_left(config)) for one in ranked[:LOOKED_AHEAD]]
    return ranked, (*(one for one in found if isinstance(one, Rejection)), *over)


def _on_demand(config: RunConfig, sources: PlanInputs, region: str | None) -> dict[str, str]:
    kinds = sources.catalogue.matching(config.cluster.instance_types)
    quotes = {kind.name: sources.prices.on_demand(kind, region or "") for kind in kinds}
    return {name: f"{quote.usd_per_hour:f}" for name, quote in quotes.items() if quote is not None}


def _counts(ranked: int, rejected: tuple[Rejection, ...]) -> dict[str, int]:
    counts = {RANKED: ranked}
    for one in rejected:
        counts[one.kind] = counts.get(one.kind, 0) + 1
    return counts


def _interval_text(config: RunConfig) -> str:
    saves = config.checkpoint
    by = {"steps": f"{saves.interval_steps:,} steps", "seconds": f"{saves.interval_seconds:g} s"}
    return f"each {by[saves.interval]}" if saves.interval in by else "as measured stall and hazard have it"


def with_outlook(one: Candidate, hours_left: float | None) -> Candidate:
    """Return a copy of the pool with the forecast of its hours and dollars."""
    other = one.storage_usd + one.transfer_usd
    ahead = forecast_quantiles(
        one.case, gang_usd_per_hour=one.gang_usd_per_hour, other_usd=other, hours_left=hours_left
    )
    return replace(one, outlook=ahead)


def _rank(candidate: Candidate) -> tuple[float, int, str, str]:
    return candidate.expected_usd, candidate.nodes, candidate.instance_type, candidate.place

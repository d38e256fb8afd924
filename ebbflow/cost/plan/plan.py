"""Rank the pools that can run a job, and decide whether the job may start.

`make_plan` checks every pool that the configuration allows: a pool is ranked by its expected
dollars, or rejected with the reason. The plan is refused if no pool can run the job, if no pool
meets the deadline, or if the cheapest pool exceeds the budget. A refusal shows the numbers and the
smallest changes of the configuration that would lift it.

A local run needs no pool. It is planned like a Kubernetes run, which allows both markets and any
number of nodes, and priced as if it ran in the chosen pool (`simulated`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.footprint import ModelShape, causal_lm_shape
from ebbflow.core.terms import PriceWatch, Terms
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.catalogue import RATES_KIND, Catalogue, on_demand_recorded
from ebbflow.cost.errors import PlanError
from ebbflow.cost.job_history import JobHistory
from ebbflow.cost.kubernetes_pools import catalogue_of, default_prices
from ebbflow.cost.plan.candidates import (
    NO_PROGRESS,
    JobProgress,
    PlanInputs,
    judge_blocks,
    judge_pools,
)
from ebbflow.cost.plan.forecast import Outlook
from ebbflow.cost.plan.key_savings import KeySaving, find_key_savings
from ebbflow.cost.plan.live_forecast import DRAWS, Forecaster, chance_in_time
from ebbflow.cost.plan.pools import (
    Candidate,
    PartitionOffer,
    Rejection,
    short_queue_name,
)
from ebbflow.cost.plan.refusal import (
    PlanRefusal,
    find_refusal,
    needed_usd,
    refuse_unlikely,
    reserve_usd,
    split_by_budget,
    warn_unlikely,
)
from ebbflow.cost.plan.throughput import speed_fingerprint
from ebbflow.cost.prices.quote import PriceSource, warn_of_age
from ebbflow.cost.prices.reservations import CapacityEvidence, open_evidence

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState

# 3: remaining work, dollars by kind, quantiles; a plan may be cut to its best pools.
SCHEMA = 3
# Ranked pools in the event and the artifact of a plan; the job's plan.json has all pools.
KEPT_POOLS = 12
_KEPT_BLOCKS = 5
# Ranked pools that are simulated.
LOOKED_AHEAD = 24
# Key of `Plan.counts` for pools that can run the job.
RANKED = "ranked"

_KINDS = {
    "usd_per_hour": "as each pool's price_kind says",
    "volume_usd_per_hour": f"estimated at {RATES_KIND}",
    "hazard_per_hour": "as each pool's hazard_kind says",
    "fit": "estimated",
    "tokens_per_second": (
        "measured, scaled from a measurement, or a prior (estimated), as each pool's speed_kind "
        "says"
    ),
    "storage_usd": f"estimated at {RATES_KIND}",
    "transfer_usd": f"estimated at {RATES_KIND}",
    **dict.fromkeys(
        ("paid_hours", "expected_hours", "compute_usd", "expected_usd", "interruptions"),
        "estimated",
    ),
    "outlook": "simulated",
}


@dataclass(frozen=True, kw_only=True)
class OnDemandChoice:
    """The cheapest on-demand pool that meets the deadline: what the job costs without Spot."""

    pool: str
    usd: float
    hours: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a job: every pool that was considered, and whether the job may start."""

    made_utc: float
    # Unix time from which the deadline counts: the time of the plan with which the job first
    # started
    started_utc: float
    backend: str
    # Whether the job runs on this machine and is only priced as if it ran in the chosen pool
    simulated: bool
    # steps, tokens: remaining work. `weight_unit` says what `tokens` counts, such as tokens or
    # images.
    steps: int
    # done_steps, spent_usd: steps done and dollars spent before this plan
    done_steps: int
    spent_usd: float
    tokens: float
    weight_unit: str
    interval: str  # the checkpoint interval, in words
    fingerprint: str  # hash of the settings that decide the speed (`throughput.speed_fingerprint`)
    budget_usd: float | None
    deadline_hours: float | None
    # reserve_usd, reserve_seconds: part of the budget and of the time that is kept for the last
    # checkpoint; the dollars also for a rise of the price that is not known yet, and for the time
    # for which AWS Batch keeps machines, which the expected dollars leave out
    reserve_usd: float
    prices: tuple[str, ...]  # sentences about the origin and age of the prices
    notes: tuple[str, ...]  # sentences about assumptions and omitted costs
    # pools that can run the job, in the order of their expected dollars. Pools that would probably
    # miss the deadline (`cost.confidence`) come later.
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    # number of rejected pools by kind of rejection, and number of ranked pools under the key
    # `RANKED`. The counts are complete even if `ranked` and `rejected` are shortened.
    counts: dict[str, int]
    refusal: PlanRefusal | None
    # on-demand dollars per hour of each instance type in the chosen pool's region. They are needed
    # if AWS starts another type than planned.
    on_demand: dict[str, str] = field(default_factory=dict)
    # Capacity Blocks for sale that can run the job, cheapest first; none of them is chosen
    blocks: tuple[Candidate, ...] = ()
    reserve_seconds: float = 0.0
    cheapest_on_demand: OnDemandChoice | None = None
    # On Slurm, the partitions, the preferred one first; a plan on Slurm has no other pools
    partitions: tuple[PartitionOffer, ...] = ()
    key_savings: tuple[KeySaving, ...] = ()  # other values of keys that would save more than 5 %
    price_seconds: float = 0.0  # `cost.price_seconds` if Spot prices are watched, else 0

    @property
    def price_watch(self) -> PriceWatch:
        return PriceWatch(self.price_seconds, self.budget_usd)

    def with_sources(self, sources: Mapping[str, str]) -> Plan:
        """Return the plan with a refusal that shows where the user set the keys that it names."""
        if self.refusal is None:
            return self
        return replace(self, refusal=self.refusal.with_sources(sources))

    @property
    def chosen(self) -> Candidate | None:
        """The best pool that meets the deadline and the budget.

        If every pool exceeds the budget, this is the pool that needs the smallest budget, and
        `refusal` gives the reason. None if no pool can run the job in time.
        """
        if self.ranked:
            return self.ranked[0]
        return None

    @property
    def costs_money(self) -> bool:
        """Whether a run of the plan costs money, as far as is known."""
        if self.backend == "slurm":
            return any(offer.usd_per_node_hour is not None for offer in self.partitions)
        return not self.simulated

    @property
    def live(self) -> Outlook | None:
        """The forecast that gives the plan's hours, dollars and P(in time).

        None without a pool, for a job without work, or if the plan is refused for its budget.
        """
        if self.chosen is None:
            return None
        return self.chosen.outlook

    def terms(self, *, spent_usd: float = 0.0, last_notified_threshold: float = 0.0) -> Terms:
        """Return the price, budget and deadline that apply to training.

        Args:
            spent_usd: Cost of earlier attempts.
            last_notified_threshold: Largest share of the budget that earlier attempts reported as
                reached; 0 if none.

        Raises:
            PlanError: The plan has no pool.
        """
        if self.chosen is None:
            raise PlanError(
                "a plan without a pool has no price: "
                f"{self.refusal.message if self.refusal else ''}"
            )
        return Terms(
            usd_per_rank_second=self.chosen.gang_usd_per_hour / self.chosen.ranks / 3600,
            budget_usd=self.budget_usd,
            spent_usd=spent_usd,
            reserve_usd=self.reserve_usd,
            reserve_seconds=self.reserve_seconds,
            end_utc=None if self.simulated else self.chosen.ends_utc,
            deadline_utc=None
            if self.deadline_hours is None
            else self.started_utc + self.deadline_hours * 3600,
            hazard_per_hour=self.chosen.hazard_per_hour,
            price_kind="simulated"
            if self.simulated
            else self.chosen.price.kind.split()[0].rstrip(":"),
            last_notified_threshold=last_notified_threshold,
            step_seconds=self.chosen.step_seconds,
            price_look_seconds=self.price_watch.look_seconds(self.chosen.gang_usd_per_hour)
            if self.chosen.market == "spot"
            else 0.0,
        )

    def brief(self) -> Plan:
        """Return a copy that is small enough to record as an event.

        It keeps the best pools and, for each kind of rejection, the pool that is closest to running
        the job.
        """
        nearest: dict[str, Rejection] = {}
        for rejection in self.rejected:
            if rejection.kind not in nearest or rejection.excess < nearest[rejection.kind].excess:
                nearest[rejection.kind] = rejection
        return replace(self, ranked=self.ranked[:KEPT_POOLS], rejected=tuple(nearest.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data.

        The key `kinds` names the source of each figure, such as "estimated".
        """
        if self.chosen is None:
            chosen = None
        else:
            chosen = self.chosen.to_json()
        return {
            "schema": SCHEMA,
            **asdict(self),
            "ranked": tuple(candidate.to_json() for candidate in self.ranked),
            "blocks": tuple(candidate.to_json() for candidate in self.blocks),
            "chosen": chosen,
            "kinds": figure_kinds(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Build a plan from the result of `to_json`. Raises PlanError if it has another schema."""
        if data.get("schema") != SCHEMA:
            made = f"the plan is of schema {data.get('schema')!r}, this version reads {SCHEMA}"
            raise PlanError(
                f"{made}: start a new run of the job, which plans anew and goes on from the last "
                "commit"
            )
        refusal = data["refusal"]
        # Missing in plans of earlier versions
        late = (
            "on_demand",
            "blocks",
            "reserve_seconds",
            "cheapest_on_demand",
            "partitions",
            "key_savings",
            "price_seconds",
        )
        fields = {name: data[name] for name in cls.__dataclass_fields__ if name not in late}
        fields["on_demand"] = data.get("on_demand", {})
        choice = data.get("cheapest_on_demand")
        fields["cheapest_on_demand"] = choice and OnDemandChoice(**choice)
        fields["key_savings"] = tuple(KeySaving(**saving) for saving in data.get("key_savings", ()))
        fields["price_seconds"] = data.get("price_seconds", 0.0)
        fields["blocks"] = tuple(map(Candidate.from_json, data.get("blocks", ())))
        fields["ranked"] = tuple(map(Candidate.from_json, data["ranked"]))
        offers = data.get("partitions", ())
        fields["partitions"] = tuple(PartitionOffer(**offer) for offer in offers)
        if fields["ranked"]:
            rate = fields["ranked"][0].gang_usd_per_hour
        else:
            rate = 0.0
        if rate:
            reserve = data["reserve_usd"] * 3600 / rate
        else:
            reserve = 0.0
        fields["reserve_seconds"] = data.get("reserve_seconds", reserve)
        fields["rejected"] = tuple(Rejection(**rejection) for rejection in data["rejected"])
        fields["prices"] = tuple(data["prices"])
        fields["notes"] = tuple(data["notes"])
        fields["refusal"] = refusal and PlanRefusal(
            **{**refusal, "outcome": Outcome(refusal["outcome"])}
        )
        return cls(**fields)


def plan_notes(config: RunConfig, sources: PlanInputs) -> tuple[str, ...]:
    """Return one note per assumption of the plan, and one per kind of cost that the plan leaves
    out.
    """
    regions = config.cost.regions
    rates = sources.rates
    lines = [
        f"storage, requests and transfer: {RATES_KIND}; NAT, logs, taxes, credits and Savings "
        "Plans are left out"
    ]
    lacking = [region for region in regions if region not in rates.regions]
    if lacking:
        lines.append(
            f"storage and volumes in {', '.join(lacking)}: no list price on record, so they count "
            "as nothing there"
        )
    if not config.store.startswith("s3://"):
        lines.append(
            "transfer: the store is a folder, so nothing is counted for commits and tokens"
        )
    elif config.cost.store_region is None:
        lines.append(
            "transfer: cost.store_region is not set, so the store is taken to lie in each pool's "
            "own region"
        )
    else:
        away = [
            region
            for region in regions
            if rates.egress_usd_per_gb(region, config.cost.store_region) is None
        ]
        if away:
            lines.append(
                f"transfer with {', '.join(away)}: no price on record, so it counts as nothing"
            )
    if config.training.deterministic == "strict":
        lines.append(
            "speed: as with training.deterministic auto, but strict slows down attention's backward "
            "pass on GPUs, by how much was not measured"
        )
    if sources.queues is not None:
        names = ", ".join(map(short_queue_name, sources.queues))
        lines.append(f"only pools that one of these queues takes: {names}")
    if config.cost.deadline_hours is not None:
        likely = f"P(in time) of cost.confidence, {config.cost.confidence:.0%}, or more"
        lines.append(
            f"rank: pools with {likely}, by dollars; then the others by dollars / P(in time)"
        )
    if config.cluster.market != "on_demand":
        lines.append(
            "hours, dollars and P(in time): simulated with Spot capacity as recorded in nine zones "
            "(V100, 2023) and twice their spread, until own jobs ran in the pool; other GPUs, gangs "
            "and years may differ"
        )
    if sources.shape.kind == "unknown":
        lines.append(
            "the script was not measured: its steps, hours and dollars are not known, and not these"
        )
    lines += [one_line(note) for note in sources.evidence.notes]
    if sources.evidence.scores:
        lines.append(
            "Spot placement scores ÷ 10 count as the chance that a first start is granted at "
            "once (assumed)"
        )
    old = warn_of_age(sources.now_utc, regions)
    if old:
        return (*lines, old)
    return tuple(lines)


def describe_interval(config: RunConfig) -> str:
    """Render the checkpoint interval."""
    saves = config.checkpoint
    by = {"steps": f"{saves.interval_steps:,} steps", "seconds": f"{saves.interval_seconds:g} s"}
    if saves.interval in by:
        return f"each {by[saves.interval]}"
    return "as measured stall and hazard have it"


def figure_kinds() -> dict[str, str]:
    """Return the source of each figure of a `Candidate`, such as "estimated", by the name of the
    figure.
    """
    on_demand = ", ".join(f"{day}, {region}" for region, day in on_demand_recorded().items())
    return {"on_demand_usd_per_hour": f"recorded {on_demand}", **_KINDS}


# All but two arguments are optional sources, which callers give by name.
def make_plan(  # noqa: PLR0913
    config: RunConfig,
    *,
    now_utc: float,
    catalogue: Catalogue | None = None,
    simulated: bool | None = None,
    shape: ModelShape | None = None,
    prices: PriceSource | None = None,
    history: JobHistory | None = None,
    progress: JobProgress = NO_PROGRESS,
    queues: Mapping[str, QueueState] | None = None,
    evidence: CapacityEvidence | None = None,
    compare_keys: bool = False,
) -> Plan:
    """Rank every pool that `config` allows, and decide whether the job may start.

    Equal arguments give equal plans.

    Args:
        now_utc: Unix time of the plan; the prices in force at this time apply.
        catalogue: None means the shipped tables.
        simulated: Whether the job runs on this machine as if it ran in the chosen pool. None means that
            it does if the backend is `local`.
        shape: Size of the model. None means the built-in model.
        prices: From `cost.prices.source.open_prices`. None means the static table, or the prices of
            `kubernetes.pools`.
        history: Measurements of earlier jobs. None means that there are none.
        progress: Work that the job has already done. Only the remaining work is planned.
        queues: AWS Batch queues by name. Pools that no queue can run are rejected. None means that
            no pool needs a queue.
        evidence: From `cost.prices.reservations.open_evidence`. None means the configured
            reservations.
        compare_keys: Whether to look for the plan's `key_savings`, which takes twice the time of the
            rest. Only a plan that is shown needs them.

    Raises:
        CatalogueError: A shipped table has an invalid entry.
    """
    if shape is None:
        shape = causal_lm_shape(config.model)
    config = shape.applied_to(config)
    sources = PlanInputs(
        catalogue=catalogue_of(config) if catalogue is None else catalogue,
        shape=shape,
        prices=default_prices(config, now_utc) if prices is None else prices,
        now_utc=now_utc,
        history=JobHistory() if history is None else history,
        progress=progress,
        queues=queues,
        simulated=config.cluster.plan_for == "local" if simulated is None else simulated,
        evidence=open_evidence(config, network=False) if evidence is None else evidence,
    )
    judged, rejected = _divided(config, sources)
    forecaster = Forecaster(config, sources, judged)
    ranked = _forecast_best(config, sources, judged, forecaster)
    cost = config.cost
    steps = sources.steps_left(config)
    return Plan(
        made_utc=now_utc,
        started_utc=progress.started_utc or now_utc,
        backend=config.cluster.plan_for,
        simulated=sources.simulated,
        steps=steps,
        done_steps=progress.done_steps,
        spent_usd=progress.spent_usd,
        tokens=steps * config.training.batch_size * sources.shape.tokens_per_sample,
        weight_unit=sources.shape.weight_unit,
        interval=describe_interval(config),
        fingerprint=speed_fingerprint(config),
        budget_usd=cost.budget_usd,
        deadline_hours=cost.deadline_hours,
        reserve_usd=reserve_usd(config, ranked[0]) if ranked else 0.0,
        reserve_seconds=config.checkpoint.deadline_seconds,
        price_seconds=PriceWatch.of(config).seconds,
        prices=sources.prices.describe(
            now_utc=now_utc, regions=cost.regions, max_age_hours=cost.max_price_age_hours
        ),
        notes=(
            *filter(None, [warn_unlikely(config, sources, ranked)]),
            *plan_notes(config, sources),
        ),
        ranked=tuple(ranked),
        rejected=rejected,
        counts={RANKED: len(ranked), **Counter(rejection.kind for rejection in rejected)},
        refusal=find_refusal(config, sources, judged, rejected)
        or refuse_unlikely(config, sources, ranked),
        on_demand=_on_demand(config, sources, ranked[0].region) if ranked else {},
        cheapest_on_demand=_cheapest_on_demand(judged),
        key_savings=_find_key_savings(config, sources, ranked) if compare_keys else (),
        blocks=tuple(sorted(judge_blocks(config, sources), key=_rank)[:_KEPT_BLOCKS]),
    )


def _divided(
    config: RunConfig, sources: PlanInputs
) -> tuple[list[Candidate], tuple[Rejection, ...]]:
    """Return the pools within the budget, in ascending order of mean dollars, and the rejected pools."""
    found = list(judge_pools(config, sources))
    ranked = sorted((pool for pool in found if isinstance(pool, Candidate)), key=_rank)
    ranked, over = split_by_budget(config, sources, ranked)
    return ranked, (*(pool for pool in found if isinstance(pool, Rejection)), *over)


def _find_key_savings(
    config: RunConfig, sources: PlanInputs, ranked: Sequence[Candidate]
) -> tuple[KeySaving, ...]:
    def plan_usd(changed: RunConfig) -> float | None:
        judged, _ = _divided(changed, sources)
        best = _forecast_best(changed, sources, judged, Forecaster(changed, sources, judged))
        return best[0].expected_usd if best else None

    if not ranked:
        return ()
    return find_key_savings(config, sources, ranked[0].expected_usd, plan_usd)


def _forecast_best(
    config: RunConfig, sources: PlanInputs, judged: list[Candidate], forecaster: Forecaster
) -> list[Candidate]:
    """Simulate the best pools, and rank them by dollars and by the probability of meeting the
    deadline.

    The cheapest pools are simulated. If none of these meets the deadline with a probability of at
    least `cost.confidence`, the fastest pools are simulated too. Pools that meet the deadline with
    this probability come first, by expected dollars. The other simulated pools follow, by expected
    dollars / P(in time). All other pools come last.

    Nothing is simulated if no step is left, or if every pool exceeds the budget.

    Args:
        judged: Pools, cheapest first.
    """
    budget = config.cost.budget_usd
    confidence = config.cost.confidence
    over = budget is not None and judged and needed_usd(config, sources, judged[0]) > budget
    if over or not judged or not judged[0].case.work_hours:
        return judged
    ahead = [forecaster.simulate(pool) for pool in judged[:LOOKED_AHEAD]]
    rest = judged[LOOKED_AHEAD:]
    if rest and not any(chance_in_time(pool) >= confidence for pool in ahead):
        fastest = {
            id(pool) for pool in sorted(rest, key=lambda pool: pool.expected_hours)[:LOOKED_AHEAD]
        }
        ahead += [forecaster.simulate(pool) for pool in rest if id(pool) in fastest]
        rest = [pool for pool in rest if id(pool) not in fastest]

    def key(pool: Candidate) -> tuple[bool, float, tuple[float, int, str, str]]:
        chance = chance_in_time(pool)
        if chance >= confidence:
            return False, pool.expected_usd, _rank(pool)
        return True, pool.expected_usd / max(chance, 0.5 / DRAWS), _rank(pool)

    return sorted(ahead, key=key) + rest


def _cheapest_on_demand(judged: Sequence[Candidate]) -> OnDemandChoice | None:
    usual = [pool for pool in judged if pool.market == "on_demand" and pool.reservation is None]
    best = min(usual, key=lambda pool: pool.expected_usd, default=None)
    if best is None:
        return None
    return OnDemandChoice(pool=str(best), usd=best.expected_usd, hours=best.expected_hours)


def _on_demand(config: RunConfig, sources: PlanInputs, region: str | None) -> dict[str, str]:
    kinds = sources.catalogue.matching(config.cluster.instance_types)
    quotes = {kind.name: sources.prices.on_demand(kind, region or "") for kind in kinds}
    return {name: f"{quote.usd_per_hour:f}" for name, quote in quotes.items() if quote is not None}


def _rank(candidate: Candidate) -> tuple[float, int, str, str]:
    return candidate.expected_usd, candidate.nodes, candidate.instance_type, candidate.place

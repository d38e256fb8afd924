"""Where the job should run, what that should cost, and whether it may start: `make_plan`.

Every pool that the configuration allows is either ranked by expected dollars or rejected with its reason. The plan is
refused when nothing fits, when nothing meets the deadline, or when the cheapest way exceeds the budget.

A local run has no pool. Its plan is made as for Kubernetes, which runs either market on any number of nodes: it says
what this would run on, and the run is priced as if it did (`simulated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbflow.cost.catalogue import Catalogue, load_catalogue, on_demand_recorded
from ebbflow.cost.errors import PlanError
from ebbflow.cost.experience import Experience
from ebbflow.cost.plan.candidates import Sources, judged
from ebbflow.cost.plan.outlook import outlook
from ebbflow.cost.plan.pools import FROM_THE_START, Candidate, Progress, Rejection, short_name
from ebbflow.cost.plan.refusals import Refusal, refusal, reserve_usd, within_budget
from ebbflow.cost.plan.throughput import speed_fingerprint
from ebbflow.cost.prices.quote import PriceSource, StaticPrices
from ebbflow.cost.rates import RATES_KIND
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.model_shape import ModelShape, causal_lm_shape
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.terms import Terms

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState


def plan_notes(config: RunConfig, sources: Sources) -> tuple[str, ...]:
    """Only what holds of this configuration."""
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
        names = ", ".join(map(short_name, sources.queues))
        lines.append(f"only pools that one of these queues takes: {names}")
    if config.cluster.market != "on_demand":
        waits = "waits after a reclaim as recorded of V100, 2023; the first start is taken to be granted at once"
        lines.append(f"p50, p90 and P(deadline): simulated, staying in the pool; {waits}")
    return tuple(lines)


# 3: remaining work, dollars by kind, quantiles; a plan may be cut to its best pools.
SCHEMA = 3
# Pools that the event and the artifact keep of a plan; the whole of it lies in the job's plan.json.
KEPT_POOLS = 12
# Pools of which the plan simulates how hours and dollars may come out.
LOOKED_AHEAD = 100
# Among the counts of a plan: those that can run the job.
RANKED = "ranked"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision and all that led to it. Floats: a plan is an estimate, the ledger is exact.

    made_utc: Unix time. started_utc: of the job's first plan, from which the deadline counts. steps, tokens: the work
    that is left, tokens counted in weight_unit; done_steps, spent_usd: what came before.
    reserve_usd: price of one last save, kept back from the budget. fingerprint: see `ebbflow.cost.plan.throughput`.
    prices: lines on what the prices are and how old. notes: what the plan takes for granted or leaves out.
    on_demand: dollars per hour as quoted, of the types that may be used, in the chosen pool's region: a machine may
    turn out to be another than planned.
    ranked: cheapest first; rejected: with the reason; counts: of all of them by kind, also where lists were cut.
    simulated: the run will only be priced as if it ran on the chosen pool.
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
    refusal: Refusal | None
    on_demand: dict[str, str] = field(default_factory=dict)

    @property
    def chosen(self) -> Candidate | None:
        """The cheapest pool that fits and keeps deadline and budget; where a `refusal` says that the budget bears none,
        the one that needs least; None when none can run the job in time.
        """
        return self.ranked[0] if self.ranked else None

    def terms(self, *, spent_usd: float = 0.0, told_threshold: float = 0.0) -> Terms:
        """The money terms for training. spent_usd: what earlier attempts cost. Raises PlanError without a pool."""
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
            told_threshold=told_threshold,
            step_seconds=self.chosen.step_seconds,
        )

    def as_simulated(self) -> Plan:
        """The same plan for a run on this machine: its dollars are what the chosen pool would have cost."""
        return replace(self, simulated=True)

    def brief(self) -> Plan:
        """The same plan with its best pools and the nearest miss of each kind: small enough for an event."""
        nearest: dict[str, Rejection] = {}
        for one in self.rejected:
            if one.kind not in nearest or one.excess < nearest[one.kind].excess:
                nearest[one.kind] = one
        return replace(self, ranked=self.ranked[:KEPT_POOLS], rejected=tuple(nearest.values()))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON. `kinds` says how each kind of figure is known."""
        lists = ("prices", "notes", "ranked", "rejected", "refusal")
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name not in lists},
            "prices": list(self.prices),
            "notes": list(self.notes),
            "refusal": None if self.refusal is None else asdict(self.refusal),
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "ranked": [candidate.to_json() for candidate in self.ranked],
            "rejected": [rejection.to_json() for rejection in self.rejected],
            "kinds": kinds(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_json`. Raises PlanError for another schema."""
        if data.get("schema") != SCHEMA:
            made = f"the plan is of schema {data.get('schema')!r}, this version reads {SCHEMA}"
            raise PlanError(f"{made}: start a new run of the job, which plans anew and goes on from the last commit")
        refusal = data["refusal"]
        fields = {name: data[name] for name in cls.__dataclass_fields__ if name != "on_demand"}
        fields["on_demand"] = data.get("on_demand", {})  # of plans before it was kept there is none
        fields["ranked"] = tuple(map(Candidate.from_json, data["ranked"]))
        fields["rejected"] = tuple(map(Rejection.from_json, data["rejected"]))
        fields["prices"], fields["notes"] = tuple(data["prices"]), tuple(data["notes"])
        fields["refusal"] = refusal and Refusal(**{**refusal, "outcome": Outcome(refusal["outcome"])})
        return cls(**fields)


def kinds() -> dict[str, str]:
    """How each kind of figure of a candidate is known."""
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
    experience: Experience | None = None,
    progress: Progress = FROM_THE_START,
    queues: Mapping[str, QueueState] | None = None,
) -> Plan:
    """Rank every pool that `config` allows and decide whether the job may start. A pure function of its sources.

    now_utc: Unix time at which prices are judged. simulated: the run stays on this machine (always with backend local).
    shape: None: of the built-in model. prices: as `cost.prices.source.open_prices` opens; None: the static table.
    experience: of `ebbflow.cost.experience`. progress: the rest is planned. queues: pools that none of them takes are
    rejected; None: of all pools, whatever queues there are. Raises CatalogueError for bad tables.
    """
    sources = Sources(
        catalogue=load_catalogue() if catalogue is None else catalogue,
        shape=causal_lm_shape(config.model) if shape is None else shape,
        prices=StaticPrices() if prices is None else prices,
        now_utc=now_utc,
        experience=Experience() if experience is None else experience,
        progress=progress,
        queues=queues,
    )
    ranked, rejected = _divided(config, sources)
    cost, steps = config.cost, sources.steps_left(config)
    return Plan(
        made_utc=now_utc,
        started_utc=progress.started_utc or now_utc,
        backend=config.cluster.backend,
        simulated=simulated or config.cluster.backend == "local",
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
        prices=sources.prices.said(now_utc=now_utc, regions=cost.regions, max_age_hours=cost.max_price_age_hours),
        notes=plan_notes(config, sources),
        ranked=tuple(ranked),
        rejected=rejected,
        counts=_counts(len(ranked), rejected),
        refusal=refusal(config, sources, ranked, rejected),
        on_demand=_on_demand(config, sources, ranked[0].region) if ranked else {},
    )


def _divided(config: RunConfig, sources: Sources) -> tuple[list[Candidate], tuple[Rejection, ...]]:
    """The pools that can run the job, cheapest first, the best of them with their outlook; and those that cannot."""
    found = list(judged(config, sources))
    ranked = sorted((one for one in found if isinstance(one, Candidate)), key=_rank)
    ranked, over = within_budget(config, sources, ranked)
    ranked[:LOOKED_AHEAD] = [with_outlook(one, sources.hours_left(config)) for one in ranked[:LOOKED_AHEAD]]
    return ranked, (*(one for one in found if isinstance(one, Rejection)), *over)


def _on_demand(config: RunConfig, sources: Sources, region: str | None) -> dict[str, str]:
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
    """The pool with the quantiles of its hours and dollars."""
    other = one.storage_usd + one.transfer_usd
    ahead = outlook(one.case, gang_usd_per_hour=one.gang_usd_per_hour, other_usd=other, hours_left=hours_left)
    return replace(one, outlook=ahead)


def _rank(candidate: Candidate) -> tuple[float, int, str, str]:
    return candidate.expected_usd, candidate.nodes, candidate.instance_type, candidate.place

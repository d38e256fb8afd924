"""Where the job should run, what that should cost, and whether it may start: `make_plan`.

Every pool that the configuration allows is either ranked by expected dollars or rejected with its reason. The plan is
refused when nothing fits, when nothing meets the deadline, or when the cheapest way exceeds the budget.

A local run has no pool. Its plan is made as for Kubernetes, which runs either market on any number of nodes: it says
what this would run on, and the run is priced as if it did (`simulated`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from cost.candidates import (
    ELSEWHERE,
    HAZARD_UNKNOWN,
    MISSES_DEADLINE,
    NO_ON_DEMAND_PRICE,
    NO_SPOT_PRICE,
    Sources,
    judged,
)
from cost.catalogue import ADVISOR_RECORDED, ON_DEMAND_RECORDED, ON_DEMAND_REGION, Catalogue, load_catalogue
from cost.errors import PlanError
from cost.hints import budget_hint, capacity_hint, deadline_hint, enough_hours
from cost.pools import Candidate, Rejection
from cost.prices.quote import PriceSource
from cost.prices.static import StaticPrices
from infra.config.schema import RunConfig
from infra.model_shape import ModelShape, causal_lm_shape
from infra.outcome import Outcome
from infra.terms import Terms

# 2: pools have a place, prices an exact quote and an age.
SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why the job must not start: the outcome it ends with, the arithmetic, and what would make it possible.

    enough: the least value of the limit that binds, dollars or hours, that would do; None when no limit binds.
    """

    outcome: Outcome
    message: str
    hint: str
    enough: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision and all that led to it. Floats: a plan is an estimate, the ledger is exact.

    made_utc: Unix time; the deadline counts from it. reserve_usd: price of one last save, kept back from the budget.
    tokens: the work, counted in weight_unit.
    prices: lines on what the prices are and how old. ranked: cheapest first. simulated: the run will only be priced as
    if it ran on the chosen pool.
    """

    made_utc: float
    backend: str
    simulated: bool
    steps: int
    tokens: float
    weight_unit: str
    interval_steps: int
    budget_usd: float | None
    deadline_hours: float | None
    reserve_usd: float
    prices: tuple[str, ...]
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]
    refusal: Refusal | None

    @property
    def chosen(self) -> Candidate | None:
        """The cheapest pool that fits and meets the deadline; None when there is none. See `refusal` for the budget."""
        return self.ranked[0] if self.ranked else None

    def terms(self, *, spent_usd: float = 0.0) -> Terms:
        """The money terms for training. spent_usd: what earlier attempts cost. Raises PlanError without a pool."""
        if self.chosen is None:
            raise PlanError(f"a plan without a pool has no price: {self.refusal.message if self.refusal else ''}")
        return Terms(
            usd_per_rank_second=self.chosen.gang_usd_per_hour / self.chosen.ranks / 3600,
            budget_usd=self.budget_usd,
            spent_usd=spent_usd,
            reserve_usd=self.reserve_usd,
            deadline_utc=None if self.deadline_hours is None else self.made_utc + self.deadline_hours * 3600,
            hazard_per_hour=self.chosen.hazard_per_hour,
            price_kind="simulated" if self.simulated else self.chosen.price_kind.split()[0].rstrip(":"),
        )

    def as_simulated(self) -> Plan:
        """The same plan for a run on this machine: its dollars are what the chosen pool would have cost."""
        return replace(self, simulated=True)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON. `kinds` says how each kind of figure is known."""
        plain = ("made_utc", "backend", "simulated", "steps", "tokens", "weight_unit", "interval_steps", "budget_usd")
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in (*plain, "deadline_hours", "reserve_usd")},
            "prices": list(self.prices),
            "refusal": None if self.refusal is None else asdict(self.refusal),
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "ranked": [candidate.to_json() for candidate in self.ranked],
            "rejected": [rejection.to_json() for rejection in self.rejected],
            "kinds": KINDS,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_json`. Raises PlanError for another schema."""
        if data.get("schema") != SCHEMA:
            made = f"the plan is of schema {data.get('schema')!r}, this version reads {SCHEMA}"
            raise PlanError(f"{made}: start a new run of the job, which plans anew and goes on from the last commit")
        refusal = data["refusal"]
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        fields["ranked"] = tuple(map(Candidate.from_json, data["ranked"]))
        fields["rejected"] = tuple(map(Rejection.from_json, data["rejected"]))
        fields["prices"] = tuple(data["prices"])
        fields["refusal"] = refusal and Refusal(**{**refusal, "outcome": Outcome(refusal["outcome"])})
        return cls(**fields)


KINDS = {
    "on_demand_usd_per_hour": f"recorded {ON_DEMAND_RECORDED}, {ON_DEMAND_REGION}",
    "usd_per_hour": "as each pool's price_kind says",
    "hazard_per_hour": f"estimated from the interruption band of the region, recorded {ADVISOR_RECORDED}",
    "fit": "estimated",
    "tokens_per_second": "estimated",
    "expected_hours": "estimated",
    "expected_usd": "estimated",
    "interruptions": "estimated",
}


def make_plan(
    config: RunConfig,
    *,
    now_utc: float,
    catalogue: Catalogue | None = None,
    simulated: bool = False,
    shape: ModelShape | None = None,
    prices: PriceSource | None = None,
) -> Plan:
    """Rank every pool that `config` allows and decide whether the job may start. A pure function of its sources.

    now_utc: Unix time from which the deadline counts and at which prices are judged. simulated: the run stays on this
    machine (always so with `cluster.backend: local`). shape: of the model; None: of the built-in language model.
    prices: an opened source (`cost.prices.source.open_prices`); None: the static table, whatever `cost.prices` says.
    Raises CatalogueError for a broken table.
    """
    sources = Sources(
        catalogue=load_catalogue() if catalogue is None else catalogue,
        shape=causal_lm_shape(config.model) if shape is None else shape,
        prices=StaticPrices() if prices is None else prices,
        now_utc=now_utc,
    )
    found = list(judged(config, sources))
    ranked = sorted((one for one in found if isinstance(one, Candidate)), key=_rank)
    rejected = tuple(one for one in found if isinstance(one, Rejection))
    reserve = ranked[0].gang_usd_per_hour * config.checkpoint.deadline_seconds / 3600 if ranked else 0.0
    cost = config.cost
    return Plan(
        made_utc=now_utc,
        backend=config.cluster.backend,
        simulated=simulated or config.cluster.backend == "local",
        steps=config.training.max_steps,
        tokens=config.training.max_steps * config.training.batch_size * sources.shape.tokens_per_sample,
        weight_unit=sources.shape.weight_unit,
        interval_steps=config.checkpoint.interval_steps,
        budget_usd=cost.budget_usd,
        deadline_hours=cost.deadline_hours,
        reserve_usd=reserve,
        prices=sources.prices.said(now_utc=now_utc, regions=cost.regions, max_age_hours=cost.max_price_age_hours),
        ranked=tuple(ranked),
        rejected=rejected,
        refusal=_refusal(config, sources, ranked, rejected, reserve),
    )


def _rank(candidate: Candidate) -> tuple[float, int, str, str]:
    return candidate.expected_usd, candidate.nodes, candidate.instance_type, candidate.place


def _refusal(
    config: RunConfig,
    sources: Sources,
    ranked: list[Candidate],
    rejected: tuple[Rejection, ...],
    reserve_usd: float,
) -> Refusal | None:
    if ranked:
        return _over_budget(config, ranked[0], reserve_usd)
    late = [rejection for rejection in rejected if rejection.kind == MISSES_DEADLINE]
    if late:
        fastest = min(late, key=lambda rejection: rejection.excess)
        message = f"no pool meets the deadline; the fastest, {fastest}, {fastest.reason}"
        hours = enough_hours(config, sources)
        hint = deadline_hint(config, sources, hours)
        return Refusal(outcome=Outcome.DEADLINE, message=message, hint=hint, enough=hours)
    hint = capacity_hint(config, sources, rejected)
    return Refusal(outcome=Outcome.NO_CAPACITY, message=_nothing_fits(config, rejected), hint=hint)


def _over_budget(config: RunConfig, cheapest: Candidate, reserve_usd: float) -> Refusal | None:
    budget = config.cost.budget_usd
    needed = cheapest.expected_usd + reserve_usd
    if budget is None or needed <= budget:
        return None
    message = (
        f"cost.budget_usd is ${budget:.4f}; the cheapest pool that can do it, {cheapest}, needs ${needed:.4f} = "
        f"{cheapest.expected_hours:.4g} h × {cheapest.nodes} × ${cheapest.usd_per_hour:.4f}/h "
        f"+ ${reserve_usd:.4f} reserve for the last save"
    )
    hint = budget_hint(config, cheapest, needed)
    return Refusal(outcome=Outcome.BUDGET, message=message, hint=hint, enough=needed)


def _nothing_fits(config: RunConfig, rejected: tuple[Rejection, ...]) -> str:
    if not rejected:
        return f"no instance type of the catalogue begins with {', '.join(config.cluster.instance_types)}"
    nearest = min(rejected, key=_distance)
    return f"none of {len(rejected)} pools can run the job; the nearest, {nearest}: {nearest.reason}"


def _distance(rejection: Rejection) -> tuple[int, float]:
    """How far a pool is from running the job: first those that want only a price, then those too small, then others."""
    wanting = (HAZARD_UNKNOWN, NO_SPOT_PRICE, NO_ON_DEMAND_PRICE, ELSEWHERE, "does not fit")
    return wanting.index(rejection.kind) if rejection.kind in wanting else len(wanting), rejection.excess

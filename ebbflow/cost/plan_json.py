"""JSON forms of a plan and its candidates, as events and reports record them.

The reader of the event log has checked the values (`ebbflow.core.event_payloads.PlanPayload`). Plans of
earlier versions lack some of the keys.
"""

from collections.abc import Sequence
from typing import Required, TypedDict

from ebbflow.core.json_values import Json


class CaseJson(TypedDict, total=False):
    """Inputs of a candidate's forecast that readers of events need."""

    work_hours: float | None


class OutlookJson(TypedDict, total=False):
    """Mean and quantiles of the dollars of a forecast."""

    mean_usd: float | None
    p50_usd: float | None
    p90_usd: float | None


class PriceJson(TypedDict, total=False):
    """Price of one node (`ebbflow.cost.prices.quote.PoolPrice`)."""

    usd_per_hour: Required[float | str]
    quoted_usd_per_hour: str | None
    volume_usd_per_hour: str | None
    price_kind: str
    price_age_hours: float | None
    price_stale: bool


class CandidateJson(PriceJson, total=False):
    """Pool of a plan (`ebbflow.cost.plan.pools.Candidate`), or of a Batch job."""

    instance_type: Required[str]
    market: Required[str]
    nodes: Required[int]
    region: str | None
    zone: str | None
    on_demand_usd_per_hour: float | str | None
    tokens_per_second: float | None
    mfu: float | None
    gpu: str
    fit: dict[str, int]  # bytes per GPU by kind (`ebbflow.cost.plan.throughput.MemoryFit`)
    interruptions: float | None
    expected_hours: float | None
    expected_usd: float | None
    compute_usd: float | None
    case: CaseJson | None
    outlook: OutlookJson | None


class RefusalJson(TypedDict, total=False):
    """Reason why a plan was refused (`ebbflow.cost.plan.plan.PlanRefusal`)."""

    outcome: Required[str]
    message: Required[str]
    hint: str
    enough: float | None


class OnDemandChoiceJson(TypedDict):
    """Cheapest on-demand pool that meets the deadline (`ebbflow.cost.plan.plan.OnDemandChoice`)."""

    pool: str
    usd: float
    hours: float


class PlanJson(TypedDict, total=False):
    """Plan of a job (`ebbflow.cost.plan.plan.Plan`) that chose a pool."""

    chosen: Required[CandidateJson]
    simulated: bool
    ranked: list[CandidateJson]
    rejected: Sequence[Json]
    counts: dict[str, int]
    on_demand: dict[str, float | str | None]  # dollars per hour, by instance type
    refusal: RefusalJson | None
    budget_usd: float | None
    deadline_hours: float | None
    started_utc: float | None
    made_utc: float | None
    live: OutlookJson | None
    prices: list[str]
    cheapest_on_demand: OnDemandChoiceJson | None
    price_seconds: float


class PlanSummary(TypedDict, total=False):
    """Plan in a report, with the numbers of ranked and rejected pools in place of the pools."""

    chosen: Required[CandidateJson | None]
    simulated: bool
    ranked: int
    rejected: int
    refusal: RefusalJson | None
    budget_usd: float | None
    deadline_hours: float | None
    prices: list[str]
    cheapest_on_demand: OnDemandChoiceJson | None

"""Parts of a report as they are in report.json.

They are dictionaries, so that a report is written and read without a conversion. Reports of earlier
versions lack some of the keys; readers may rely on the required ones only.
"""

from typing import NotRequired, Required, TypedDict

from ebbflow.core.config.load import SettingRow
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.launchers import RunningJob
from ebbflow.cost.plan_json import PlanSummary
from ebbflow.cost.report.slurm_jobs import SlurmJobRow

Column = list[float | None]
Columns = dict[str, Column]
# "class" cannot be the name of an attribute.
CellRow = TypedDict("CellRow", {"cause": str, "class": str, "rank_seconds": float, "usd": float})
LedgerRow = TypedDict("LedgerRow", {"class": str, "rank_seconds": float, "usd": float, "kind": str})


class SaveFigures(TypedDict, total=False):
    """Measured and predicted cost of checkpoints and redone steps. None: unknown."""

    skipped: int
    failed: int
    stall_seconds: float | None
    durable_seconds: float | None
    interval_seconds: float | None
    predicted_loss: float | None  # share of the paid time
    actual_loss: float | None  # share of the paid time


class NetworkMedians(TypedDict, total=False):
    """Medians of earlier network probes. None: unknown."""

    probes: int
    bandwidth_bytes_per_second: float | None
    all_reduce_bytes_per_second: float | None
    round_trip_seconds: float | None
    clock_offset_seconds: float | None


class NetworkFigures(TypedDict, total=False):
    """Figures of the newest network probe, and the medians of the earlier ones (`before`)."""

    before: Required[NetworkMedians]
    nodes: int
    mtu: int | None
    bandwidth_bytes_per_second: float | None
    all_reduce_bytes_per_second: float | None
    clock_offset_seconds: float | None


class MfuFigures(TypedDict):
    """Model FLOPs utilization (MFU), or the reason why it is not shown."""

    mfu: float | None
    mfu_withheld: str | None


class GpuMemoryRow(TypedDict):
    """Peak memory of one rank's GPU, in bytes."""

    rank: int
    allocated_bytes: int
    reserved_bytes: int


class ActualFigures(TypedDict, total=False):
    """Measured figures (`ebbflow.cost.report.figures.compute_actual_figures`). None: unknown."""

    wall_hours: float
    steps: int
    gpu_memory: list[GpuMemoryRow]
    tokens_per_second: float | None
    mfu: float | None
    mfu_withheld: str | None
    learning_rate: float | None
    held_out_loss: float | None
    unigram_entropy_nats: float | None
    held_out_ratio: float | None
    train_tokens: float | None
    text_bytes: float | None
    tokens_per_byte: float | None
    rows: float | None
    empty_rows: float | None
    repaired_rows: float | None
    weight_unit: str
    metrics: dict[str, float | str | None]
    usd_per_1000_rollouts: float | None
    network: NetworkFigures | None
    profile: dict[str, str] | None
    commits: int
    saves: SaveFigures
    generations: int
    goodput: float | None
    unattributed_share: float | None
    price_kind: str


class Failure(TypedDict, total=False):
    """One failure of a job. `seconds` counts from the job's first event."""

    seconds: Required[float]
    t_wall: Required[float]
    generation: Required[int]
    what: Required[str]
    culprit: Required[str]
    evidence: JsonObject  # about the rank that failed, as it was recorded


class RootCause(TypedDict):
    """Root cause that `ebbflow diagnose` finds."""

    symptom: str
    title: str
    family: str
    confidence: float
    fix: str


class LastOutput(TypedDict):
    """Last lines that the failed rank printed. rank: None if it is unknown."""

    rank: int | None
    lines: list[str]


class NotableEvent(TypedDict):
    """Event that a report shows individually. `seconds` counts from the job's first event."""

    seconds: float
    generation: int
    name: str
    step: int | None
    text: str


class GenerationRow(TypedDict):
    """Row of the report's table of generations (starts of the ranks)."""

    generation: int
    from_step: int
    last_step: int | None
    paid_rank_seconds: float
    ended: str | None
    culprit: str | None


class DamageRow(TypedDict, total=False):
    """Damaged place of the event log."""

    segment: Required[str]
    line: int | None
    what: Required[str]


class RefusedRun(TypedDict):
    """Run that preflight refused after the job had completed."""

    run: str
    outcome: str


class PromiseRow(TypedDict, total=False):
    """Promise how exactly a job resumes (`ebbflow.core.event_payloads.PromisePayload`)."""

    level: str | None
    same_data: str | None
    reasons: list[str] | None


class CertificateRow(TypedDict, total=False):
    """Resume certificate (`ebbflow.core.event_payloads.CertificatePayload`)."""

    holds: bool | None
    interruptions: list[Json] | None
    steps: int | None


class CheckRow(TypedDict):
    """Result of a preflight check."""

    title: str
    status: str
    detail: str


class EventFigures(TypedDict, total=False):
    """Part of a report that describes a job's events: failures, generations, damage and others."""

    counts: dict[str, int]
    failures: Required[list[Failure]]
    finding: RootCause | None
    stack: LastOutput | None
    notable: list[NotableEvent]
    generations: Required[list[GenerationRow]]
    run: str
    damage: list[DamageRow]
    message: str | None
    refused: RefusedRun | None
    promise: PromiseRow | None
    checks: list[CheckRow]
    certificate: CertificateRow | None


class Forecast(TypedDict, total=False):
    """Forecast of a job's first plan."""

    usd: float | None
    compute_usd: Required[float | None]
    useful_usd: float | None
    hours: Required[float | None]
    interruptions: Required[float | None]
    kind: str


class CauseRow(TypedDict):
    """Paid time and dollars of one cause."""

    cause: str
    rank_seconds: float
    usd: float


class Hindsight(TypedDict, total=False):
    """Lowest possible cost of a job in hindsight, and the regret (its cost above that)."""

    usd: Required[float]
    regret_usd: Required[float]
    regret_share: float | None
    pools: int
    work_hours: float
    start_hours: float
    kind: str


class PriceRow(TypedDict):
    """Number of nodes and dollars for one pool and kind of price."""

    pool: str
    kind: str
    nodes: int
    usd: float
    # Price of one node while the pool was paid for: [Unix time, dollars per hour from then on]
    curve: NotRequired[list[list[float]]]


class PlannedAttempt(TypedDict):
    """Estimates for an attempt on AWS Batch."""

    usd_per_hour: float
    hours: float
    usd: float
    kind: str
    wall_seconds: int  # after which it is ended
    runnable_seconds: int  # longest wait for capacity


class ActualAttempt(TypedDict):
    """Measured figures of an attempt on AWS Batch. None: unknown."""

    wait_seconds: float | None
    hours: float | None
    usd: float | None
    usd_per_hour: float | None


class AttemptRow(TypedDict):
    """Row of the report's table of attempts on AWS Batch."""

    number: int
    where: str
    queue: str
    market: str
    instance_type: str
    nodes: int
    why: str
    job_id: str
    ended: str
    reason: str
    planned: PlannedAttempt
    actual: ActualAttempt


class MoneyFigures(TypedDict, total=False):
    """Dollars of a job (`ebbflow.cost.report.figures.compute_money_figures`)."""

    owner: str | None
    project: str | None
    forecast: Forecast | None
    causes: list[CauseRow]
    cells: list[CellRow]
    hindsight: Hindsight | None
    thresholds: list[float]
    instances: list[str]
    unknown_nodes: int
    price_changes: int
    prices: list[PriceRow]
    price_silence: str  # why, and how long before the end, no price was known any more
    attempts: list[AttemptRow]
    light_steps_away: bool
    slurm_jobs: list[SlurmJobRow]


class ProgressFigures(TypedDict, total=False):
    """Progress of a job (`ebbflow.cost.report.charts.compute_progress`). None: unknown."""

    step: int
    steps: int | None
    budget_usd: float | None
    commit_step: int | None
    at_risk_steps: int
    at_risk_usd: float | None
    at_risk_seconds: float | None
    eta_seconds: float | None
    forecast_usd: float | None
    low_usd: float | None
    high_usd: float | None
    # While the job runs: "starting", "running" or "restarting"
    phase: str
    doing: str  # what a starting job does instead of steps
    resume_step: int  # from which a restarting job goes on
    lost_steps: int  # steps that a restarting job takes again


class ChartPlace(TypedDict):
    """Moment of a job: its time, the last step before it, and the dollars spent until then."""

    step: float
    seconds: float
    usd: float


class Mark(TypedDict):
    """Event that is drawn across the charts."""

    step: float
    seconds: float | None
    usd: float | None
    kind: str
    text: str


class EvaluationRow(TypedDict):
    """Metrics of one evaluation."""

    step: int
    metrics: dict[str, float | None]


class Evaluations(TypedDict):
    """Newest evaluations, oldest first, and the newest pictures (SVG by name)."""

    rows: list[EvaluationRow]
    pictures: dict[str, str] | None
    pictures_step: int | None


class Lane(TypedDict):
    """Bar that shows how a node of one generation spent its time.

    Times are seconds since the job's first event.

    segments: [start, end, class of paid time].
    """

    generation: int
    node: int
    machine: str
    pool: str
    usd_per_hour: float
    usd: float
    start: float
    end: float
    ended: str
    step: int
    segments: list[list[float | str]]


class RankRow(TypedDict, total=False):
    """Row of the report's table of ranks: speed, waits and memory. None: unknown."""

    rank: Required[int]
    generation: int
    node: Required[int]
    host: Required[str]
    step: Required[int | None]
    step_seconds: Required[float | None]
    data_share: Required[float | None]
    slowest_share: Required[float | None]
    wait_share: float | None
    slowest_ratio: Required[float | None]
    lost_step_seconds: float | None
    lost_seconds: float | None
    lost_usd: float | None
    node_resident_bytes: Required[float | None]
    gpu_allocated_bytes: int | None
    gpu_reserved_bytes: int | None
    last_seconds: Required[float]


class Charts(TypedDict, total=False):
    """Data of the plots on a job's page (`ebbflow.cost.report.charts.build_charts`)."""

    origin_utc: float
    steps: Columns
    held_out: Columns
    evaluations: Evaluations
    machine: Columns
    marks: list[Mark]
    lanes: list[Lane]
    lanes_left_out: int
    ranks: list[RankRow]


class ReportJson(TypedDict, total=False):
    """Content of report.json (`ebbflow.cost.report.report.RunReport`)."""

    schema: Required[int]
    job: Required[str]
    outcome: Required[str | None]
    exit_code: Required[int | None]
    interruptions: Required[int]
    failures: Required[int]
    redone_steps: Required[int]
    weights_sha256: Required[str | None]
    loss_curve: Required[list[tuple[int, float | None]]]
    ledger: Required[list[LedgerRow]]
    total_usd: Required[float]
    paid_rank_seconds: Required[float]
    savings_usd: Required[float | None]
    plan: Required[PlanSummary | None]
    actual: Required[ActualFigures]
    events: Required[EventFigures]
    configuration: list[SettingRow]
    money: MoneyFigures
    progress: ProgressFigures
    charts: Charts
    running: RunningJob | None

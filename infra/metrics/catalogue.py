"""Every metric that Ebbflow exports, and nothing that it does not: a board refuses any other name.

Names follow Prometheus' conventions: prefix, base unit, `_total` for what only grows. No label holds what is unbounded
(a step, a path, a message). docs/observability.md explains the same list; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Steps of a laptop's model and of a large one: a factor of about two apart.
STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
COMMIT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Kind(StrEnum):
    """Types of the exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """labels: besides the constant ones of its board. buckets: upper bounds, of a histogram."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


# metrics.prom: of a whole job, folded from its events. Constant label: job.
JOB_METRICS = (
    _gauge("ebbflow_job_outcome", "How the job ended: 1 for that outcome, 0 for the others.", "outcome"),
    _gauge("ebbflow_job_capacity_info", "The planned capacity; always 1.", "instance_type", "market"),
    _gauge("ebbflow_job_nodes", "Nodes of the planned capacity.", "kind"),
    _counter("ebbflow_job_rank_seconds_total", "Paid time of all ranks by ledger class, in seconds.", "class", "kind"),
    _counter("ebbflow_job_usd_total", "What was paid by ledger class, in US dollars.", "class", "kind"),
    _gauge("ebbflow_job_budget_usd", "The limit cost.budget_usd, in US dollars; absent without one."),
    _gauge("ebbflow_job_planned_usd", "What the plan expected the job to cost, in US dollars.", "kind"),
    _gauge("ebbflow_job_planned_seconds", "How long the plan expected the job to take, in seconds.", "kind"),
    _gauge(
        "ebbflow_job_savings_usd", "Useful work alone at the on-demand price, less the total, in US dollars.", "kind"
    ),
    _gauge("ebbflow_job_wall_seconds", "From the first event of the job to its last, in seconds."),
    _gauge("ebbflow_job_last_event_timestamp_seconds", "When the last event of the job happened, in Unix time."),
    _gauge("ebbflow_job_step", "The newest step that is part of the job's weights."),
    _counter("ebbflow_job_redone_steps_total", "Steps whose result was thrown away and computed again."),
    _counter(
        "ebbflow_job_tokens_total", "Tokens (or whatever the loss is averaged over) of all steps, redone included."
    ),
    _counter("ebbflow_job_generations_total", "Starts of the gang."),
    _counter("ebbflow_job_interruptions_total", "Generations that ended unplanned, whatever the cause."),
    _counter("ebbflow_job_failures_total", "Generations that ended by an error of the program or the user's code."),
    _counter("ebbflow_job_commits_total", "Durable checkpoints."),
    _counter("ebbflow_job_commit_failures_total", "Saves of a rank that did not become durable."),
    _counter("ebbflow_job_committed_bytes_total", "Bytes of all durable checkpoints."),
    _counter(
        "ebbflow_job_commit_seconds_total", "Time from a save to its durability, summed over commits, in seconds."
    ),
    _gauge("ebbflow_job_loss", "Training loss of the newest step, in the workload's own unit."),
    _gauge("ebbflow_job_held_out_loss", "Loss of the newest evaluation on held-out data, in the workload's own unit."),
    _gauge("ebbflow_job_tokens_per_second", "Median speed of the kept steps, in tokens of all ranks per second."),
    _gauge(
        "ebbflow_job_mfu_ratio",
        "Model flops over those of the machines' measured peak, 0 to 1; absent above 1.",
        "kind",
    ),
    _gauge("ebbflow_job_goodput_ratio", "Useful steps' share of the paid time, 0 to 1."),
    _gauge("ebbflow_job_unattributed_ratio", "Share of the paid time that no interval covers, 0 to 1."),
)

# /metrics and the Pushgateway: of one running node, by its local rank 0. Constant labels: job, node.
NODE_METRICS = (
    _gauge("ebbflow_generation", "Number of this start of the gang."),
    _gauge("ebbflow_world_size", "Ranks of the whole gang."),
    _gauge("ebbflow_start_time_seconds", "When the process of this node's first rank started, in Unix time."),
    _gauge("ebbflow_step", "The newest step taken."),
    _gauge("ebbflow_max_steps", "The last step of the job."),
    _counter("ebbflow_steps_total", "Steps taken by this process."),
    _counter("ebbflow_tokens_total", "Tokens of the whole gang's steps, the same on every node."),
    _counter("ebbflow_flops_total", "Model flops of the whole gang's steps; node 0 only."),
    _gauge("ebbflow_tokens_per_second", "Speed of the newest step, in tokens of all ranks per second."),
    _gauge("ebbflow_loss", "Training loss of the newest step over all ranks, in the workload's own unit."),
    _gauge("ebbflow_held_out_loss", "Loss of the newest evaluation on held-out data; node 0 only."),
    _gauge("ebbflow_gradient_norm", "Global gradient norm of the newest step, before clipping."),
    _gauge("ebbflow_learning_rate", "Learning rate of the newest step."),
    Metric(
        "ebbflow_step_seconds", Kind.HISTOGRAM, "Time of a step and its data, saves and evaluations not, in seconds.",
        buckets=STEP_BUCKETS,
    ),
    _counter("ebbflow_phase_seconds_total", "Time of this rank by ledger class, in seconds.", "class"),
    _gauge("ebbflow_slowest_rank", "The rank that took longest in the newest step; node 0 only."),
    _gauge("ebbflow_slowest_rank_ratio", "Its own time over the median of the others'; node 0 only."),
    _gauge("ebbflow_rank_step", "The step that a rank of this node is in, by its heartbeat.", "rank"),
    _gauge("ebbflow_rank_heartbeat_timestamp_seconds", "When a rank of this node last moved on, in Unix time.", "rank"),
    _gauge("ebbflow_last_commit_step", "Step of the newest durable checkpoint; node 0 only."),
    _gauge("ebbflow_last_commit_timestamp_seconds", "When it was known to be durable, in Unix time; node 0 only."),
    _counter("ebbflow_commit_failures_total", "Saves of this rank that did not become durable."),
    _counter("ebbflow_committed_bytes_total", "Bytes of the durable checkpoints of this generation; node 0 only."),
    Metric(
        "ebbflow_commit_seconds", Kind.HISTOGRAM, "Time from a save to its durability, in seconds; node 0 only.",
        buckets=COMMIT_BUCKETS,
    ),
    _gauge("ebbflow_spent_usd", "Spent by the whole job so far at the planned price, in US dollars.", "kind"),
    _gauge(
        "ebbflow_at_risk_usd", "Spent since the state of the newest durable checkpoint, in US dollars; node 0 only.",
        "kind",
    ),
    _gauge("ebbflow_budget_usd", "The limit cost.budget_usd, in US dollars; absent without one."),
    _gauge("ebbflow_deadline_timestamp_seconds", "When the job must be done, in Unix time; absent without a deadline."),
)  # fmt: skip

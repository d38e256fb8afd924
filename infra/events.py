"""The append-only event log of a job: what the ledger, the report and the metrics are folded from.

    event = {v, t_wall, t_mono, job, run, attempt, generation, node, rank, step, name, data}

Object stores cannot append, so each process writes segments of its own. Names are free; the ones that the ledger reads
are constants here, with the data they carry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from infra.segments import read_segments
from infra.store import Store

VERSION = 1

# Written by the lead agent. started: parent (commit key or null), parent_step, nodes, processes_per_node.
# ended: reason (an EndReason, or the Outcome of a planned end), culprit (text), user_code (bool).
GENERATION_STARTED = "generation_started"
GENERATION_ENDED = "generation_ended"
# Written by each node's agent: what is paid for. started: ranks (list), host, and of the machine what is known of it
# (`infra.instance`): instance_id, instance_type, zone, zone_id, market, uptime_seconds, identified_by; batch_job_id.
# ended: seconds (since started), reason.
NODE_STARTED = "node_started"
# seconds (since started), resident_bytes (of the ranks), and of the machine memory_available_bytes, disk_free_bytes,
# shared_memory_free_bytes; where GPUs can be asked gpus, gpu_memory_used_bytes, gpu_memory_free_bytes, gpu_busy_percent
# and gpu_celsius
NODE_HEARTBEAT = "node_heartbeat"
NODE_ENDED = "node_ended"
# Written by each rank. phase: class (a ledger class), seconds. step: loss, tokens (the batch's weight, whatever it
# counts), seconds ({ledger class: seconds}), skipped (why its update was left out); on rank 0 also flops (of all).
PHASE = "phase"
STEP = "step"
STAGED = "staged"  # step, bytes: a save is on its way; what came before it is put at once, to be durable as it is
COMMIT = "commit"  # step, key, bytes, seconds, stall_seconds
COMMIT_SKIPPED = "commit_skipped"  # step, reason: a save that was due was left out, by policy or for want of time
INTERVAL = "interval"  # seconds, stall_seconds, slow_down_seconds, upload_seconds, hazard_per_hour, predicted_loss
COMMIT_FAILED = "commit_failed"  # step, message
RESTORE = "restore"  # step, key, seconds, split, rejected (list of {key, reason, lost_steps, lost_usd, lost})
# step, key (of the newest commit that the events know), found_step, found_key (of the newest in the store, null: none):
# the store was restored from an older snapshot, and a person has accepted it
ROLLBACK = "rollback"
INITIAL_WEIGHTS = "initial_weights"  # tensors, seconds, files (list of {path, bytes, modified_unix, sha256})
PEAK = "peak"  # flops_per_second (measured, of one rank), dtype
EVALUATION = "evaluation"  # metrics {name: value}
# Written by the agent that hears of it. notice: source, action, seconds_left (null: no time was said), save_seconds
# (that are left for a save), does (leave, save, nothing), detail.
# sources: watched (list), absent ({source: why}), or problem (text).
NOTICE = "notice"
NOTICE_SOURCES = "notice_sources"
FAULT_INJECTED = "fault_injected"  # kind, target, step
# What a guard did, told by the rank that saw it, or by rank 0 where all did. action (`GuardAction`), reason (text);
# skip: samples ([first, end)); rewind: limit (the newest commit to go back to), first_sample, samples; split:
# accumulation (micro-batches per step); slow_rank, data_bound: rank, share; diverged: ranks.
GUARD = "guard"
# culprit (text), reason, fingerprint; of the culprit rank, node, kind, because (the rule that named it), where, step,
# phase, certainty, cascades (ranks), next_action, dump (path); lost_rank_seconds and usd_lost since the newest commit.
FAULT_DETECTED = "fault_detected"
# Written by the flow's steps, or by rank 0 where there is no flow.
CONFIGURED = "configured"  # settings (list of {key, value, source}, one for each key of the configuration)
PREFLIGHT = "preflight"  # results (list), sent_away (the step ran in a container that Metaflow sent somewhere)
# prepared: fingerprint, weight_unit, and of text train_tokens, held_out_tokens, unigram_entropy_nats, files, bytes …
PREPARED = "prepared"
PLAN = "plan"  # the plan as JSON
# Written by whoever submits an attempt to AWS Batch. placed: placement (`cost.capacity.Placement` as JSON), attempt,
# round, why, after_generation (the newest that was known then).
# batch_attempt: what Batch told of the job once it was over (`infra.batch.attempts.BatchAttempt`): job_id,
# job_name, queue, nodes, status, created_utc, started_utc, stopped_utc (Unix times by Batch's clock, null: it did not
# come to that), exit_code, reason, cause, node_times (of several nodes: [started, stopped] of each); and of its
# placement instance_type, market, region, zone, processes_per_node, usd_per_hour, quoted_usd_per_hour, price_kind.
# `cost.capacity.attempt_record` makes it.
PLACED = "placed"
# Written by the process that submitted: job_id, job_name, step, task (of the flow); twin_of: of a job that an
# unanswered submit has made and nobody waits for, so that it was ended: the one that is waited for, None without any.
BATCH_SUBMITTED = "batch_submitted"
BATCH_ATTEMPT = "batch_attempt"
BUDGET = "budget"  # threshold (share of the budget), spent_usd, budget_usd, reserve_usd
# prices: pools (list of {instance_type, market, region, zone, kind, changes: [[Unix time, "dollars per hour"], …]})
PRICES = "prices"
# certificate: the resume certificate as JSON (training.certify.certificate), where one was asked for.
CERTIFICATE = "certificate"
OUTCOME = "outcome"  # outcome, step, weights_sha256, message
# Written by the supervisor after each run of the flow: verdict (`flows.supervising.verdict.Verdict`), exit_code,
# seconds, commit (key of the newest one, or null), failures (that it counts for).
SUPERVISED = "supervised"


class EndReason(StrEnum):
    """Why a generation or a node's part of it ended; one that ended as planned has an `Outcome` instead."""

    RANK_FAILED = "rank_failed"
    RANK_KILLED = "rank_killed"
    NODE_LOST = "node_lost"
    HANG = "hang"
    AGENT_FAILED = "agent_failed"  # the agent itself raised
    ROLL_CALL = "roll_call"
    AGENT_STOPPED = "agent_stopped"
    SUPERSEDED = "superseded"
    STORE = "store"
    REWIND = "rewind"  # a guard went back to an older commit
    SPLIT = "split"  # a micro-batch did not fit into memory
    RENEWAL = "renewal"  # memory grew: processes were replaced before it ran out


class GuardAction(StrEnum):
    """What a guard can do. `training.guards.overrides` hands rewind and split to the next start of the gang."""

    SKIP = "skip"
    REWIND = "rewind"
    SPLIT = "split"
    RENEW = "renew"
    SLOW_RANK = "slow_rank"
    DATA_BOUND = "data_bound"
    DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the log. t_wall: Unix time; t_mono: monotonic clock of the writing machine; rank -1: no rank."""

    name: str
    job: str
    run: str
    attempt: int
    generation: int
    node: int
    rank: int
    step: int | None
    t_wall: float
    t_mono: float
    data: dict[str, Any] = field(default_factory=dict)
    v: int = VERSION

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """One line of strict JSON: a number that is not finite becomes null. Raises TypeError for foreign objects."""
        try:
            return json.dumps(self.__dict__, separators=(",", ":"), allow_nan=False)
        except ValueError:  # rare, so that only these events pay for the walk
            return json.dumps(_finite(self.__dict__), separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who writes: the fields that every event of a process shares. `process` names one that is no rank."""

    job: str
    run: str = ""
    attempt: int = 0
    generation: int = 0
    node: int = 0
    rank: int = -1
    process: str = "rank"

    @property
    def writer(self) -> int | str:
        return self.rank if self.rank >= 0 else self.process


def read_events(job_store: Store) -> list[Event]:
    """All events of a job, by wall time. A torn last line, which a local crash can leave, is passed over."""
    events = [event for segment in read_segments(job_store) for event in _parse(segment)]
    return sorted(events, key=lambda event: (event.t_wall, event.t_mono))


def _parse(segment: bytes) -> Iterable[Event]:
    for line in segment.splitlines():
        try:
            yield Event.from_json(line)
        except (ValueError, TypeError):
            continue


def _finite(value: Any) -> Any:
    """The same with None for each float that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

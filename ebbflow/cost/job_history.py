"""Job history: interruptions and speeds that past jobs of a store measured, and the estimates based
on them.

Each job writes one record. The record depends only on the job's events, so it is the same each time
it is written:

    <store>/experience/<day of the job's first event>-<job>.json

A local run writes no record, because it measures no pool and its price is only simulated.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from statistics import fmean, median, stdev
from typing import Any

import ebbflow.core.events as ev
from ebbflow.core.errors import InfraError, ObjectNotFound
from ebbflow.core.event_payloads import (
    GenerationStartedPayload,
    NodeStartedPayload,
    NoticePayload,
    PlannedPool,
)
from ebbflow.core.events import EndReason, Event, select_events
from ebbflow.core.json_values import JsonObject
from ebbflow.core.layout import JOB_HISTORY_PREFIX, job_history_key
from ebbflow.core.store import Store
from ebbflow.cost.ledger.generations import RecordedGeneration, read_generations
from ebbflow.cost.ledger.pricing import select_plans
from ebbflow.cost.ledger.timeline import compute_rate
from ebbflow.cost.plan.spot_belief import ObservedWait, SpotEvidence
from ebbflow.infra.notices import RECLAIMS

SCHEMA = 1
# The first steps of a generation compile kernels and fill caches.
_WARM_UP_STEPS = 3
# The deviation of a measured speed is computed from the means of this many equal parts of a
# generation.
_STRETCHES = 8
# Least deviation: the speed differs more between runs (other machines, a busy neighbour) than
# within a short run.
LEAST_LOG_DEVIATION = 0.03

# Half-life of observations, chosen by the likelihood of the next day's losses given all days
# before, in recorded traces (V100, 2023). One day was best of 6 h, 12 h, 1, 2, 3, 5, 7 and 14 days
# and no decay, both in nine zones and for gangs of four in three zones (log likelihood in nine
# zones: −1,262 against −1,503 without decay).
HALF_LIFE_HOURS = 24.0
# Losses come in bursts: daily counts vary 3 to 8 times as much as independent losses would (the
# same nine zones). So observations count as a quarter of as many independent ones, which widens the
# estimate but keeps its mean.
EVIDENCE_WORTH = 0.25

Place = tuple[str, str | None, str | None]

# Records read for a plan. Older jobs say little about today's pools, and each record costs a
# request.
NEWEST_JOBS = 200


@dataclass(frozen=True, kw_only=True)
class PoolStay:
    """Duration and end of one generation of a job in one pool.

    A generation is one start of all ranks of the job.
    """

    instance_type: str
    nodes: int
    market: str
    region: str | None
    zone: str | None
    ended_utc: float  # Unix time of the generation's end
    hours: float  # duration of the generation
    reclaimed: bool  # whether the generation ended because the provider took machines away
    # hours from the reclaim that ended this generation to the start of the run's next generation;
    # None if unknown
    gone_hours: float | None = None
    # whether the next generation ran in another pool. In that case this pool may have lacked
    # capacity for longer than `gone_hours`.
    moved: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """Median speed of one generation of a job (one start of all its ranks)."""

    instance_type: str
    nodes: int
    processes_per_node: int
    fingerprint: str  # hash of the settings that decide the speed (`cost.plan.throughput`)
    tokens_per_second: float  # speed of all ranks together
    log_deviation: (
        float  # standard deviation of the log of the speed between parts of the generation
    )
    steps: int  # number of measured steps
    seen_utc: float  # Unix time of the generation's end


@dataclass(frozen=True, kw_only=True)
class JobMeasurements:
    """Record of one job: duration and end of its generations (`stays`), and their speeds."""

    job: str
    stays: tuple[PoolStay, ...] = ()
    speeds: tuple[MeasuredSpeed, ...] = ()

    def to_json(self) -> JsonObject:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> JobMeasurements:
        """Read the result of `to_json`.

        Raises ValueError, KeyError or TypeError for another schema.
        """
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA}")
        return cls(
            job=data["job"],
            stays=tuple(PoolStay(**stay) for stay in data["stays"]),
            speeds=tuple(MeasuredSpeed(**speed) for speed in data["speeds"]),
        )


@dataclass(frozen=True)
class JobHistory:
    """Measurements of past jobs."""

    # generations on Spot by (instance type, region, zone). Zone None lists all generations of the
    # region.
    stays: Mapping[Place, Sequence[PoolStay]] = field(default_factory=dict)
    # Measured speeds by instance type
    speeds: Mapping[str, Sequence[MeasuredSpeed]] = field(default_factory=dict)

    @classmethod
    def of(cls, jobs: Iterable[JobMeasurements]) -> JobHistory:
        return cls().adding(*jobs)

    def adding(self, *jobs: JobMeasurements) -> JobHistory:
        """Return a new history that also has the measurements of `jobs`."""
        stays = defaultdict(list, {place: list(found) for place, found in self.stays.items()})
        speeds = defaultdict(list, {kind: list(found) for kind, found in self.speeds.items()})
        for job in jobs:
            for stay in job.stays:
                if stay.market != "spot":
                    continue
                stays[stay.instance_type, stay.region, None].append(stay)
                if stay.zone is not None:
                    stays[stay.instance_type, stay.region, stay.zone].append(stay)
            for speed in job.speeds:
                speeds[speed.instance_type].append(speed)
        return JobHistory(dict(stays), dict(speeds))

    def spot_evidence(
        self, instance_type: str, region: str | None, zone: str | None, now_utc: float
    ) -> tuple[SpotEvidence, int]:
        """Return the losses and waits of all recorded generations in a Spot pool.

        The number of nodes does not matter, because a pool is reclaimed as a whole. The weight of
        an observation has a half-life of one day. Each hour of a generation is weighted by its own
        age, not by the age of the generation's end. Otherwise the old hours of a long generation
        would count as much as its recent reclaim.

        Args:
            zone: None means the whole region.

        Returns:
            The observations, and the number of generations used.
        """
        found = self.stays.get((instance_type, region, zone), ())
        losses = 0.0
        hours = 0.0
        waits = []
        for stay in found:
            weight = EVIDENCE_WORTH * 0.5 ** (
                max(0.0, now_utc - stay.ended_utc) / 3600 / HALF_LIFE_HOURS
            )
            losses += weight * stay.reclaimed
            hours += (
                weight
                * HALF_LIFE_HOURS
                / math.log(2)
                * (1 - 0.5 ** (max(0.0, stay.hours) / HALF_LIFE_HOURS))
            )
            if stay.reclaimed and stay.gone_hours is not None:
                waits.append(ObservedWait(stay.gone_hours, stay.moved, weight))
        return SpotEvidence(losses=losses, hours=hours, waits=tuple(waits)), len(found)

    def speed(
        self, instance_type: str, nodes: int, processes_per_node: int, fingerprint: str
    ) -> MeasuredSpeed | None:
        """Return the newest speed measured with exactly these machines and settings
        (`fingerprint`), or None.
        """
        found = [
            seen
            for seen in self.speeds.get(instance_type, ())
            if (seen.nodes, seen.processes_per_node, seen.fingerprint)
            == (nodes, processes_per_node, fingerprint)
        ]
        return max(found, key=lambda seen: seen.seen_utc, default=None)

    def nearest_speed(
        self, instance_type: str, nodes: int, fingerprint: str
    ) -> MeasuredSpeed | None:
        """Return the speed measured with these settings on the most similar machines; None if none
        was measured.

        Measurements on the same instance type are preferred, then a similar number of nodes, then
        the newest one.
        """

        def distance(seen: MeasuredSpeed) -> tuple[bool, float, float]:
            ratio = max(seen.nodes, nodes) / min(seen.nodes, nodes)
            return seen.instance_type != instance_type, ratio, -seen.seen_utc

        every = [
            seen
            for found in self.speeds.values()
            for seen in found
            if seen.fingerprint == fingerprint
        ]
        return min(every, key=distance, default=None)


def summarize_job(events: Sequence[Event]) -> JobMeasurements:
    """Build a job's record from its events, in any order.

    A generation belongs to the last plan before its start.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    plans = select_plans(ordered)
    stays: list[PoolStay] = []
    speeds = []
    last_run = ""
    for generation in read_generations(ordered).values():
        plan = next(
            (event.payload for event in reversed(plans) if event.t_wall <= generation.started_wall),
            None,
        )
        if plan is None or plan.chosen is None or plan.simulated:
            continue
        own = [event for event in ordered if event.generation == generation.number]
        stay = _stay(plan.chosen, generation, own)
        run = own[0].run
        if stays and stays[-1].reclaimed and run == last_run:
            gone = max(0.0, generation.started_wall - stays[-1].ended_utc) / 3600
            stays[-1] = replace(stays[-1], gone_hours=gone, moved=_place(stay) != _place(stays[-1]))
        stays.append(stay)
        last_run = run
        speed = _speed(plan.fingerprint, plan.chosen, generation, own)
        if speed is not None:
            speeds.append(speed)
    return JobMeasurements(
        job=ordered[0].job if ordered else "", stays=tuple(stays), speeds=tuple(speeds)
    )


def save_job_record(root: Store, events: Sequence[Event]) -> JobMeasurements | None:
    """Write the job's record to `root`, the store of all jobs, and return the record.

    Raises StoreError.

    If the job has no measurements, write no record and return None.
    """
    if not events:
        return None
    found = summarize_job(events)
    if not found.stays and not found.speeds:
        return None
    day = datetime.fromtimestamp(min(event.t_wall for event in events), UTC).strftime("%Y%m%d")
    root.put(job_history_key(day, found.job), json.dumps(found.to_json(), indent=1).encode())
    return found


def load_or_use_priors(
    load: Callable[[], JobHistory], say: Callable[[str], object] = lambda _: None
) -> JobHistory:
    """Call `load` and return its job history.

    If the store does not answer, say so and return an empty history.
    """
    try:
        return load()
    except InfraError as error:
        say(f"job history unavailable; using priors for pools and throughput: {error}")
        return JobHistory()


def load_job_history(root: Store) -> JobHistory:
    """Read the newest `NEWEST_JOBS` records of the store; unreadable ones are skipped.

    Raises StoreError.
    """
    jobs = []
    for key in sorted(meta.key for meta in root.list(JOB_HISTORY_PREFIX))[-NEWEST_JOBS:]:
        try:
            jobs.append(JobMeasurements.from_json(json.loads(root.get(key))))
        except (ObjectNotFound, ValueError, KeyError, TypeError, RecursionError):
            continue  # deleted meanwhile, or written by another version
    return JobHistory.of(jobs)


def _place(stay: PoolStay) -> tuple[str, str, str | None, str | None]:
    return stay.market, stay.instance_type, stay.region, stay.zone


def _stay(chosen: PlannedPool, generation: RecordedGeneration, events: Sequence[Event]) -> PoolStay:
    """Build the record of one generation in its pool.

    The generation counts as reclaimed if a reclaim notice or the sudden loss of a node ended it.
    The death of a rank, a stop by the user and a rehearsal do not count. A notice does not count
    either if the job only waited until it expired. Either no machine was taken away, or an earlier
    generation received the same notice and already counts as reclaimed.
    """
    nodes = select_events(events, NodeStartedPayload)
    machine = nodes[0].payload if nodes else NodeStartedPayload()
    zone = chosen.zone  # an id, or a name where prices have no ids
    market = machine.market or chosen.market  # a queue may have fallen back to on-demand
    notices = [event.payload for event in select_events(events, NoticePayload)]
    noticed = any(notice.action in RECLAIMS for notice in notices if notice.does != "wait")
    waited = any(notice.does == "wait" for notice in notices)
    lost = generation.reason in (EndReason.NODE_LOST, None) and not (
        waited and not any(e.rank >= 0 for e in events)
    )
    rehearsed = any(event.name == ev.FAULT_INJECTED for event in events)
    started = _find_start(events)
    return PoolStay(
        instance_type=_type_of(chosen, events),
        nodes=started.nodes or chosen.nodes or 1,
        market=market,
        region=chosen.region,
        zone=zone if zone and zone == machine.zone else machine.zone_id or zone,
        ended_utc=generation.ended_wall,
        hours=(generation.ended_wall - generation.started_wall) / 3600,
        reclaimed=market == "spot" and generation.unplanned and (noticed or lost) and not rehearsed,
    )


def _speed(
    fingerprint: str | None,
    chosen: PlannedPool,
    generation: RecordedGeneration,
    events: Sequence[Event],
) -> MeasuredSpeed | None:
    first_rank = min((event.rank for event in events if event.rank >= 0), default=0)
    steps = [event for event in events if event.name == ev.STEP and event.rank == first_rank]
    rates = (compute_rate(event, "tokens") for event in steps[_WARM_UP_STEPS:])
    speeds = [speed for speed in rates if speed is not None]
    if fingerprint is None or len(speeds) < 2 * _STRETCHES:
        return None
    started = _find_start(events)
    size = len(speeds) // _STRETCHES
    stretches = [
        math.log(fmean(speeds[index * size : (index + 1) * size])) for index in range(_STRETCHES)
    ]
    return MeasuredSpeed(
        instance_type=_type_of(chosen, events),
        nodes=started.nodes or chosen.nodes or 1,
        processes_per_node=started.processes_per_node or chosen.processes_per_node or 1,
        fingerprint=fingerprint,
        tokens_per_second=median(speeds),
        log_deviation=max(LEAST_LOG_DEVIATION, stdev(stretches)),
        steps=len(speeds),
        seen_utc=generation.ended_wall,
    )


def _type_of(chosen: PlannedPool, events: Sequence[Event]) -> str:
    """Return the instance type that the first node reported.

    If it reported none, return the planned type.
    """
    reported = (event.payload.instance_type for event in select_events(events, NodeStartedPayload))
    return next((kind for kind in reported if kind), chosen.instance_type)


def _find_start(events: Sequence[Event]) -> GenerationStartedPayload:
    """Return the first recorded start of a generation, or an empty payload if there is none."""
    starts = select_events(events, GenerationStartedPayload)
    if starts:
        return starts[0].payload
    return GenerationStartedPayload()

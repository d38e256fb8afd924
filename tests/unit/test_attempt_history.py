"""How earlier attempts ended, as read from a job's events in any order (`cost.capacity.placement`)."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

from ebbflow.core.events import (
    BATCH_ATTEMPT,
    BATCH_SUBMITTED,
    GENERATION_ENDED,
    NODE_STARTED,
    NOTICE,
    PLACED,
    Event,
)
from ebbflow.cost.capacity import (
    AttemptHistory,
    PastAttempt,
    batch_attempt_data,
    read_attempts,
)
from ebbflow.cost.capacity.placement import (
    ENDED,
    NEVER_STARTED,
    NOT_MADE,
    RECLAIMED,
    TERMINATED,
    UNKNOWN,
    USER_CODE,
    find_offers,
)
from ebbflow.infra.batch.jobs import CAUSES, BatchAttempt
from tests.support.capacity import queues
from tests.support.placing import in_region, placement
from tests.support.pools import spot_pool
from tests.support.timelines import WALL, event

RECLAIM = {"source": "metadata", "action": "terminate"}


class Log:
    """The events of a job, in the order in which they are added."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, name: str, *, run: str = "run-1", attempt: int = 0, **data: Any) -> None:
        at = float(len(self.events))
        self.events.append(replace(event(name, at, **data), run=run, attempt=attempt))

    def place(
        self, queue: str = "spot", *, run: str = "run-1", attempt: int = 0, **data: Any
    ) -> None:
        self.add(
            PLACED, run=run, attempt=attempt, placement=placement(queue=queue).to_json(), **data
        )

    def submit(self, job_id: str, *, run: str = "run-1", attempt: int = 0, **data: Any) -> None:
        self.add(BATCH_SUBMITTED, run=run, attempt=attempt, job_id=job_id, **data)

    def end(self, job_id: str, cause: str = "reclaimed", **data: Any) -> None:
        self.add(BATCH_ATTEMPT, **{**asdict(batch_attempt(job_id=job_id, cause=cause)), **data})

    def read(self) -> list[tuple[str, str, str]]:
        """Return (queue, job id, cause) of each attempt, which must not depend on the order of the
        events.
        """
        attempts = read_attempts(self.events).attempts
        assert read_attempts(self.events[::-1]).attempts == attempts
        return [(attempt.placement.queue, attempt.job_id, attempt.cause) for attempt in attempts]


def test_records_of_attempts_are_named_and_cannot_be_changed() -> None:
    [offer] = find_offers([spot_pool()], queues(in_region(None)))
    log = Log()
    log.place()
    history = read_attempts(log.events)
    last = history.last
    assert last is not None
    for record, name in (
        (last.placement, "queue"),
        (last, "cause"),
        (offer, "queue"),
        (history, "attempts"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, "other")
        with pytest.raises(TypeError, match="positional"):
            type(record)(*([1] * len(asdict(record))))


def test_attempt_causes_come_from_batch_records() -> None:
    assert {RECLAIMED, USER_CODE, NEVER_STARTED, NOT_MADE, TERMINATED, ENDED, UNKNOWN} == set(
        CAUSES
    )
    assert (RECLAIMED, USER_CODE, NEVER_STARTED) == ("reclaimed", "user_code", "never_started")
    assert (NOT_MADE, TERMINATED, ENDED, UNKNOWN) == ("not_made", "terminated", "ended", "unknown")
    assert {cause for cause in CAUSES if past(cause).refused} == {NEVER_STARTED, TERMINATED}


def past(cause: str, **times: float | None) -> PastAttempt:
    return PastAttempt(placement=placement(), placed_utc=WALL, cause=cause, **times)


@pytest.mark.parametrize(
    ("cause", "started", "refused"),
    [
        (NEVER_STARTED, None, True),
        (NEVER_STARTED, WALL, True),
        (TERMINATED, None, True),
        (TERMINATED, WALL, False),
        (NOT_MADE, None, False),
        (RECLAIMED, None, False),
        (USER_CODE, None, False),
        (UNKNOWN, None, False),
        (ENDED, WALL, False),
    ],
)
def test_a_pool_refused_an_attempt_that_never_started_or_was_terminated_before_it(
    cause: str, started: float | None, refused: bool
) -> None:
    assert past(cause, started_utc=started).refused is refused


def test_an_attempt_ended_at_its_latest_known_time() -> None:
    times = {"created_utc": WALL + 1, "started_utc": WALL + 2, "stopped_utc": WALL + 3}
    assert past(ENDED).ended_utc == WALL
    assert past(ENDED, created_utc=WALL + 1).ended_utc == WALL + 1
    assert past(ENDED, started_utc=WALL + 2).ended_utc == WALL + 2
    assert past(ENDED, **times).ended_utc == WALL + 3
    assert (
        past(ENDED, created_utc=WALL - 3, started_utc=WALL - 2, stopped_utc=WALL - 1).ended_utc
        == WALL
    )
    assert past(ENDED, **{**times, "started_utc": WALL + 9}).ended_utc == WALL + 9


def test_now_is_never_before_the_latest_time_that_batch_reported() -> None:
    stopped = past(ENDED, created_utc=WALL + 1, started_utc=WALL + 2, stopped_utc=WALL + 30)
    started = past(UNKNOWN, created_utc=WALL + 1, started_utc=WALL + 20)
    created = past(UNKNOWN, created_utc=WALL + 10)
    for attempts, latest in (
        ((), WALL),
        ((past(UNKNOWN),), WALL),
        ((created, past(UNKNOWN)), WALL + 10),
        ((started, created), WALL + 20),
        ((stopped, started, created), WALL + 30),
    ):
        history = AttemptHistory(attempts=attempts)
        assert history.latest_utc(WALL) == latest
        assert history.latest_utc(WALL + 99) == WALL + 99
        assert history.last == (attempts[-1] if attempts else None)


def batch_attempt(**values: Any) -> BatchAttempt:
    known = {
        "job_id": "job-1",
        "job_name": "train",
        "queue": "spot",
        "nodes": 2,
        "status": "FAILED",
        "created_utc": WALL + 10,
        "started_utc": WALL + 20,
        "stopped_utc": WALL + 30,
        "exit_code": 1,
        "reason": "Host EC2 terminated",
        "cause": "reclaimed",
    }
    return BatchAttempt(**{**known, **values})


def test_the_event_of_an_attempt_has_batchs_record_and_the_placements_machines_and_price() -> None:
    data = batch_attempt_data(batch_attempt(), placement(zone=None))
    assert data == {
        **asdict(batch_attempt()),
        "instance_type": "g5.xlarge",
        "market": "spot",
        "region": "us-east-1",
        "zone": None,
        "processes_per_node": 1,
        "usd_per_hour": 1.5,
        "quoted_usd_per_hour": "1.50",
        "price_kind": "live",
        "volume_usd_per_hour": "0",
    }
    without = batch_attempt_data(batch_attempt(), None)
    assert without.keys() == data.keys()
    assert without["usd_per_hour"] is None


def test_an_attempt_has_every_field_of_its_events() -> None:
    log = Log()
    log.place(after_generation=3)
    log.submit("job-1")
    log.end("job-1")
    assert read_attempts(log.events).attempts == (
        PastAttempt(
            placement=placement(queue="spot"),
            placed_utc=WALL,
            job_id="job-1",
            cause="reclaimed",
            reason="Host EC2 terminated",
            created_utc=WALL + 10,
            started_utc=WALL + 20,
            stopped_utc=WALL + 30,
            run="run-1",
            after_generation=3,
        ),
    )
    assert (past(UNKNOWN).reason, past(UNKNOWN).job_id, past(UNKNOWN).run) == ("", "", "")
    assert past(UNKNOWN).after_generation == 0
    assert PastAttempt(placement=placement(), placed_utc=WALL).cause == UNKNOWN


def test_an_attempt_without_an_end_is_unknown_and_its_missing_times_too() -> None:
    log = Log()
    log.place("a")
    log.submit("job-1")
    log.place("b", attempt=1)
    log.submit("job-2", attempt=1)
    log.end("job-2", cause="", reason=None, created_utc=None, started_utc=None, stopped_utc=7)
    first, second = read_attempts(log.events).attempts
    assert (first.job_id, first.cause, first.started_utc) == ("", UNKNOWN, None)
    assert (second.cause, second.reason) == (UNKNOWN, "")
    assert (second.created_utc, second.started_utc, second.stopped_utc) == (None, None, 7.0)
    assert isinstance(second.stopped_utc, float)


def test_the_newest_record_of_a_job_counts() -> None:
    log = Log()
    log.place()
    log.submit("job-1")
    log.end("job-1", cause="unknown")
    log.end("job-1", cause="reclaimed")
    assert log.read() == [("spot", "job-1", "reclaimed")]


def test_events_of_one_moment_are_ordered_by_the_monotonic_clock() -> None:
    log = Log()
    log.place("a")
    log.submit("job-1")
    log.end("job-1", cause="unknown")
    log.end("job-1", cause="reclaimed")
    log.events = [replace(event, t_wall=WALL) for event in log.events]
    assert log.read() == [("a", "job-1", "reclaimed")]
    log.events = [
        replace(event, t_wall=WALL + event.t_mono, t_mono=-event.t_mono) for event in log.events
    ]
    assert log.read() == [("a", "job-1", "reclaimed")], (
        "the wall clock comes first: machines have other monotonic ones"
    )


def test_unreadable_placements_are_skipped() -> None:
    log = Log()
    log.add(PLACED, placement={"queue": "no more of it"})
    log.add(PLACED)
    log.add("another", placement=placement().to_json())
    log.place("a")
    log.end("job-1")
    assert log.read() == [("a", "job-1", "reclaimed")]


def test_a_submitted_job_belongs_to_the_placement_of_its_run_attempt_step_and_task() -> None:
    places = [
        {"run": "run-1", "attempt": 0, "step": "train", "task": "1"},
        {"run": "run-2", "attempt": 0, "step": "train", "task": "1"},
        {"run": "run-1", "attempt": 1, "step": "train", "task": "1"},
        {"run": "run-1", "attempt": 0, "step": "other", "task": "1"},
        {"run": "run-1", "attempt": 0, "step": "train", "task": "2"},
    ]

    log = Log()

    def add(name: str, place: dict[str, Any], **data: Any) -> None:
        known = {"task": place["task"], **data}
        made = event(name, float(len(log.events)), step=place["step"])
        log.events.append(replace(made, run=place["run"], attempt=place["attempt"], data=known))

    for number, place in enumerate(places):
        add(PLACED, place, placement=placement(queue=f"q{number}").to_json())
    for number in (3, 1, 4, 0, 2):
        add(BATCH_SUBMITTED, places[number], job_id=f"job-{number}")
    for number in range(5):
        log.end(f"job-{number}")
    assert log.read() == [(f"q{number}", f"job-{number}", "reclaimed") for number in range(5)]


def test_a_later_placement_of_the_same_try_has_the_jobs_that_are_submitted_after_it() -> None:
    log = Log()
    log.place("a")
    log.submit("job-1")
    log.place("b")
    log.submit("job-2")
    log.end("job-1")
    log.end("job-2", cause="ended")
    assert log.read() == [("a", "job-1", "reclaimed"), ("b", "job-2", "ended")]


def test_a_job_that_an_unanswered_submit_made_twice_belongs_to_no_placement() -> None:
    log = Log()
    log.place("a")
    log.submit("twin", twin_of="job-1")
    log.add("another", job_id="job-1", twin_of=None)
    log.end("twin", cause="terminated")
    log.end("job-1")
    assert log.read() == [("a", "job-1", "reclaimed")]


def test_without_a_submit_the_first_record_before_the_next_placement_is_the_attempts() -> None:
    log = Log()
    log.place("a")
    log.end("job-1")
    log.end("job-2", cause="ended")
    log.place("b")
    log.end("job-1")
    log.end("job-3", cause="ended")
    log.place("c")
    assert log.read() == [("a", "job-1", "reclaimed"), ("b", "job-3", "ended"), ("c", "", UNKNOWN)]


def test_a_record_that_came_between_two_placements_may_come_again_for_the_later_one() -> None:
    log = Log()
    log.place("a")
    log.end("job-1")
    log.end("job-2", cause="unknown")
    log.place("b")
    log.end("job-2", cause="ended")
    assert log.read() == [("a", "job-1", "reclaimed"), ("b", "job-2", "ended")]


def test_a_record_of_a_submitted_job_is_not_taken_for_another_placements() -> None:
    log = Log()
    log.place("a")
    log.submit("job-1")
    log.place("b", attempt=1)
    log.end("job-1")
    log.end("job-2", cause="ended")
    assert log.read() == [("a", "job-1", "reclaimed"), ("b", "job-2", "ended")]


def test_a_placement_whose_job_is_known_takes_no_record_of_another_one() -> None:
    log = Log()
    log.place("a")
    log.place("b", attempt=1)
    log.submit("job-2", attempt=1)
    log.end("job-3", cause="ended")
    log.end("job-2")
    assert log.read() == [("a", "", UNKNOWN), ("b", "job-2", "reclaimed")]


def test_a_job_whose_submit_matches_no_placement_is_left_to_the_next_one() -> None:
    log = Log()
    log.submit("job-0", attempt=7)
    log.place("a")
    log.end("job-0")
    assert log.read() == [("a", "job-0", "reclaimed")]


def test_the_generation_of_a_placement_never_falls() -> None:
    log = Log()
    for reached in (2, None, 5, 4):
        log.place(after_generation=reached)
    log.place()
    assert [attempt.after_generation for attempt in read_attempts(log.events).attempts] == [
        2,
        2,
        5,
        5,
        5,
    ]
    without = Log()
    without.place()
    assert read_attempts(without.events).attempts[0].after_generation == 0


@pytest.mark.parametrize(
    ("told", "corrected"),
    [
        ("ended", True),
        ("unknown", True),
        ("user_code", True),
        ("terminated", True),
        ("never_started", False),
        ("not_made", False),
        ("reclaimed", True),
    ],
)
def test_a_spot_notice_corrects_batchs_cause_of_a_job_that_ran(told: str, corrected: bool) -> None:
    log = Log()
    log.place()
    log.submit("job-1")
    log.add(NODE_STARTED, generation=1, batch_job_id="job-1")
    log.add(NOTICE, generation=1, **RECLAIM)
    log.end("job-1", cause=told)
    assert log.read() == [("spot", "job-1", "reclaimed" if corrected else told)]


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_each_action_that_takes_the_machine_is_a_reclaim(action: str) -> None:
    log = Log()
    log.place()
    log.add(NODE_STARTED, generation=1, batch_job_id="job-1")
    log.add(NOTICE, generation=1, source="metadata", action=action)
    log.end("job-1", cause="unknown")
    assert log.read()[0][2] == "reclaimed"


@pytest.mark.parametrize(
    "told", ["ended", "unknown", "user_code", "terminated", "reclaimed", "never_started"]
)
@pytest.mark.parametrize("user_code", [True, False])
def test_the_agents_correct_only_whether_the_program_failed(told: str, user_code: bool) -> None:
    log = Log()
    log.place()
    log.submit("job-1")
    log.add(NODE_STARTED, generation=1, batch_job_id="job-1")
    log.add(GENERATION_ENDED, generation=1, user_code=user_code)
    log.end("job-1", cause=told)
    if user_code:
        agents = "user_code"
    else:
        agents = "unknown"
    assert log.read()[0][2] == (agents if told in ("user_code", "unknown") else told)


def test_other_notices_and_ends_without_a_verdict_correct_nothing() -> None:
    for extra in (
        (NOTICE, {"source": "metadata", "action": "rebalance"}),
        (NOTICE, {"source": "signal"}),
        (GENERATION_ENDED, {"reason": "planned"}),
        (NODE_STARTED, {"action": "terminate", "user_code": False}),
    ):
        log = Log()
        log.place()
        log.submit("job-1")
        log.add(NODE_STARTED, generation=1, batch_job_id="job-1")
        log.add(extra[0], generation=1, **extra[1])
        log.end("job-1", cause="user_code")
        assert log.read()[0][2] == "user_code", extra


def test_a_notice_concerns_all_jobs_of_its_generation_and_no_other() -> None:
    log = Log()
    for number in range(3):
        log.place(f"q{number}", attempt=number)
        log.submit(f"job-{number}", attempt=number)
    log.add(NODE_STARTED, generation=1, batch_job_id="job-0")
    log.add(NODE_STARTED, generation=1, batch_job_id="job-1")
    log.add(NODE_STARTED, generation=2, batch_job_id="job-2")
    log.add(NODE_STARTED, generation=3)
    log.add("another", generation=1, batch_job_id="job-2")
    log.add(NOTICE, generation=1, **RECLAIM)
    log.add(NOTICE, generation=9, **RECLAIM)
    for number in range(3):
        log.end(f"job-{number}", cause="unknown")
    assert [cause for _, _, cause in log.read()] == ["reclaimed", "reclaimed", "unknown"]


def test_only_a_jobs_last_generation_decides_whether_its_program_ended_it() -> None:
    log = Log()
    log.place()
    log.submit("job-1")
    # The later generation is told first.
    log.add(NODE_STARTED, generation=2, batch_job_id="job-1")
    log.add(NODE_STARTED, generation=1, batch_job_id="job-1")
    log.add(GENERATION_ENDED, generation=1, user_code=True)
    log.end("job-1", cause="unknown")
    assert log.read()[0][2] == "unknown"
    log.add(GENERATION_ENDED, generation=2, user_code=True)
    assert log.read()[0][2] == "user_code"


def test_a_reclaim_is_a_better_cause_than_the_programs_failure() -> None:
    log = Log()
    log.place()
    log.submit("job-1")
    log.add(NODE_STARTED, generation=1, batch_job_id="job-1")
    log.add(NOTICE, generation=1, **RECLAIM)
    log.add(GENERATION_ENDED, generation=1, user_code=True)
    log.end("job-1", cause="user_code")
    assert log.read()[0][2] == "reclaimed"

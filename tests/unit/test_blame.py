"""Who is to blame, by evidence alone; how long a phase may take; what flight recorders and stacks
say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ebbflow.training.launch.blame import blame, detect_mismatch, settle_seconds
from ebbflow.training.launch.evidence import (
    find_furthest_behind,
    find_mismatch,
    parse_faulthandler,
    parse_py_spy,
    parse_traceback,
)
from ebbflow.training.launch.heartbeat import (
    DurationHistogram,
    HangLimits,
    HeartbeatReading,
    PhaseThresholds,
)
from ebbflow.training.launch.messages import end_from_failures
from tests.support.rank_evidence import calls, failed, hung

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer"
STEP = ["all_reduce [[100]]", "all_gather [[8]]"]

echo = failed(0, message=LOST, cascade=True)
killed = failed(2, killed_by="SIGKILL")
CASES = {
    "echo seen first": ([echo, killed], 2, "killed by SIGKILL"),
    "exception, then kill": (
        [failed(1, error="ValueError"), failed(0, killed_by="SIGSEGV", timestamp=103.0)],
        1,
        "ValueError",
    ),
    "kill, then its echo": (
        [failed(1, error="OSError", timestamp=101.95), killed],
        2,
        "killed by SIGKILL",
    ),
    "memory": ([failed(0, killed_by="SIGKILL", memory_kill=True), hung(1)], 0, "killed for memory"),
    "stopped among the hung": ([hung(0), hung(1, stopped=True)], 1, "stopped"),
    "an abort after another's end": (
        [failed(0, killed_by="SIGABRT", timestamp=90.0), failed(1, error="ValueError")],
        1,
        "ValueError",
    ),
    "a lost node takes its ranks along": (
        [killed, failed(4, lost_node=2)],
        4,
        "killed by node 2",
    ),
    "outside of a collective": (
        [hung(0, step=5, phase="backward"), hung(1, waiting=False, step=5, phase="data")],
        1,
        "hang",
    ),
    "a witness outside of it": (
        [hung(0), hung(1, waiting=False, hung=False, witness=True)],
        1,
        "hang",
    ),
    "all wait, one is behind": (
        [hung(0, step=5, phase="backward"), hung(1, step=5, phase="forward")],
        1,
        "hang",
    ),
    "fewer collectives": (
        [hung(0, calls=calls(*STEP, "x")), hung(1, calls=calls(*STEP))],
        1,
        "hang",
    ),
    "left too early": ([echo, failed(1, left=True, witness=True)], 1, "left early"),
}

USER = "user/loss.py:9 in log"
ENGINE = "training/engine/loop.py:73 in forward_backward"


@pytest.mark.parametrize("name", CASES)
def test_the_culprit(name: str) -> None:
    evidence, rank, kind = CASES[name]
    for order in (evidence, evidence[::-1]):  # who is heard first does not matter
        culprit = blame(order)
        assert (culprit.rank, culprit.kind) == (rank, kind), culprit
        assert rank not in culprit.cascades and culprit.next_action and culprit.because


def test_recorders_that_differ_prove_it_before_anybody_has_failed() -> None:
    history = STEP * 5
    evidence = [
        hung(0, witness=True, hung=False, calls=calls(*history, "all_reduce [[100]]")),
        hung(
            1,
            witness=True,
            hung=False,
            calls=calls(*history, "broadcast [[3]]"),
            where="user/loss.py:9 in log",
        ),
    ]
    for order in (evidence, evidence[::-1]):
        culprit = blame(order)
        assert detect_mismatch(order) and (culprit.rank, culprit.certainty) == (1, "proven")
        assert (
            "collective 11 of group 0 is broadcast [[3]] on rank 1 and all_reduce [[100]] on rank 0"
            in culprit.message
        )
        assert "user/loss.py:9" in culprit.next_action


@pytest.mark.parametrize("guilty", [0, 1])
def test_in_a_first_step_the_rank_outside_the_training_loop_is_at_fault(guilty: int) -> None:
    places = {
        guilty: "user/save.py:7 in save",
        1 - guilty: "training/engine/loop.py:102 in forward_backward",
    }
    called = {guilty: "barrier []", 1 - guilty: "all_reduce [[10]]"}
    evidence = [
        hung(
            rank,
            witness=True,
            hung=False,
            where=places[rank],
            calls=calls("broadcast [[1]]", called[rank]),
        )
        for rank in (0, 1)
    ]
    for order in (evidence, evidence[::-1]):
        culprit = blame(order)
        assert (culprit.rank, culprit.where) == (guilty, "user/save.py:7 in save")


def test_a_minority_of_ranks_is_blamed_whatever_the_usual_culprit() -> None:
    ranks = {rank: calls("barrier" if rank != 2 else "all_reduce [[1]]") for rank in range(4)}
    assert find_mismatch(ranks).ranks == [2]
    assert find_mismatch({0: calls(*STEP), 1: calls(*STEP, start=3)}) is None
    coalesced = [["0", 1, "all_gather [[4]]"], ["0", 1, "all_gather [[8]]"]]
    assert find_mismatch({0: coalesced, 1: coalesced[:1]}) is None
    assert find_furthest_behind({0: calls(*STEP), 1: calls(*STEP[:1]), 2: calls(*STEP)}) == [1]


def test_of_ranks_that_wait_in_a_chain_the_last_is_furthest_behind() -> None:
    """Shards {0, 1} and {2, 3}, copies {0, 2} and {1, 3}: 2 waits for 3, and 0 for 2."""
    last = {0: {"a": 5, "c": 3}, 1: {"a": 5, "d": 3}, 2: {"b": 5, "c": 2}, 3: {"b": 4, "d": 2}}
    records = {}
    for rank, operations in last.items():
        records[rank] = [[group, number, "x"] for group, number in operations.items()]
    assert find_furthest_behind(records) == [3]


def test_a_network_that_breaks_is_nobodys_fault() -> None:
    culprit = blame([failed(rank, message=LOST, cascade=True) for rank in (1, 0)])
    assert culprit.certainty == "slow" and "network" in culprit.message and culprit.cascades == [1]


def test_echoes_are_given_time_for_their_cause() -> None:
    echo = failed(0, cascade=True)
    cause = failed(1, killed_by="SIGKILL")
    assert settle_seconds([hung(0)]) > settle_seconds([hung(0)], all_heard=True) > 0
    outside = hung(1, waiting=False)
    assert settle_seconds([echo]) > settle_seconds([outside]) > settle_seconds([echo, cause])


def test_ranks_that_lost_a_peer_at_different_places_are_tried_again_unless_gloo_saw_other_sizes() -> (
    None
):
    places = [{"where": "training/engine/loop.py:9 in a"}, {"where": "user/loss.py:9 in log"}]
    broken = [
        failed(rank, message=LOST, cascade=True, **place) for rank, place in enumerate(places)
    ]
    assert blame(broken).kind == "different collectives" and end_from_failures(broken).again
    size = "RuntimeError: op.preamble.length <= op.nbytes. 12 vs 4"
    assert not end_from_failures([replace(broken[0], message=size), broken[1]]).again


@pytest.mark.parametrize(
    ("known", "again"),
    [
        ({"error": "ValueError", "message": "ValueError: cannot read sample 17"}, True),
        (
            {
                "error": "RuntimeError",
                "message": "RuntimeError: Expected to have finished reduction in the prior iteration",
            },
            False,
        ),
        ({"left": True, "completed": True, "witness": True}, False),
        ({"left": True, "witness": True, "message": "left after step 19: completed"}, True),
    ],
)
def test_a_failure_that_repeats_in_each_start_is_not_retried(
    known: dict[str, Any], again: bool
) -> None:
    end = end_from_failures([failed(1, **known), echo])
    assert (end.again, end.curable) == (again, again)


def test_fingerprints_hold_no_number_that_varies() -> None:
    first, again = (
        hung(1, waiting=False, step=step, message=f"no progress at step {step}") for step in (5, 9)
    )
    assert (
        blame([first]).fingerprint == blame([again]).fingerprint == "hang at user/data.py:7 in read"
    )


def limits(**known: float) -> PhaseThresholds:
    return PhaseThresholds(
        HangLimits(
            **{
                "floor_seconds": 3.0,
                "start_seconds": 100.0,
                "store_seconds": 130.0,
                "longest_seconds": 300.0,
                **known,
            }
        )
    )


def test_a_phase_may_take_ten_times_its_p99_once_it_is_known() -> None:
    learned = limits()
    now = 0.0
    for step in range(1, 300):
        for phase, seconds in (("data", 0.2), ("backward", 2.0)):
            learned.observe(HeartbeatReading(1, step, phase, now, step), now + 0.01)
            now += seconds
            learned.observe(HeartbeatReading(1, step, phase, now - seconds, step), now - 0.01)
    assert learned.hang_threshold(HeartbeatReading(1, 300, "data", now, 300)) == 3.0  # the floor
    assert 20.0 <= learned.hang_threshold(HeartbeatReading(1, 300, "backward", now, 300)) <= 24.0
    # Over before anybody could look
    assert learned.hang_threshold(HeartbeatReading(1, 300, "forward", now, 300)) == 3.0
    patient = {"init": 100.0, "restore": 100.0, "evaluation": 300.0, "checkpoint": 300.0}
    assert {
        phase: learned.hang_threshold(HeartbeatReading(1, 300, phase, now, 1)) for phase in patient
    } == patient
    assert learned.hang_threshold(HeartbeatReading(1, 300, "checkpoint", now, 2)) == 3.0
    # However short it was before: the save has a deadline of its own
    for moment in (0.0, 0.1, 0.2):
        learned.observe(HeartbeatReading(1, 300, "store", now + moment, 2), now + moment)
    assert learned.hang_threshold(HeartbeatReading(1, 300, "store", now, 3)) == 130.0


def test_the_first_step_has_time_and_nothing_has_more_than_the_longest() -> None:
    learned = limits(floor_seconds=60.0, longest_seconds=40.0)
    first = HeartbeatReading(1, 7, "forward", 0.0, 1)
    learned.observe(first, 0.1)
    assert (learned.hang_threshold(first), learned.suspicion_threshold(first)) == (40.0, 5.0)
    assert (
        learned.hang_threshold(HeartbeatReading(1, 8, "forward", 0.0, 2)),
        learned.suspicion_threshold(HeartbeatReading(1, 8, "forward", 0.0, 2)),
    ) == (
        40.0,
        3.0,
    )


def test_quantiles_are_never_too_low_and_at_most_a_fifth_too_high() -> None:
    durations = DurationHistogram()
    for number in range(1, 1001):
        durations.add(number / 100)
    assert all(share * 10 <= durations.quantile(share) <= share * 12 for share in (0.1, 0.5, 0.99))


def test_stacks_in_every_form_name_the_users_line() -> None:
    library = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    frames = [
        {"filename": library, "line": 1, "name": "wait"},
        {"filename": "/a/user/loss.py", "line": 9, "name": "log"},
    ]
    spied = (
        f'[{{"thread_name": "MainThread", "active": false, "owns_gil": false, "frames": {frames}}}]'
    ).replace("'", '"')
    assert (parse_py_spy(spied).where, parse_py_spy(spied).waiting) == (
        "user/loss.py:9 in log",
        True,
    )
    told = (
        f'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 3 in run\n\n'
        f"Current thread 0x2 (most recent call first):\n"
        f'  File "{library}", line 1 in wait\n  File "/a/user/loss.py", line 9 in log\n'
    )
    assert (parse_faulthandler(told).where, parse_faulthandler(told).waiting) == (
        "user/loss.py:9 in log",
        True,
    )
    raised = (
        f'  File "/a/user/loss.py", line 9, in log\n    x()\n  File "{library}", line 1, in wait\n'
    )
    assert parse_traceback(raised) == "user/loss.py:9 in log"


def test_a_rank_in_an_exchange_has_the_position_of_its_caller() -> None:
    told = (
        'Current thread 0x2 (most recent call first):\n  File "/venv/lib/python3.11/site-packages/'
        'torch/distributed/distributed_c10d.py", line 160 in all_gather_single\n  File '
        '"/a/training/gang.py", line 45 in gather\n  File "/a/user/loss.py", line 9 in log\n'
    )
    stack = parse_faulthandler(told)
    assert (stack.where, stack.waiting) == ("user/loss.py:9 in log", True)


def test_one_stall_is_no_habit() -> None:
    durations = DurationHistogram()
    for seconds in [0.1] * 30 + [20.0]:
        durations.add(seconds)
    assert durations.quantile(0.99) < 0.2
    durations.add(20.0)
    assert durations.quantile(0.99) > 19

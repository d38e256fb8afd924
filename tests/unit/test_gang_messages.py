"""Messages between launchers, agents and ranks: the results of generations, the orders, and what
nodes compare.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import (
    DataConfig,
    ModelConfig,
    RunConfig,
    SurvivalConfig,
    TrainingConfig,
)
from ebbflow.core.errors import Outcome
from ebbflow.core.events import EndReason, Event
from ebbflow.core.terms import Fallback, Terms
from ebbflow.training.launch import messages
from ebbflow.training.launch.agent_messages import decode, encode
from ebbflow.training.launch.crash_loop import (
    FailedGeneration,
    find_crash_loop,
    read_failed_generations,
)
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.messages import (
    CAUSES,
    SPEC_VARIABLE,
    GangOutcome,
    GangSpec,
    GenerationEnd,
    GenerationStart,
    OrderRecord,
    RankOrder,
    RankResult,
    WorkerSpec,
    describe_node,
    end_for_left_out_node,
    end_from_failures,
    end_from_results,
    end_from_stop_request,
    end_if_unaffordable,
    find_differences,
)
from tests.support.rank_evidence import calls, failed, hung, seen

ONE_NODE: dict[str, Any] = {
    "job": "job",
    "run": "17",
    "attempt": 3,
    "config": RunConfig(),
    "store_uri": "store",
    "prepared": {},
}
LAUNCHED: dict[str, Any] = {**ONE_NODE, "main_address": "127.0.0.1", "log_folder": "logs"}
START = GenerationStart(
    generation=4,
    generation_id="x",
    candidates=[],
    rendezvous_port=1,
    terms=None,
    rehearse=None,
    hosts=["a", "b", "a"],
    nodes=[0, 2, 3],
)

SETTINGS = RunConfig(
    store="elsewhere",
    model=ModelConfig(hidden_size=32),
    training=TrainingConfig(seed=1),
    data=DataConfig(path="text"),
    workload="language",
    workload_options={"rank": 8},
)

# A rule of `diagnose` calls it incurable
DEADLOCK = "Expected to have finished reduction in the prior iteration"
USER = "user/loss.py:9 in log"
ENGINE = "training/engine/loop.py:73 in forward_backward"

NO_INTERFACE = (
    "ncclSystemError: System call failed.\nLast error:\nBootstrap : no socket interface found"
)
FULL_SHM = (
    "ncclSystemError: System call failed.\nLast error:\nError while creating shared memory segment "
    "/dev/shm/nccl-q8jUQw (size 33030528), error: No space left on device (28)"
)
PEER_GONE = "ncclRemoteError: remote process exited"

RESERVE = Fallback(
    seconds=1800, restart_seconds=300, restart_usd=0.5, step_seconds=10, usd=1.0, step_usd=0.01
)


class Clock:
    """The clock that orders are written by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(
            messages,
            "time",
            SimpleNamespace(monotonic_ns=lambda: int(self.seconds * 1e9), time=time.time),
        )


def test_a_gangs_spec_gives_each_node_its_ranks_and_the_gang_its_name() -> None:
    spec = GangSpec(**LAUNCHED, node=2, nodes=4, processes_per_node=3)
    assert (spec.world_size, spec.ranks) == (12, range(6, 9))
    assert spec.token == "job/17/3/4x3"
    assert (spec.terms, spec.promised_gpus, spec.rehearse, spec.candidate_ports) == (
        None,
        0,
        None,
        [],
    )


@pytest.mark.parametrize(
    ("floor_seconds", "silence_seconds"),
    [(3.0, 4.0), (4.5, 4.5), (19.5, 19.5), (60.0, 20.0), (None, 20.0)],
)
def test_a_node_is_lost_after_the_hang_floor_within_four_to_twenty_seconds(
    floor_seconds: float | None, silence_seconds: float
) -> None:
    if floor_seconds is None:
        config = RunConfig()
    else:
        config = RunConfig(survival=SurvivalConfig(hang_floor_seconds=floor_seconds))
    spec = GangSpec(**{**LAUNCHED, "config": config}, node=0, nodes=1, processes_per_node=1)
    assert spec.silence_seconds == silence_seconds


def test_a_rank_reads_its_spec_from_the_file_that_the_agent_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SPEC_VARIABLE, raising=False)
    assert WorkerSpec.from_environment() is None
    spec = WorkerSpec(**ONE_NODE, node=1, generation=2, generation_id="x", candidates=["commits/1"])
    path = tmp_path / "spec.json"
    path.write_text(spec.to_json())
    monkeypatch.setenv(SPEC_VARIABLE, str(path))
    assert WorkerSpec.from_environment() == spec
    assert (spec.rehearse, spec.overrides, spec.colocated_ranks, spec.agent_pid) == (
        None,
        {},
        1,
        None,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def leave(seconds: float, *, cause: str = CAUSES[2], node: int = 1) -> RankOrder:
    return RankOrder(seconds=seconds, cause=cause, node=node)


SAVE = leave(math.inf)


def test_an_order_record_without_orders_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "control"
    record = OrderRecord.create(path)
    assert path.stat().st_size == 48
    assert (record.leave_at, record.saves, record.cause, record.ending) == (math.inf, 0, "", False)


def test_a_rank_reads_what_the_agent_writes(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "control"
    record = OrderRecord.create(path)
    rank = OrderRecord(path)
    record.write(SAVE)
    record.write(SAVE)
    assert (rank.saves, rank.leave_at, rank.cause) == (2, math.inf, "")
    record.write(leave(7.0))
    assert (rank.saves, rank.leave_at, rank.cause) == (
        2,
        1007.0,
        "spot interruption notice to node 1",
    )
    assert not rank.ending
    record.announce_end()
    assert rank.ending and (rank.saves, rank.leave_at) == (2, 1007.0)


def test_of_several_orders_to_exit_the_earliest_deadline_and_the_first_cause_count(
    tmp_path: Path, clock: Clock
) -> None:
    record = OrderRecord.create(tmp_path / "control")
    record.write(leave(50.0, cause=CAUSES[4], node=3))
    clock.seconds += 10.0
    record.write(leave(40.5))
    assert (record.leave_at, record.cause) == (1050.0, "rehearsed notice to node 3")
    record.write(leave(39.5))
    assert (record.leave_at, record.cause) == (1049.5, "rehearsed notice to node 3")


@pytest.mark.parametrize(("seconds", "leave_at"), [(-3.0, 1000.0), (0.0, 1000.0), (0.5, 1000.5)])
def test_an_order_whose_time_has_passed_is_due_now(
    seconds: float, leave_at: float, tmp_path: Path, clock: Clock
) -> None:
    record = OrderRecord.create(tmp_path / "control")
    record.write(leave(seconds))
    assert record.leave_at == leave_at


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("SIGTERM", "SIGTERM"),
        ("spot interruption notice", "spot interruption notice to node 1"),
        (
            "Metaflow's notice of a spot interruption",
            "Metaflow's notice of a spot interruption to node 1",
        ),
        ("rehearsed notice", "rehearsed notice to node 1"),
        ("rebalance recommendation", "rebalance recommendation to node 1"),
        ("a lost node is back", "a lost node is back"),
        ("", " to node 1"),
    ],
)
def test_an_order_to_exit_keeps_its_cause(cause: str, text: str, tmp_path: Path) -> None:
    record = OrderRecord.create(tmp_path / "control")
    record.write(leave(9.0, cause=cause))
    assert record.cause == text


@pytest.mark.parametrize("order", [leave(7.5), leave(0.0), SAVE])
def test_an_order_survives_json(order: RankOrder) -> None:
    document = json.loads(json.dumps(encode(order), allow_nan=False))
    assert decode(document) == order
    assert order.leave == (order is not SAVE) == (document["seconds"] is not None)


def test_a_node_shares_its_host_with_as_many_nodes_as_name_it() -> None:
    assert [START.colocated_nodes(place) for place in range(3)] == [2, 1, 2]
    assert (START.overrides, START.node_0) == ({}, {})


def spec_with(config: RunConfig) -> GangSpec:
    return GangSpec(**{**LAUNCHED, "config": config}, node=1, nodes=2, processes_per_node=1)


def test_a_node_describes_the_settings_that_decide_what_a_step_computes() -> None:
    described = describe_node(spec_with(SETTINGS))
    settings = described["settings"]
    assert {
        name: settings[name] for name in ("model.hidden_size", "training.seed", "data.path")
    } == {
        "model.hidden_size": 32,
        "training.seed": 1,
        "data.path": "text",
    }
    assert (settings["workload"], settings["workload_options.rank"]) == ("language", 8)
    sections = dict.fromkeys(name.partition(".")[0] for name in settings)
    assert list(sections) == [
        "model",
        "training",
        "data",
        "parallel",
        "workload",
        "workload_options",
    ]
    assert described["versions"]["torch"]


def test_a_differing_setting_keeps_a_node_from_starting_whatever_else_differs() -> None:
    spec = spec_with(SETTINGS)
    own = describe_node(spec)
    settings = own["settings"] | {"training.seed": 2}
    assert find_differences(spec, own | {"settings": settings}) == (
        ["training.seed 1 (node 0: 2)"],
        True,
    )
    versions = own["versions"] | {"numpy": "0"}
    texts, fatal = find_differences(spec, {"settings": settings, "versions": versions})
    assert fatal and texts == [
        "training.seed 1 (node 0: 2)",
        f"numpy {own['versions']['numpy']} (node 0: 0)",
    ]


@pytest.mark.parametrize(
    ("package", "fatal"), [("python", True), ("torch", True), ("numpy", False)]
)
def test_only_another_python_or_torch_keeps_a_node_from_starting(package: str, fatal: bool) -> None:
    spec = spec_with(SETTINGS)
    versions = describe_node(spec)["versions"]
    found = find_differences(spec, {"versions": versions | {package: "0"}})
    assert found == ([f"{package} {versions[package]} (node 0: 0)"], fatal)


def test_a_package_of_one_node_alone_is_a_difference() -> None:
    spec = spec_with(SETTINGS)
    versions = describe_node(spec)["versions"]
    assert find_differences(spec, {"versions": versions | {"apex": "1"}}) == (
        ["apex None (node 0: 1)"],
        False,
    )
    without = {package: version for package, version in versions.items() if package != "torch"}
    assert find_differences(spec, {"versions": without}) == (
        [f"torch {versions['torch']} (node 0: None)"],
        True,
    )


def test_a_generations_end_survives_a_message() -> None:
    outcome = GangOutcome(outcome="completed", step=9, generation=2, weights_sha256="ab")
    for end in (
        GenerationEnd(outcome=outcome, reason="completed"),
        GenerationEnd(culprit="rank 1: it failed"),
    ):
        document = json.loads(json.dumps(encode(end)))
        assert decode(document) == replace(end, ranks=[], at=[], left_out=[])


def test_a_generation_end_message_defaults_to_curable_and_final() -> None:
    end = GenerationEnd()
    assert (end.curable, end.again, end.user_code, end.failed_as, end.generation) == (
        True,
        False,
        False,
        "failed",
        0,
    )
    assert (GangOutcome("completed", 1, 1).goes_on, GangOutcome("completed", 1, 1).message) == (
        False,
        "",
    )


def test_a_stop_before_the_start_is_an_interruption() -> None:
    assert end_from_stop_request("SIGTERM") == GenerationEnd(
        culprit="asked to stop (SIGTERM) before the gang could continue; the last commit is kept",
        reason="agent_stopped",
        failed_as="interrupted",
    )


@pytest.mark.parametrize(
    ("end", "cause", "step", "message"),
    [
        (
            GenerationEnd(
                outcome=GangOutcome("interrupted", step=7, generation=2), details={"step": 5}
            ),
            "spot interruption notice",
            7,
            "asked to leave (spot interruption notice); the others go on",
        ),
        (
            GenerationEnd(culprit="rank 2:\n  UnreliableReader: x", details={"step": 5}),
            "",
            5,
            "left out: rank 2: UnreliableReader: x; the others go on",
        ),
        (GenerationEnd(culprit="x" * 301), "", 0, f"left out: {'x' * 300}; the others go on"),
    ],
)
def test_a_node_that_is_left_out_ends_while_the_others_go_on(
    end: GenerationEnd, cause: str, step: int, message: str
) -> None:
    outcome = GangOutcome("interrupted", step=step, generation=0, message=message, goes_on=True)
    assert end_for_left_out_node(end, cause) == GenerationEnd(
        outcome=outcome, reason="agent_stopped"
    )


def lost_peer(rank: int, **known: Any) -> WorkerFailure:
    return failed(rank, **{"cascade": True, "message": "Connection closed by peer", **known})


# For each failure: reason, again, curable, user_code, failed_as.
ENDS: dict[str, tuple[list[WorkerFailure], tuple[str, bool, bool, bool, str]]] = {
    "an exception": ([failed(1, error="ValueError")], ("rank_failed", True, True, True, "failed")),
    "an exit without an error": ([failed(1)], ("rank_failed", True, True, True, "failed")),
    "an exception of ours": (
        [failed(1, error="CheckpointError")],
        ("rank_failed", True, True, True, "failed"),
    ),
    "a mistake in the configuration": (
        [failed(1, error="DataError")],
        ("rank_failed", False, False, True, "config"),
    ),
    "a newer generation": (
        [failed(1, error="GenerationSuperseded")],
        ("superseded", False, False, False, "failed"),
    ),
    "nothing to restore": (
        [failed(1, error="NothingToRestore")],
        ("store", False, False, False, "no_restore"),
    ),
    "a reader that cannot be trusted": (
        [failed(1, error="UnreliableReader")],
        ("store", True, True, False, "failed"),
    ),
    "a start that was wanted": (
        [failed(1, error="Rewind")],
        ("rewind", True, True, False, "failed"),
    ),
    "an agent's own failure": (
        [failed(1, error="AgentFailure")],
        ("agent_failed", True, True, True, "failed"),
    ),
    "a lost node": ([failed(1, lost_node=1)], ("node_lost", False, True, False, "failed")),
    "a kill": ([failed(1, killed_by="SIGKILL")], ("rank_killed", True, True, False, "failed")),
    "a hang": ([hung(1, waiting=False), hung(0)], ("hang", True, True, False, "failed")),
    "a stopped rank": ([hung(1, stopped=True), hung(0)], ("hang", True, True, False, "failed")),
    "positions without a failure": (
        [seen(1, waiting=False), seen(0)],
        ("hang", True, True, False, "failed"),
    ),
    "a broken GPU": (
        [failed(1, error="RuntimeError", gpu_fault="Xid 79")],
        ("rank_failed", True, True, False, "failed"),
    ),
    "a network that broke": (
        [lost_peer(1), lost_peer(0)],
        ("rank_failed", True, True, False, "failed"),
    ),
    "calls that broke at different places": (
        [lost_peer(1, where=USER), lost_peer(0, where=ENGINE)],
        ("rank_failed", True, True, True, "failed"),
    ),
    "calls of which gloo saw other sizes": (
        [
            lost_peer(1, where=USER),
            lost_peer(0, where=ENGINE, message="op.preamble.length <= op.nbytes"),
        ],
        ("rank_failed", False, False, True, "failed"),
    ),
    "recorders that differ": (
        [hung(0, calls=calls("a")), hung(2, calls=calls("a")), hung(1, calls=calls("b"))],
        ("rank_failed", False, False, True, "failed"),
    ),
    "a rank that completed fewer steps": (
        [
            failed(
                1, left=True, witness=True, completed=True, message="left after step 19: completed"
            ),
            lost_peer(0),
        ],
        ("rank_failed", False, False, True, "failed"),
    ),
    "a rank that was interrupted first": (
        [
            failed(1, left=True, witness=True, message="left after step 19: interrupted"),
            lost_peer(0),
        ],
        ("rank_failed", True, True, True, "failed"),
    ),
    "an exception whose text ends like a result": (
        [failed(1, error="ValueError", message="ValueError: completed")],
        ("rank_failed", True, True, True, "failed"),
    ),
    "an exception that comes again in each start": (
        [failed(1, error="RuntimeError", message=DEADLOCK)],
        ("rank_failed", False, False, True, "failed"),
    ),
    "a text that comes again, of no exception": (
        [failed(1, message=DEADLOCK)],
        ("rank_failed", True, True, True, "failed"),
    ),
    "a text that comes again, of a lost peer": (
        [lost_peer(1, error="RuntimeError", message=DEADLOCK)],
        ("rank_failed", True, True, False, "failed"),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_failed_generation_ends_as_its_culprit_demands(name: str) -> None:
    evidence, expected = ENDS[name]
    end = end_from_failures(evidence)
    assert (str(end.reason), end.again, end.curable, end.user_code, end.failed_as) == expected
    assert (end.outcome, end.left_out, end.generation) == (None, (), 0)


@pytest.mark.parametrize(
    "sign",
    [
        "Timeout",
        "timed out",
        "Connection",
        "socket",
        "HTTP",
        "NCCL",
        "gloo",
        "DistBackendError",
        "OSError",
        "IOError",
    ],
)
def test_a_network_or_file_error_is_retried_whatever_its_text(sign: str) -> None:
    assert end_from_failures([failed(0, error="RuntimeError", message=f"{DEADLOCK}: {sign}")]).again


def test_a_failed_generations_end_has_the_culprits_evidence() -> None:
    cause = failed(3, error="ValueError", message="ValueError: x", where=USER, step=7)
    before = (time.time(), time.monotonic())
    end = end_from_failures([cause, hung(5, stopped=True), hung(4, stopped=True), lost_peer(1)])
    after = (time.time(), time.monotonic())
    assert (end.culprit, end.error, end.ranks) == ("rank 3: ValueError: x", "ValueError", [3, 4, 5])
    assert (end.fingerprint, end.details["step"]) == (f"ValueError at {USER}", 7)
    assert before[0] <= end.at[0] <= after[0] and before[1] <= end.at[1] <= after[1]
    lost = end_from_failures(
        [failed(1, lost_node=1, message="node 1 (b) was lost: silent for 20 s")]
    )
    assert (lost.culprit, lost.ranks) == ("node 1 (b) was lost: silent for 20 s", [1])


@pytest.mark.parametrize(
    ("failure", "fingerprint"),
    [
        (failed(0, lost_node=1), ""),
        (failed(0, error="Rewind"), ""),
        (failed(0, error="MicroBatchTooLarge"), ""),
        (failed(0, error="ValueError", gpu_fault="Xid 79"), ""),
        (failed(0, error="ValueError"), "ValueError"),
        (hung(0, stopped=True, where=""), "stopped in step 7"),
        (hung(0, where=""), "hang"),
        (failed(0, killed_by="SIGKILL"), "killed by SIGKILL in step 7"),
        (failed(0, killed_by="SIGTERM"), "killed by SIGTERM in step 7"),
        (failed(0, killed_by="SIGINT"), "killed by SIGINT in step 7"),
        (failed(0, killed_by="SIGHUP"), "killed by SIGHUP in step 7"),
        (failed(0, killed_by="SIGSEGV"), "killed by SIGSEGV"),
        (failed(0, killed_by="SIGKILL", memory_kill=True), "killed for memory"),
    ],
)
def test_a_fingerprint_is_of_the_program_and_names_the_step_of_a_signal_from_outside(
    failure: WorkerFailure, fingerprint: str
) -> None:
    assert end_from_failures([replace(failure, step=7)]).fingerprint == fingerprint


def in_nccl(rank: int, message: str, **known: Any) -> WorkerFailure:
    failure = failed(rank, message=message, error="DistBackendError", node=rank // 2)
    return replace(failure, cascade=message == PEER_GONE, **known)


def test_a_cause_of_nccl_that_every_node_has_ends_the_job_at_once() -> None:
    """Three starts were wasted on a container without a network interface."""
    alike = [in_nccl(rank, NO_INTERFACE) for rank in range(4)]
    echoes = [
        in_nccl(0, NO_INTERFACE),
        in_nccl(1, PEER_GONE),
        in_nccl(2, NO_INTERFACE),
        seen(3, node=1),
    ]
    for evidence in (alike, echoes):
        end = end_from_failures(evidence, 4)
        assert (end.again, end.curable, end.failed_as, end.user_code) == (
            False,
            False,
            "config",
            False,
        )
        assert "ip -br addr" in end.culprit and end.culprit.endswith(
            "not started again, since every node has this cause"
        )
        assert end.details["next_action"].startswith("no restart helps")


@pytest.mark.parametrize(
    "evidence",
    [
        [in_nccl(rank, NO_INTERFACE) for rank in range(3)],  # of rank 3 nothing is known
        [in_nccl(0, NO_INTERFACE), *(in_nccl(rank, PEER_GONE) for rank in (1, 2, 3))],  # one node
        [*(in_nccl(rank, NO_INTERFACE) for rank in range(3)), in_nccl(3, "ValueError: x")],
        [*(in_nccl(rank, NO_INTERFACE) for rank in range(3)), in_nccl(3, FULL_SHM)],
        [*(in_nccl(rank, NO_INTERFACE) for rank in range(3)), failed(3, node=1, lost_node=1)],
        [in_nccl(rank, PEER_GONE) for rank in range(4)],
        [in_nccl(rank, NO_INTERFACE, gpu_fault="Xid 79") for rank in range(4)],
    ],
)
def test_a_cause_that_not_all_nodes_have_leaves_the_usual_tries(
    evidence: list[WorkerFailure],
) -> None:
    end = end_from_failures(evidence, 4)
    assert (end.curable, end.same_limit) == (True, 3)


def test_a_shared_cause_that_may_pass_is_tried_once_more() -> None:
    evidence = [in_nccl(rank, FULL_SHM, where=f"place {rank}") for rank in range(4)]
    first = end_from_failures(evidence, 4)
    second = end_from_failures(evidence[::-1], 4)
    assert (first.again, first.curable, first.same_limit, first.user_code) == (True, True, 2, False)
    assert (
        first.fingerprint
        == second.fingerprint
        == (
            "NCCL: NCCL's shared memory does not fit into /dev/shm, 64 MiB by default in a container"
        )
    )
    assert "--shm-size" in first.details["next_action"]
    failures = [
        FailedGeneration(
            generation=number,
            fingerprint=end.fingerprint,
            rank_seconds=1.0,
            same_limit=end.same_limit,
        )
        for number, end in enumerate((first, second), 1)
    ]
    assert find_crash_loop(failures[:1], 0) == []
    assert find_crash_loop(failures, 0) == failures
    assert find_crash_loop(failures, 2) == [], "a commit came in between"


def test_a_failed_start_in_the_events_keeps_its_limit() -> None:
    first = Event(
        name="generation_ended",
        job="a",
        run="1",
        attempt=0,
        node=0,
        rank=None,
        step=None,
        generation=1,
        t_wall=1.0,
        t_mono=1.0,
        data={"reason": "rank_failed", "fingerprint": "NCCL: x", "same_limit": 2},
    )
    events = [first, replace(first, generation=2, t_wall=2.0, t_mono=2.0)]
    assert len(find_crash_loop(read_failed_generations(events), 0)) == 2


def result(outcome: str = "completed", step: int = 9, **known: Any) -> RankResult:
    return RankResult(outcome=Outcome(outcome), step=step, **known)


def test_results_that_agree_are_the_gangs_outcome() -> None:
    finished = {
        1: {2: result(weights_sha256="ab"), 3: result(weights_sha256="ab")},
        0: {1: result(weights_sha256="ab"), 0: result(weights_sha256="ab", message="done")},
    }
    outcome = GangOutcome("completed", step=9, generation=4, weights_sha256="ab", message="done")
    assert end_from_results(finished, 4) == GenerationEnd(outcome=outcome, reason="completed")
    bare = end_from_results({0: {0: result("interrupted")}}, 4)
    assert bare == GenerationEnd(
        outcome=GangOutcome("interrupted", step=9, generation=4), reason="interrupted"
    )


@pytest.mark.parametrize(
    ("other", "again"),
    [
        (result(step=8, weights_sha256="ab"), False),
        (result("interrupted", weights_sha256="ab"), False),
        (result(weights_sha256="cd"), True),
    ],
)
def test_ranks_that_end_unlike_are_a_failure_that_only_unequal_weights_may_not_repeat(
    other: RankResult, again: bool
) -> None:
    first = result(weights_sha256="ab")
    end = end_from_results({1: {2: other}, 0: {1: first, 0: first}}, 4)
    unlike = "ranks did not end alike"
    ending = (other.outcome.value, other.step, other.weights_sha256)
    culprit = f"{unlike}: rank 0 ('completed', 9, 'ab'), rank 2 {ending}"
    assert end == GenerationEnd(
        culprit=culprit,
        reason=EndReason.RANK_FAILED,
        fingerprint=unlike,
        again=again,
        curable=again,
    )


def terms(**known: Any) -> Terms:
    return Terms(usd_per_rank_second=1e-4, **known)


SPENT = terms(budget_usd=10.0, spent_usd=9.5, reserve_usd=0.5)
# With a restart, 100 steps need $1 + 100 × $0.01 + $0.50 = $2.50 on demand, so $7.60 of $10 are too
# much.
NEARLY_SPENT = terms(budget_usd=10.0, spent_usd=7.6, fallback=RESERVE)


@pytest.mark.parametrize(
    ("affordable", "restart"),
    [
        (None, True),
        (terms(), True),
        (terms(budget_usd=10.0, spent_usd=9.49, reserve_usd=0.5), True),
        (NEARLY_SPENT, False),
        (terms(budget_usd=10.0, spent_usd=7.4, fallback=RESERVE), True),
    ],
)
def test_ranks_start_while_money_is_left(affordable: Terms | None, restart: bool) -> None:
    start = replace(START, terms=affordable)
    assert end_if_unaffordable(start, 20, max_steps=120, restart=restart) is None


@pytest.mark.parametrize(
    ("unaffordable", "restart", "outcome", "words"),
    [
        (SPENT, False, "budget", "budget: $9.5000 of $10.0000 is spent"),
        (
            replace(SPENT, fallback=RESERVE),
            True,
            "budget",
            "budget: $9.5000 of $10.0000 is spent",
        ),
        (
            NEARLY_SPENT,
            True,
            "interrupted",
            "leaves Spot for on-demand: $7.6000 of $10.0000 is spent",
        ),
    ],
)
def test_ranks_do_not_start_without_money(
    unaffordable: Terms, restart: bool, outcome: str, words: str
) -> None:
    ended = end_if_unaffordable(
        replace(START, terms=unaffordable), 20, max_steps=120, restart=restart
    )
    assert ended is not None and ended.message.startswith(words)
    assert replace(ended, message="") == GangOutcome(outcome, step=20, generation=4)


def test_a_restart_must_leave_time_to_finish_by_the_deadline_on_demand() -> None:
    """A restart and 100 steps need 1800 + 100 × 10 + 300 = 3100 s."""

    def start_with(seconds: float) -> GangOutcome | None:
        start = replace(START, terms=terms(deadline_utc=time.time() + seconds, fallback=RESERVE))
        return end_if_unaffordable(start, 20, max_steps=120, restart=True)

    assert start_with(3130.0) is None
    ended = start_with(3070.0)
    assert ended is not None and ended.outcome == "interrupted"

"""Each rule of blame: the term that decides it, both sides of each comparison, and the order of the
rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ebbflow.diagnose.reading import LogText
from ebbflow.training.launch.blame import blame, detect_stall, settle_seconds
from ebbflow.training.launch.evidence import WorkerFailure, is_peer_loss_error
from tests.support.diagnosing import diagnose_lines
from tests.support.rank_evidence import EXCHANGE_PLACE, USER_PLACE, calls, failed, hung, seen

Evidence = Sequence[WorkerFailure]

FAULT = "a GPU of its node has a hardware fault"
FIRST = "it ended first"
STOPPED = "its process is stopped"
DIFFER = "flight recorders differ"
SILENT = "its flight recorder does not answer, and the others' do"
OUTSIDE = "it stands outside of any collective"
DEVICE = "its GPU has not started a collective in which the others' GPUs wait"
LEFT = "it left while the others went on"
ELSEWHERE = "its collective was called from another place than the others'"
FEWEST = "it has called the fewest collectives"
FURTHEST = "it is furthest behind"
ALIKE = "all ranks wait alike"
NONE_STANDS_OUT = "no rank stands out"

SYNC = "training/step_sync.py:155 in exchange"
ENGINE = "training/engine/loop.py:73 in forward_backward"
USER = "user/loss.py:9 in log"
STEP = ["all_reduce [[100]]", "all_gather [[8]]"]
HABIT = calls(*"gggggggggg")  # its last call has followed the one before it already
FIRST_TIME = calls(*"gggggggggu")

FROM_NEWEST = "from the newest commit"
NEWEST = f"restart {FROM_NEWEST}"
# NCCL's last error; the rule of its cause; words of the fix; whether its own machine is at fault
LAST_ERRORS = [
    (
        "Error while creating shared memory segment /dev/shm/nccl-q8jUQw (size 33030528), error: No "
        "space left on device (28)",
        "C09",
        "--shm-size=16g",
        True,
    ),
    ("Bootstrap : no socket interface found", "A14", "ip -br addr", True),
    (
        "NCCL_SOCKET_IFNAME was set to eth7 but no matching interface was found",
        "A14",
        "unset",
        True,
    ),
    ("NET/OFI Couldn't find any optimal provider: fi_getinfo returned -61", "A28", "fi_info", True),
    ("Call to ibv_create_cq failed with error Cannot allocate memory", "A29", "ulimit -l", True),
    ("Call to socket failed : Too many open files", "E08", "ulimit -n", True),
    ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1c0", "A09", "one rank", True),
    ("Cuda failure 2 'out of memory'", "C01", "NCCL_BUFFSIZE", True),
    ("Cuda failure 217 'peer access is not supported between these two'", "B08", "P2P", True),
    ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2", "B08", "NVLS_ENABLE=0", True),
    ("Could not find real path of /sys/class/pci_bus/0000:07", "A16", "mount /sys", True),
    (
        "socketStartConnect: Connect to 10.0.3.4<41231> failed : Connection refused",
        "A11",
        "nc",
        False,
    ),
    # From public issues: NVIDIA/nccl 1052 and nccl-tests 166, pytorch on a foreign libnccl, EFA
    (
        "NET/IB : Got completion from peer 10.0.35.1<49189> with error 4, opcode 5327, len 5327, "
        "vendor err 81 (Send)",
        "A29",
        "nvidia_peermem",
        False,
    ),
    (
        "socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort",
        "A11",
        "nc",
        False,
    ),
    ("Invalid config blocking attribute value -2147483648", "A03", "LD_LIBRARY_PATH", True),
    (
        "NET/OFI Request 0x7f2 completed with error. RC: 113. Error: 4126 (Unresponsive receiver)",
        "A28",
        "to itself",
        False,
    ),
    ("Message truncated : received 1024 bytes instead of 256", "D04", "equal shapes", False),
    ("socketProgress: Connection closed by remote peer ip-10-0-0-2<44212>", "D06", "", False),
]


def late(rank: int, **known: Any) -> WorkerFailure:
    return hung(rank, **{"where": SYNC, "step": 9, "calls": calls(*"gg"), **known})


def ahead(rank: int, **known: Any) -> WorkerFailure:
    return hung(rank, **{"where": USER, "step": 9, "calls": calls(*"ggu"), **known})


def broken(rank: int, **known: Any) -> WorkerFailure:
    return failed(rank, **{"cascade": True, **known})


ABORTED = broken(0, killed_by="SIGABRT")


def on_device(rank: int, state: str, **known: Any) -> WorkerFailure:
    return hung(rank, **{"where": SYNC, "calls": calls(*"ggg", state=state), **known})


CASES: dict[str, tuple[Evidence, int, str]] = {
    "the only recorder that does not answer": (
        [late(0), hung(1, where=SYNC, step=9, recorder_silent=True), late(2)],
        1,
        SILENT,
    ),
    "a rank outside of collectives, though another recorder is silent": (
        [late(0), hung(1, where=SYNC, step=9, recorder_silent=True), ahead(2, waiting=False)],
        2,
        OUTSIDE,
    ),
    "the fewest calls, though another recorder is silent": (
        [late(0), hung(1, where=SYNC, step=9, recorder_silent=True), ahead(2)],
        0,
        FEWEST,
    ),
    "two silent recorders are no evidence": (
        [
            late(0),
            hung(1, where=SYNC, recorder_silent=True),
            hung(2, where=SYNC, recorder_silent=True),
        ],
        1,
        FURTHEST,
    ),
    "a silent recorder where another rank has none": (
        [late(0), hung(1, where=SYNC, step=9, recorder_silent=True), hung(2, where=SYNC, step=9)],
        0,
        ALIKE,
    ),
    "the first GPU fault, though another rank died before": (
        [
            failed(0, killed_by="SIGKILL"),
            failed(1, gpu_fault="Xid 79"),
            failed(2, gpu_fault="Xid 79"),
        ],
        1,
        FAULT,
    ),
    "a GPU fault of a rank that goes on": ([failed(0), seen(1, gpu_fault="Xid 79")], 0, FIRST),
    "a rank that died before a stopped one": ([failed(1), hung(0, stopped=True)], 1, FIRST),
    "a kill less than a second after an exception": (
        [
            failed(0, error="OSError", timestamp=100.0),
            failed(1, killed_by="SIGKILL", timestamp=100.99),
        ],
        1,
        FIRST,
    ),
    "a kill more than a second after an exception": (
        [
            failed(0, error="OSError", timestamp=100.0),
            failed(1, killed_by="SIGKILL", timestamp=101.01),
        ],
        0,
        FIRST,
    ),
    "the earlier of two kills": (
        [
            failed(0, killed_by="SIGKILL", timestamp=100.5),
            failed(1, killed_by="SIGSEGV", timestamp=100.4),
        ],
        1,
        FIRST,
    ),
    "a lost node after an abort and an exception": (
        [failed(0), failed(1, killed_by="SIGABRT"), failed(2, lost_node=1)],
        2,
        FIRST,
    ),
    "an exception after an abort": (
        [failed(0, killed_by="SIGABRT"), failed(1, timestamp=200.0)],
        1,
        FIRST,
    ),
    "a hang before a death": ([hung(0), failed(1)], 1, FIRST),
    "a cascade before a death": ([broken(0), failed(1)], 1, FIRST),
    "the first of two stopped ranks": (
        [hung(0), hung(2, stopped=True), hung(1, stopped=True)],
        1,
        STOPPED,
    ),
    "a stopped rank although recorders differ": (
        [hung(0, calls=calls("a")), hung(1, calls=calls("b"), stopped=True)],
        1,
        STOPPED,
    ),
    "the first of two odd ranks": (
        [hung(rank, calls=calls("b" if rank in (1, 3) else "a")) for rank in range(5)],
        1,
        DIFFER,
    ),
    "recorders that differ although a rank is outside": (
        [
            hung(0, calls=calls("a")),
            hung(1, calls=calls("a"), waiting=False),
            hung(2, calls=calls("b")),
        ],
        2,
        DIFFER,
    ),
    "the device that is behind, although a host is outside": (
        [on_device(0, "started"), on_device(1, "scheduled"), hung(2, waiting=False)],
        1,
        DEVICE,
    ),
    "the device that is furthest behind by step": (
        [
            on_device(0, "started"),
            on_device(1, "scheduled", step=2),
            on_device(2, "scheduled", step=1),
        ],
        2,
        DEVICE,
    ),
    "a rank that left with a device behind": (
        [
            on_device(0, "started"),
            failed(1, left=True, witness=True, calls=calls(*"ggg", state="scheduled")),
        ],
        1,
        LEFT,
    ),
    "the rank outside that is furthest behind by step": (
        [hung(0), hung(1, waiting=False, step=3), hung(2, waiting=False, step=2)],
        2,
        OUTSIDE,
    ),
    "the rank outside that is furthest behind by phase": (
        [hung(0), hung(1, waiting=False, phase="forward"), hung(2, waiting=False, phase="data")],
        2,
        OUTSIDE,
    ),
    "the rank outside that made no progress first": (
        [hung(0), hung(2, waiting=False), hung(1, waiting=False)],
        1,
        OUTSIDE,
    ),
    "a single rank outside": ([hung(0, waiting=False)], 0, OUTSIDE),
    "a rank outside in the step and phase of one that waits": (
        [hung(0, step=3, phase="data"), hung(1, waiting=False, step=3, phase="data")],
        1,
        OUTSIDE,
    ),
    "ranks outside at different places": (
        [hung(0, waiting=False, step=4), hung(1, waiting=False, step=3)],
        1,
        OUTSIDE,
    ),
    "ranks outside at the same place": (
        [hung(0, waiting=False), hung(1, waiting=False)],
        0,
        NONE_STANDS_OUT,
    ),
    "a host whose device has calls in its queue is not outside": (
        [hung(0), hung(1, waiting=False, calls=calls(*"gg", state="started"))],
        0,
        ALIKE,
    ),
    "a host whose device has completed its calls is outside": (
        [hung(0), hung(1, waiting=False, calls=calls(*"gg", state="completed"))],
        1,
        OUTSIDE,
    ),
    "a rank that lost its peer is not outside": (
        [broken(0, where=USER), hung(1), hung(2)],
        0,
        NONE_STANDS_OUT,
    ),
    "a rank that left is not outside": (
        [hung(0), failed(1, left=True, witness=True, where=USER)],
        1,
        LEFT,
    ),
    "a rank whose place is unknown is not outside": (
        [hung(0, waiting=False, where=""), hung(1), hung(2)],
        0,
        NONE_STANDS_OUT,
    ),
    "the one that left in the earlier step": (
        [
            failed(0, left=True, witness=True, step=9),
            failed(1, left=True, witness=True, step=8),
            broken(2),
        ],
        1,
        LEFT,
    ),
    "one that left, although calls were broken at two places": (
        [failed(0, left=True, witness=True), broken(1, where=USER), broken(2, where=ENGINE)],
        0,
        LEFT,
    ),
    "an unusual call at a place where more ranks broke": (
        [broken(0, where=ENGINE, calls=FIRST_TIME), broken(1, where=ENGINE), broken(2, where=USER)],
        0,
        ELSEWHERE,
    ),
    "too few calls at a place where more ranks broke than of a usual call": (
        [broken(0, where=ENGINE), broken(1, where=ENGINE), broken(2, where=USER, calls=HABIT)],
        0,
        ELSEWHERE,
    ),
    "the place where fewer ranks broke, though it is the engine's": (
        [broken(0, where=USER), broken(1, where=USER), broken(2, where=ENGINE)],
        2,
        ELSEWHERE,
    ),
    "a place outside of the engine, though its rank broke later": (
        [broken(0, where=ENGINE), broken(1, where=USER)],
        1,
        ELSEWHERE,
    ),
    "the call that broke first": (
        [broken(1, where="user/b.py:1 in b"), broken(0, where=USER)],
        0,
        ELSEWHERE,
    ),
    "calls that broke at one place": (
        [broken(0, where=USER), broken(1, where=USER)],
        0,
        NONE_STANDS_OUT,
    ),
    "one call that broke, and one without a place": (
        [broken(0), broken(1, where=USER)],
        0,
        NONE_STANDS_OUT,
    ),
    "one call that broke, and one that hangs at another place": (
        [broken(0, where=USER), hung(1)],
        0,
        NONE_STANDS_OUT,
    ),
    "calls that broke at two places, although one rank has called less": (
        [
            broken(0, where=USER, calls=calls(*STEP)),
            broken(1, where=ENGINE, calls=calls(*STEP, "x")),
        ],
        0,
        ELSEWHERE,
    ),
    "the first of two ranks that called less": (
        [
            hung(0, calls=calls(*STEP)),
            hung(2, calls=calls(*STEP[:1])),
            hung(1, calls=calls(*STEP[:1])),
        ],
        1,
        FEWEST,
    ),
    "a rank that called less, though it is a step further": (
        [hung(0, calls=calls(*STEP), step=4), hung(1, calls=calls(*STEP[:1]), step=5)],
        1,
        FEWEST,
    ),
    "a rank that left has called less": (
        [hung(0, calls=calls(*STEP)), failed(1, left=True, witness=True, calls=calls(*STEP[:1]))],
        1,
        LEFT,
    ),
    "a rank without records is neither ahead nor late": (
        [hung(0, where=USER, step=9), ahead(1), late(2)],
        2,
        FEWEST,
    ),
    "more ranks ahead than late": ([ahead(0), ahead(1), late(2)], 2, FEWEST),
    "ranks of which each is behind in one group": (
        [
            late(0, calls=[["a", 1, "g"], ["b", 2, "g"]]),
            late(1, calls=[["a", 2, "g"], ["b", 1, "g"]]),
        ],
        0,
        FEWEST,
    ),
    "the earlier phase of two that wait": (
        [hung(0, phase="backward"), hung(1, phase="forward")],
        1,
        FURTHEST,
    ),
    "a position in an earlier step": ([hung(0, step=5), seen(1, step=4)], 1, FURTHEST),
    "a rank that lost its peer in an earlier step": (
        [hung(0, step=5), broken(1, step=4)],
        0,
        NONE_STANDS_OUT,
    ),
    "an unknown phase is before all but the first": (
        [hung(0, phase="restore"), hung(1, phase="of user code")],
        1,
        FURTHEST,
    ),
    "an unknown phase is as early as the first": (
        [hung(0, phase="of user code"), hung(1, phase="init")],
        0,
        ALIKE,
    ),
    "the first of those that wait alike": ([hung(1), hung(0), seen(2, timestamp=1.0)], 0, ALIKE),
    "a rank whose stack is not known does not wait alike": (
        [hung(0), seen(1, where="", waiting=False)],
        0,
        NONE_STANDS_OUT,
    ),
    "ranks that wait alike before any has failed": ([seen(1), seen(0)], 0, ALIKE),
}


@pytest.mark.parametrize("name", CASES)
def test_blame_names_the_rank_by_the_rule_that_decides(name: str) -> None:
    evidence, rank, because = CASES[name]
    for order in (evidence, evidence[::-1]):
        culprit = blame(order)
        assert (culprit.rank, culprit.because) == (rank, because)


@pytest.mark.parametrize(
    ("evidence", "certainty"),
    [
        ([hung(0, calls=calls("a")), hung(1, calls=calls("b"))], "proven"),
        ([hung(0, stopped=True, certainty="proven"), hung(1)], "proven"),
        ([hung(0, waiting=False), hung(1)], "slow"),
        ([seen(0, waiting=False), seen(1)], "slow"),
        ([broken(0, where=USER), broken(1, where=ENGINE)], "slow"),
        (
            [
                broken(0, where=USER),
                broken(1, where=ENGINE, message="op.preamble.length <= op.nbytes"),
            ],
            "proven",
        ),
        ([ahead(0), late(1)], "slow"),  # the late rank may still come
        ([failed(0, left=True, witness=True), hung(1)], "proven"),
        # All wait, but a peer may still come
        ([hung(0, calls=calls(*"gg")), hung(1, calls=calls("g"))], "slow"),
        ([failed(0), hung(1)], "proven"),
        ([hung(0), hung(1)], "slow"),
        ([seen(0), seen(1)], "slow"),
    ],
)
def test_blame_is_certain_only_of_what_cannot_go_on(evidence: Evidence, certainty: str) -> None:
    assert [blame(order).certainty for order in (evidence, evidence[::-1])] == [
        certainty,
        certainty,
    ]


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ([failed(0, message="ValueError: x"), broken(1)], "ValueError: x"),
        ([hung(0, message="no progress for 9 s", waiting=False), hung(1)], "no progress for 9 s"),
        (
            [seen(0, message="at step 3 in data", waiting=False), seen(1)],
            "no progress at step 3 in data",
        ),
        (
            [failed(0, left=True, witness=True, message="left after step 3"), hung(1)],
            "left after step 3",
        ),
        (
            [hung(0, calls=calls("a"), where=ENGINE), hung(1, calls=calls("b"), where=USER)],
            f"collective 1 of group 0 is b on rank 1 and a on rank 0 ({USER})",
        ),
        (
            [hung(0, calls=calls("a"), where=ENGINE), hung(1, calls=calls("b"), where="")],
            "collective 1 of group 0 is b on rank 1 and a on rank 0",
        ),
        ([hung(0, message="slow")], "slow"),
        ([hung(0, message="slow", waiting=False), hung(1, waiting=False)], "slow"),
        (
            [hung(0, message="slow"), hung(1)],
            "slow; all ranks wait alike and no process has ended: check the network and the "
            "storage for a hang",
        ),
        (
            [broken(0, message="closed"), hung(1)],
            "closed; no rank stands out and no process has ended: check the network and the "
            "storage for a hang",
        ),
        (
            [hung(0, message="slow"), hung(1, waiting=False, where="")],
            "slow; no rank stands out and no process has ended: check the network and the "
            "storage for a hang",
        ),
    ],
)
def test_the_culprits_message_has_what_its_rule_adds(evidence: Evidence, message: str) -> None:
    assert [blame(order).message for order in (evidence, evidence[::-1])] == [message, message]


@pytest.mark.parametrize(
    ("evidence", "kind", "action"),
    [
        (
            [failed(0, lost_node=1)],
            "killed by node 1",
            "a new attempt on another machine, from the newest commit",
        ),
        (
            [failed(0, gpu_fault="Xid 79")],
            "GPU fault",
            "a new attempt on another machine, from the newest commit",
        ),
        (
            [failed(0, killed_by="SIGKILL", memory_kill=True)],
            "killed for memory",
            f"{NEWEST}; if it comes again: more gradient_accumulation_steps, fewer loader workers",
        ),
        (
            [failed(0, killed_by="SIGBUS")],
            "killed by SIGBUS",
            f"{NEWEST}; SIGBUS is often a full /dev/shm: give the container more shared memory",
        ),
        ([failed(0, killed_by="SIGKILL")], "killed by SIGKILL", NEWEST),
        ([hung(0, stopped=True)], "stopped", f"continue and end the stopped process, {NEWEST}"),
        (
            [
                hung(0, calls=calls("a")),
                hung(1, calls=calls("a")),
                hung(2, calls=calls("b"), where=USER),
            ],
            "different collectives",
            "every rank must call the same collectives in the same order: correct the code at "
            f"{USER}",
        ),
        (
            [failed(0, left=True, witness=True), broken(1)],
            "left early",
            "every rank must call the same collectives in the same order: correct the code at it",
        ),
        (
            [hung(0, waiting=False)],
            "hang",
            f"end it and {NEWEST}; if it comes again: look at {USER_PLACE}, stacks are in the dump",
        ),
        (
            [hung(0, where="")],
            "hang",
            f"end it and {NEWEST}; if it comes again: stacks are in the dump",
        ),
        (
            [failed(0, error="ValueError")],
            "ValueError",
            f"{NEWEST}; the same exception three times without a new commit ends the job",
        ),
    ],
)
def test_the_culprits_kind_decides_what_to_do_next(
    evidence: Evidence, kind: str, action: str
) -> None:
    culprit = blame(evidence)
    assert (culprit.kind, culprit.next_action) == (kind, action)


def test_a_culprit_has_the_evidence_of_its_rank() -> None:
    cause = failed(
        3,
        node=1,
        message="killed by SIGSEGV",
        killed_by="SIGSEGV",
        step=7,
        phase="data",
        where=USER,
        dump="dump-1/3.txt",
    )
    others = [broken(4), seen(4), hung(1), failed(0, left=True, witness=True)]
    culprit = blame([*others, cause])
    assert culprit.failure == cause and culprit.message == "killed by SIGSEGV"
    assert culprit.details() == {
        "rank": 3,
        "node": 1,
        "kind": "killed by SIGSEGV",
        "because": FIRST,
        "where": USER,
        "step": 7,
        "phase": "data",
        "certainty": "proven",
        "fingerprint": f"killed by SIGSEGV at {USER}",
        "cascades": [1, 4],
        "next_action": NEWEST,
        "dump": "dump-1/3.txt",
    }
    unknown = blame([failed(0, killed_by="SIGSEGV")])
    assert unknown.fingerprint == "killed by SIGSEGV"
    assert sorted(unknown.details()) == [
        "because",
        "cascades",
        "certainty",
        "fingerprint",
        "kind",
        "next_action",
        "node",
        "rank",
        "step",
    ]


def test_a_failure_without_place_or_calls_has_those_of_the_ranks_last_position() -> None:
    position = seen(0, where=USER, calls=FIRST_TIME)
    lost = broken(0)
    others = [broken(1, where=ENGINE, calls=HABIT), broken(2, where=ENGINE, calls=HABIT)]
    differing = [hung(1, calls=calls("a")), hung(2, calls=calls("a"))]
    for order in ([position, lost], [lost, position]):
        culprit = blame([*order, *differing])
        assert (culprit.rank, culprit.because) == (0, DIFFER)
        assert culprit.where == USER
    own = hung(0, where=EXCHANGE_PLACE, calls=calls("b"))
    culprit = blame([own, position, *differing])
    assert (culprit.because, culprit.where, culprit.failure.calls) == (
        DIFFER,
        EXCHANGE_PLACE,
        calls("b"),
    )
    assert blame([lost, *others]).because == NONE_STANDS_OUT


@pytest.mark.parametrize(
    ("evidence", "rank"),
    [
        ([seen(0), seen(1, waiting=False, idle_seconds=1.0)], 1),
        (
            [
                seen(0, waiting=False, calls=calls("g", state="started")),
                seen(1, waiting=False, idle_seconds=9.0),
            ],
            1,
        ),
        ([seen(0), seen(1, waiting=False, idle_seconds=0.99)], None),
        ([seen(1, waiting=False, idle_seconds=9.0)], None),
        ([seen(0), seen(1, waiting=False, step=1), seen(2, waiting=False, idle_seconds=9.0)], None),
        (
            [seen(0, calls=calls("a")), seen(1, calls=calls("b"), where=USER, idle_seconds=9.0)],
            None,
        ),
        ([seen(0), failed(1, left=True, witness=True, idle_seconds=9.0)], None),
    ],
)
def test_a_stall_is_one_idle_rank_for_which_all_others_wait(
    evidence: Evidence, rank: int | None
) -> None:
    culprit = detect_stall(evidence)
    assert (None if culprit is None else culprit.rank) == rank


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [
        ([failed(0, killed_by="SIGKILL")], 0.3),
        ([failed(0, killed_by="SIGKILL"), hung(1)], 0.3),
        ([broken(0), failed(1, killed_by="SIGKILL")], 0.3),
        ([ABORTED, failed(1)], 0.3),
        ([ABORTED], 1.0),
        ([ABORTED, hung(1)], 1.0),
        ([hung(0, stopped=True)], 1.0),
        ([hung(0, stopped=True), broken(1)], 1.0),
        ([failed(0)], 0.5),
        ([failed(0), hung(1)], 0.5),
        ([failed(0), broken(1)], 0.5),
        ([], 1.0),
        ([broken(0)], 3.0),
        ([broken(0), hung(1)], 1.5),
        ([hung(0, waiting=False)], 1.5),
        ([hung(0), hung(1, waiting=False)], 1.5),
        ([hung(0)], 6.0),
        ([hung(0), hung(1)], 6.0),
    ],
)
def test_evidence_settles_after_the_time_that_its_kind_takes(
    failures: Evidence, seconds: float
) -> None:
    assert settle_seconds(failures) == seconds
    if seconds in (1.5, 6.0):
        all_heard = 0.2
    else:
        all_heard = seconds
    assert settle_seconds(failures, all_heard=True) == all_heard


@pytest.mark.parametrize("evidence", [[hung(0)], [hung(0), seen(0)], [hung(0), seen(1)]])
def test_a_rank_without_a_report_is_named_beside_the_network(evidence: Evidence) -> None:
    """It may be the cause, so the others do not "wait alike"."""
    ranks = len({report.rank for report in evidence}) + 1
    missing = f"the nodes of the ranks without a report ({ranks - 1})"
    culprit = blame(evidence, ranks)
    assert culprit.because == NONE_STANDS_OUT
    assert "check the network" in culprit.message and missing in culprit.message
    assert "without a report" not in blame([hung(0), seen(1)], 2).message
    assert blame([hung(0, waiting=False)], 2).because == OUTSIDE


@pytest.mark.parametrize(("detail", "symptom", "fix", "local"), LAST_ERRORS)
def test_nccls_last_error_is_a_cascade_only_if_a_peer_is_at_fault(
    detail: str, symptom: str, fix: str, local: bool
) -> None:
    """All ranks die of it: the verdict and the diagnosis name its cause and fix."""
    message = (
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error\n"
        f"ncclSystemError: System call failed.\nLast error:\n{detail}"
    )
    assert is_peer_loss_error(message) is not local
    evidence = [
        failed(rank, message=message, cascade=is_peer_loss_error(message), timestamp=1.0 + rank)
        for rank in range(4)
    ]
    culprit = blame(evidence)
    assert (culprit.because == FIRST) is local and culprit.rank == 0
    lines = [LogText("log", number, text) for number, text in enumerate(message.splitlines(), 1)]
    root = diagnose_lines(lines).findings[0]
    assert root.rule.id == symptom
    if fix:
        assert fix in culprit.message and fix in root.rule.fix[0]
        assert "for a hang" not in culprit.message
    dead = failed(3, killed_by="SIGKILL", timestamp=0.5)
    if not local:
        assert blame([*evidence[:3], dead]).rank == 3, "a peer died first"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("RuntimeError: CUDA error: misaligned address", "CUDA_LAUNCH_BLOCKING=1 for one run"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "fix: smaller micro-batch"),
        ("AcceleratorError: CUDA error: the launch timed out and was terminated", "fix: "),
        ("ncclUnhandledCudaError: x\nLast error:\nCuda failure 999 'unknown error'", ""),
        ("ValueError: a mistake", ""),
    ],
)
def test_an_error_of_cuda_is_explained_if_its_cause_is_known(message: str, says: str) -> None:
    told = blame([failed(0, message=message), broken(1)]).message.removeprefix(message)
    assert bool(told) == bool(says) and says in told


def test_evidence_of_a_local_cause_of_nccl_waits_for_all_ranks() -> None:
    """If all name it, no restart helps."""
    message = f"ncclSystemError: x\nLast error:\n{LAST_ERRORS[0][0]}"
    evidence = [failed(0, message=message), broken(1)]
    assert settle_seconds(evidence) == 3.0
    assert settle_seconds(evidence, all_heard=True) == 0.5


@pytest.mark.parametrize("unknown", ["", "a new word of a later release"])
def test_a_system_error_without_known_words_asks_for_nccls_own_log(unknown: str) -> None:
    message = f"ncclSystemError: System call failed.\nLast error:\n{unknown}"
    evidence = [broken(rank, message=message) for rank in range(2)]
    said = blame(evidence).message
    assert "NCCL_DEBUG=INFO" in said and "for a hang" not in said
    assert blame([*evidence, failed(2, killed_by="SIGKILL")]).rank == 2

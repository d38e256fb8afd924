"""Facts in logs, and the rules that combine them across lines and ranks."""

from __future__ import annotations

import itertools

import pytest

from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.facts import (
    KINDS,
    MemoryShortage,
    OsFailure,
    PackageVersion,
    ProcessEnd,
    StateKeys,
    compile_expression,
)
from ebbflow.diagnose.judging import Finding, judge
from ebbflow.diagnose.reading import LogText, rank_of
from ebbflow.diagnose.rules import load_rules

OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {:.2f} GiB (GPU 0; 24.00 GiB total capacity; "
    "{:.2f} GiB already allocated; {:.2f} GiB free; {:.2f} GiB reserved in total by PyTorch)"
)
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {:.2f} GiB. GPU 3 has a total "
    "capacity of 24.00 GiB of which {:.2f} GiB is free. Including non-PyTorch memory, this process "
    "has 22.00 GiB memory in use. Of the allocated memory {:.2f} GiB is allocated by PyTorch, and "
    "{:.2f} GiB is reserved by PyTorch but unallocated."
)
GIB = 2.0**30


def read(*lines: str) -> Evidence:
    evidence = Evidence()
    evidence.read(
        LogText("log", number, line, rank_of(line)) for number, line in enumerate(lines, 1)
    )
    return evidence


def root(*lines: str) -> Finding:
    finding = judge(read(*lines)).findings[0]
    assert finding.role == "root"
    return finding


def timeout(rank: int, sequence: int, operation: str = "ALLREDUCE") -> str:
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:563] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=600000) ran for 600093 milliseconds before timing out."
    )


@pytest.mark.parametrize(
    ("line", "free", "unallocated"),
    [(OLD.format(2, 12, 1, 18), 1, 6), (NEW.format(2, 1, 12, 6), 1, 6)],
)
def test_memory_sizes_are_read_in_both_wordings_of_torch(
    line: str, free: float, unallocated: float
) -> None:
    (fact,) = read(line).facts()
    assert isinstance(fact, MemoryShortage)
    assert (fact.requested, fact.capacity, fact.free) == (2 * GIB, 24 * GIB, free * GIB)
    assert fact.unallocated == unallocated * GIB


@pytest.mark.parametrize(
    ("requested", "free", "unallocated", "symptom"),
    [(2, 0.5, 1.5, "C04"), (2, 0.5, 1.4, "C01"), (2, 0, 6, "C04"), (8, 1, 2, "C01")],
)
def test_memory_that_would_fit_but_for_its_pieces_is_fragmented(
    requested: float, free: float, unallocated: float, symptom: str
) -> None:
    lines = [
        NEW.format(requested, free, 12, unallocated),
        OLD.format(requested, 12, free, 12 + unallocated),
    ]
    for line in lines:
        assert root("step 3", line).rule.id == symptom
    wrapped = lines[1].split("; ")
    halves = ["; ".join(wrapped[:2]) + ";", "; ".join(wrapped[2:])]
    assert root("step 3", *halves).rule.id == symptom


def test_memory_that_is_requested_while_a_state_dict_is_gathered_is_no_fragmentation() -> None:
    frame = (
        '  File "/env/torch/distributed/fsdp/_state_dict_utils.py", line 303, in '
        "_full_pre_state_dict_hook"
    )
    found = root(frame, OLD.format(2, 12, 1, 18))
    assert found.rule.id == "C01"
    assert "state dict" in found.note and "rank0_only" in found.rule.fix[0]


def test_an_allocation_that_no_gpu_could_hold_and_a_foreign_process_are_named() -> None:
    assert "larger than the whole GPU" in root(OLD.format(130674.9, 12, 1, 13)).note
    assert "another process" in root(OLD.format(4, 2, 1, 2.5)).note


@pytest.mark.parametrize(
    ("lines", "symptom"),
    [
        (
            [
                '  File "/usr/lib/python3.12/multiprocessing/synchronize.py", line 57, in __init__',
                "OSError: [Errno 28] No space left on device",
            ],
            "C09",
        ),
        (
            [
                "node1:81:92 [0] include/shm.h:48 NCCL WARN Call to posix_fallocate failed : No space left on device"
            ],
            "C09",
        ),
        (
            [
                '  File "/env/torch/serialization.py", line 967, in save',
                "OSError: [Errno 28] No space left on device",
            ],
            "H10",
        ),
    ],
)
def test_a_full_shared_memory_is_no_full_disk(lines: list[str], symptom: str) -> None:
    assert root(*lines).rule.id == symptom


def test_locked_memory_that_is_too_small_is_told_from_other_failures_of_infiniband() -> None:
    line = "NCCL WARN Call to ibv_reg_mr_iova2 failed with error {}"
    assert "ulimit -l" in root(line.format("Cannot allocate memory")).rule.fix[0]
    assert "locked memory" not in root(line.format("Invalid argument")).note


@pytest.mark.parametrize(
    ("detail", "symptom"),
    [
        ("Bootstrap : no socket interface found", "A14"),
        ("ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2)", "A14"),
        ("socketProgressOpt: Call to recv from 10.1.2.3<4901> failed : Broken pipe", "D06"),
        ("Net : Connection closed by remote peer host<50260>", "D06"),
        (
            "socketProgress: Call to recv from 10.0.0.7<3075> failed : Connection reset by peer",
            "D06",
        ),
        ("NET/IB : Got completion from peer 10.0.0.7<39> with error 5, opcode 0", "A29"),
        ("NET/OFI Request 0x7f completed with error. RC: 113. Error: 2 (UNDELIVERABLE)", "A28"),
    ],
)
def test_the_last_error_of_nccl_decides_what_its_exception_means(detail: str, symptom: str) -> None:
    for prefix in ("", "[rank3]: "):
        lines = [
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, internal error",
            "ncclInternalError: Internal check failed.",
            "Last error:",
            detail,
        ]
        assert root(*(prefix + line for line in lines)).rule.id == symptom


@pytest.mark.parametrize(
    ("calls", "symptom"),
    [
        ([(0, 7, "ALLREDUCE"), (1, 7, "ALLREDUCE")], "D01"),
        ([(0, 7, "ALLREDUCE"), (1, 9, "ALLREDUCE")], "D03"),
        ([(0, 9, "_ALLGATHER_BASE"), (1, 7, "BROADCAST"), (2, 7, "BROADCAST")], "D04"),
        ([(0, 7, "ALLREDUCE")], "D01"),
    ],
)
def test_collectives_are_compared_across_ranks(
    calls: list[tuple[int, int, str]], symptom: str
) -> None:
    for order in itertools.permutations(calls):
        assert root(*(timeout(*call) for call in order)).rule.id == symptom


def test_the_rank_that_a_collective_timeout_came_from_is_accused() -> None:
    line = (
        "[rank{0}]:[E ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Received a "
        "dump signal due to a collective timeout from  rank 1 and we will try our best to dump the "
        "debug info. Last enqueued NCCL work: 12, last completed NCCL work: 11."
    )
    assert root(line.format(0), line.format(1)).suspects == (1,)


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        ("failed (exitcode: -9) local_rank: 3 (pid: 904) of binary: /usr/bin/python3", 9),
        ("  exitcode  : -9 (pid: 3309)", 9),
        ("Child process 3 terminated with code -9", 9),
        ("ProcessExitedException: process 1 terminated with signal SIGKILL", 9),
        ("    Exit Code:    137", 9),
        ("srun: error: gpu-7: task 3: Exited with exit code 137", 9),
        ("Container exited with code 139", 11),
    ],
)
def test_ends_of_processes_are_read_as_launchers_write_them(line: str, signal: int) -> None:
    ends = [fact for fact in read(line).facts() if isinstance(fact, ProcessEnd)]
    assert [end.signal for end in ends] == [signal]


@pytest.mark.parametrize(
    ("keys", "symptom"),
    [
        (
            'Unexpected key(s) in state_dict: "epoch", "netG_state_dict", "optimizer_state_dict".',
            "H03",
        ),
        ('Missing key(s) in state_dict: "layers.0.weight", "layers.0.bias".', "H04"),
        ('Missing key(s) in state_dict: "dataloader.dp_rank_15".', "H05"),
        ('Unexpected key(s) in state_dict: "module.layers.0.weight".', "H04"),
    ],
)
def test_the_names_of_keys_tell_what_a_checkpoint_is(keys: str, symptom: str) -> None:
    assert root("RuntimeError: Error(s) in loading state_dict for Net:", keys).rule.id == symptom


def test_keys_are_counted() -> None:
    (fact,) = read('Unexpected key(s) in state_dict: "epoch", "a.weight", "b.bias".').facts()
    assert isinstance(fact, StateKeys)
    assert (fact.unexpected, fact.missing, fact.top_level, fact.of_ranks) == (3, 0, 1, 0)


def test_sizes_in_a_whole_ratio_are_shards_of_another_number_of_ranks() -> None:
    line = "RuntimeError: The size of tensor a ({}) must match the size of tensor b ({}) at dimension 0"
    assert root(line.format(56124554, 14031139)).rule.id == "H05"
    assert root(line.format(512, 128)).rule.id == "O02"
    assert root(line.format(56124554, 24031139)).rule.id == "O02"


def test_a_loopback_address_of_a_rank_on_many_nodes_is_a_wrong_master() -> None:
    line = "[rank{}]: The client socket has timed out after 600s while trying to connect to (127.0.0.1, 29500)"
    assert root(line.format(15)).rule.id == "A09"
    assert root(line.format(1)).rule.id == "A11"


def test_a_name_without_an_address_is_the_cause_of_a_failed_connection() -> None:
    lines = [
        "[W socket.cpp:558] [c10d] The IPv4 network addresses of (head, 29500) cannot be retrieved (gai error: -2)",
        "[E socket.cpp:610] [c10d] The client socket has failed to connect to any network address of (head, 29500).",
    ]
    assert root(*lines).rule.id == "A13"
    assert root(lines[1]).rule.id == "A11"


@pytest.mark.parametrize(
    "expression",
    ["open('x')", "__import__('os')", "requested.real", "sizes > 3", "[1 for _ in place]", "1 +"],
)
def test_an_expression_may_only_calculate_with_fields(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        compile_expression(expression, "memory")


def test_every_kind_of_fact_serves_a_rule() -> None:
    used = {test.fact for rule in load_rules().rules for test in (*rule.facts, *rule.details)}
    assert used == set(KINDS)
    for rule in load_rules().rules:
        for test in rule.facts:
            assert all(load_rules().find(symptom) for symptom in test.instead_of), rule.id


@pytest.mark.parametrize(
    ("scale", "symptom"), [("2.0.", "F06"), ("1.52587890625e-05", "F06"), ("256.0.", None)]
)
def test_a_loss_scale_that_falls_to_nothing_is_unstable(scale: str, symptom: str | None) -> None:
    line = f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}"
    findings = judge(read(line, "step 3")).findings
    assert [finding.rule.id for finding in findings] == ([symptom] if symptom else [])


@pytest.mark.parametrize(
    ("line", "package", "fits"),
    [
        ("peft 0.9 requires torch>=2.1,<2.3, but you have torch 2.4.0 which is", "torch", False),
        ("peft 0.9 requires torch>=2.1,<2.3, but you have torch 2.2.1+cu121 which", "torch", True),
        (
            "ImportError: tokenizers>=0.20,!=0.21.0 is required for a normal functioning of this "
            "module, but found tokenizers==0.21.0.",
            "tokenizers",
            False,
        ),
        ("x 1 requires numpy~=1.26.0, but you have numpy 1.26.4 which is", "numpy", True),
        ("x 1 requires numpy==1.*, but you have numpy 2.0.1 which is", "numpy", False),
        (
            "The detected CUDA version (11.8) mismatches the version that was used to compile "
            "PyTorch (12.4). Please make sure",
            "cuda",
            False,
        ),
    ],
)
def test_versions_are_compared_with_what_is_required(line: str, package: str, fits: bool) -> None:
    (fact,) = [fact for fact in read(line).facts() if isinstance(fact, PackageVersion)]
    assert (fact.package, fact.met) == (package, fits)
    assert fits or root(line).rule.id == "A03"


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_9'", "/dev/shm/torch_9"),
        ("cp: cannot open: Permission denied: /data/a.bin", "/data/a.bin"),
        ("OSError: [Errno 24] Too many open files", ""),
    ],
)
def test_an_error_number_comes_with_its_path(line: str, path: str) -> None:
    (fact,) = [fact for fact in read(line).facts() if isinstance(fact, OsFailure)]
    assert fact.path == path


def test_the_trouble_of_a_tracker_is_no_root_beside_a_timeout() -> None:
    trouble = "[neptune] [warning] Experiencing connection interruptions. Internal exception: x"
    assert root(trouble, timeout(3, 91)).rule.id == "D01"

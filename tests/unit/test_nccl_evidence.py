"""Blame under NCCL, by flight recorders in the format of torch's source (FlightRecorderDetail.hpp,
`dump_json`).

No GPU was there to record them: the entries are written here, with every field that torch 2.7 to
2.13 writes.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C import _distributed_c10d

from ebbflow.training.launch.blame import blame
from ebbflow.training.launch.evidence import (
    WorkerFailure,
    fetch_records,
    is_peer_loss_error,
    parse_records,
)
from ebbflow.training.launch.heartbeat import RECORDS, WatchHooks

SYNC = "training/engine/trainer.py:210 in sync_step"


def entry(
    sequence: int, state: str, *, group: str = "0", name: str = "nccl:_all_gather_base"
) -> dict:
    """One collective, as version 2.4 (torch 2.7) and later versions of the dump have it."""
    return {
        "record_id": sequence,
        "pg_id": 0,
        "process_group": [group, "default_pg"],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": name,
        "time_created_ns": 1_700_000_000_000_000_000 + sequence,
        "input_sizes": [[18]],
        "input_dtypes": ["Double"],
        "output_sizes": [[144]],
        "output_dtypes": ["Double"],
        "state": state,
        "time_discovered_started_ns": 0 if state == "scheduled" else 5,
        "time_discovered_completed_ns": 6 if state == "completed" else 0,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def dump(*entries: dict) -> bytes:
    return json.dumps(
        {"version": "2.4", "pg_config": {}, "pg_status": {}, "entries": list(entries)}
    ).encode()


def device(last: str, *, done: int = 40, queued: int = 0) -> bytes:
    """A recorder whose device has completed `done` collectives, has `last` as the state of the
    next, then a queue.
    """
    states = ["completed"] * done + [last] + ["scheduled"] * queued
    return dump(*(entry(number, state) for number, state in enumerate(states, 1)))


def hung(rank: int, raw: bytes, *, where: str = SYNC, waiting: bool = True) -> WorkerFailure:
    return WorkerFailure(
        rank=rank,
        message="no progress",
        hung=True,
        certainty="slow",
        timestamp=100.0 - rank,
        step=7,
        phase="backward",
        where=where,
        waiting=waiting,
        calls=tuple(parse_records(raw)),
    )


def test_a_gpu_that_hangs_is_blamed_though_every_host_has_called_alike() -> None:
    """Rank 3's kernels hang: its host has queued collective 41, but its device never starts it."""
    evidence = [hung(rank, device("scheduled" if rank == 3 else "started")) for rank in range(8)]
    for order in (evidence, evidence[::-1]):
        culprit = blame(order)
        assert (culprit.rank, culprit.kind) == (
            3,
            "hang",
        ) and "GPU has not started" in culprit.because


def test_hosts_that_block_on_a_full_queue_wait_for_their_devices() -> None:
    """Hosts 1 to 3 stand in a launch within the model, outside of any collective.

    Only rank 3's device is behind.
    """
    model = "user/model.py:31 in forward"
    evidence = [hung(0, device("started"))]
    evidence += [
        hung(rank, device("started", queued=90), where=model, waiting=False) for rank in (1, 2)
    ]
    evidence += [hung(3, device("scheduled", queued=90), where=model, waiting=False)]
    assert blame(evidence).rank == blame(evidence[::-1]).rank == 3


def test_a_host_that_hangs_with_an_idle_device_is_blamed() -> None:
    evidence = [hung(rank, device("started")) for rank in (0, 1, 3)]
    stuck = dump(*(entry(number, "completed") for number in range(1, 41)))
    evidence.append(hung(2, stuck, where="user/data.py:9 in read", waiting=False))
    assert blame(evidence).rank == 2


def test_gpus_that_wait_in_one_collective_alike_are_the_networks_fault() -> None:
    model = "user/model.py:31 in forward"
    evidence = [
        hung(rank, device("started", queued=90), where=model, waiting=False) for rank in range(4)
    ]
    culprit = blame(evidence)
    assert "network" in culprit.message and culprit.certainty == "slow"


def test_of_gpus_that_wait_in_a_chain_the_last_is_blamed() -> None:
    """HSDP, shards {0, 1} and {2, 3}, copies {0, 2} and {1, 3}: device 0 waits for 2, which waits
    for 3.
    """
    states = {0: {"c": "started"}, 1: {"d": "started"}, 2: {"b": "started", "c": "scheduled"}}
    states[3] = {"b": "scheduled", "d": "scheduled"}
    raw = {}
    for rank, group_states in states.items():
        raw[rank] = dump(*(entry(5, state, group=group) for group, state in group_states.items()))
    assert blame([hung(rank, dumped) for rank, dumped in raw.items()]).rank == 3


def test_a_long_queue_does_not_push_out_what_the_device_has_reached() -> None:
    calls = parse_records(device("started", done=100, queued=300))
    assert len(calls) == 64 and ["0", 101, "_all_gather_base [[18]]", "started"] in calls
    assert parse_records(dump(entry(1, "completed", name="gloo:all_reduce"))) == [
        ["0", 1, "all_reduce [[18]]"]
    ]


def test_nccls_recorder_is_saved_where_it_has_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = SimpleNamespace(_heartbeat=tmp_path / "rank-0.heartbeat")
    saved = tmp_path / f"rank-0{RECORDS}"
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda **_: dump(), raising=False)
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda **_: device("started"), raising=False
    )
    WatchHooks.save_records(hooks)  # type: ignore[arg-type]
    assert len(parse_records(saved.read_bytes())) == 41


@pytest.mark.parametrize(
    "message",
    [
        "DistBackendError: NCCL error in: ../NCCLUtils.hpp:268, remote process exited or there "
        "was a network error, NCCL version 2.26.2\nncclRemoteError: A call failed possibly due "
        "to a network error",
        "DistBackendError: NCCL error: unhandled system error, ncclSystemError: System call "
        "failed or device error.",
        "DistBackendError: NCCL error: internal error, ncclInternalError: Internal check failed.",
        "DistBackendError: NCCL communicator was aborted on rank 2.",
    ],
)
def test_nccls_errors_about_peers_are_no_failures_of_their_own(message: str) -> None:
    assert is_peer_loss_error(message)
    assert not is_peer_loss_error(
        "ncclUnhandledCudaError: Call to CUDA function failed. uncorrectable ECC error"
    )


def test_a_recorder_that_lets_its_limit_pass_is_told_from_one_that_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank-0.recorder"
    assert fetch_records(path) == (b"", False)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(4)
        assert fetch_records(path) == (b"", True)

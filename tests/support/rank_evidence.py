"""Evidence about ranks, as agents report it: failures, hangs, positions and flight recorders."""

from __future__ import annotations

from typing import Any

from ebbflow.training.launch.evidence import WorkerFailure

USER_PLACE = "user/data.py:7 in read"
EXCHANGE_PLACE = "training/gang.py:40 in gather"


def failed(rank: int, **known: Any) -> WorkerFailure:
    return WorkerFailure(rank=rank, **{"message": "it failed", "timestamp": 100.0 + rank, **known})


def hung(rank: int, *, waiting: bool = True, **known: Any) -> WorkerFailure:
    if waiting:
        where = EXCHANGE_PLACE
    else:
        where = USER_PLACE
    return failed(
        rank, **{"hung": True, "certainty": "slow", "waiting": waiting, "where": where, **known}
    )


def seen(rank: int, *, waiting: bool = True, **known: Any) -> WorkerFailure:
    """The position of a rank that has not failed."""
    return hung(
        rank, **{"waiting": waiting, "hung": False, "witness": True, "certainty": "proven", **known}
    )


def calls(*operations: str, group: str = "0", start: int = 1, state: str = "") -> list[list]:
    """Records of one group. state: that of NCCL's last call; all earlier ones are completed."""
    records: list[list] = [
        [group, number, operation] for number, operation in enumerate(operations, start)
    ]
    if state:
        states = ["completed"] * (len(records) - 1) + [state]
        records = [
            [*record, rank_state] for record, rank_state in zip(records, states, strict=True)
        ]
    return records

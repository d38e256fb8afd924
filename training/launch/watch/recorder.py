"""torch's flight recorder, compared between ranks: the n-th collective of a group must be the same on all of them.

What it calls a record is reduced to [group, sequence, operation]; of the operation the sizes are a part where they
must agree.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
BUFFER_RECORDS = "512"
_KEPT_CALLS = 64
_LEAST_CALLS = 8  # of which a habit can be told
_SAME_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast", "barrier")
_ANSWER_SECONDS = 0.5

Calls = Sequence[Sequence]


@dataclass(frozen=True)
class Mismatch:
    """Ranks that called `operation` where the others, at the same place in the sequence, called `expected`."""

    ranks: Sequence[int]
    group: str
    sequence: int
    operation: str
    expected: str
    others: Sequence[int]

    def __str__(self) -> str:
        ranks, others = (", ".join(map(str, ranks)) for ranks in (self.ranks, self.others))
        return (
            f"collective {self.sequence} of group {self.group} is {self.operation} on rank {ranks} "
            f"and {self.expected} on rank {others}"
        )


def parse_records(raw: bytes) -> list[list]:
    """The last collectives, oldest first, of a dump in JSON; point-to-point calls are left out."""
    try:
        entries = json.loads(raw).get("entries", [])
        calls = [_call(entry) for entry in entries if not entry.get("is_p2p")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
    return calls[-_KEPT_CALLS:]


def fetch_records(door: Path) -> bytes:
    """Ask a rank's recorder, which answers from a thread that needs no GIL. b"" when it does not within 0.5 s."""
    connection = _UnixConnection(door)
    try:
        connection.request("POST", "/handler/fr_trace_json")
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def find_mismatch(calls: Mapping[int, Calls]) -> Mismatch | None:
    """The first place where ranks called different things, and who is the odd one: the minority. Of equally many,
    those whose call is the less usual one after the call before it."""
    for group, sequence, by_rank in _common_places(calls):
        operations = Counter(by_rank.values())
        if len(operations) == 1:
            continue
        usual = max(
            operations,
            key=lambda operation: (operations[operation], _habit(calls, group, sequence, by_rank, operation)),
        )
        odd = next(operation for operation in by_rank.values() if operation != usual)
        return Mismatch(
            ranks=sorted(rank for rank, operation in by_rank.items() if operation != usual),
            group=group,
            sequence=sequence,
            operation=odd,
            expected=usual,
            others=sorted(rank for rank, operation in by_rank.items() if operation == usual),
        )
    return None


def is_unusual(calls: Calls) -> bool | None:
    """Whether a rank never before called its last operation after the one before; None when too little is known."""
    group = calls[-1][0] if calls else ""
    own = [operation for name, _, operation in calls if name == group]
    if len(own) < _LEAST_CALLS:
        return None
    pairs = list(itertools.pairwise(own))
    return pairs[-1] not in pairs[:-1]


def furthest_behind(calls: Mapping[int, Calls]) -> list[int]:
    """The ranks that others wait for: behind in one of their groups and ahead in none; [] when none is behind.

    With several groups (HSDP) who waits for a rank keeps others waiting in turn: it is behind as well, but ahead of
    the first.
    """
    last: dict[str, dict[int, int]] = {}
    for rank, records in calls.items():
        for group, sequence, _ in records:
            last.setdefault(group, {})[rank] = sequence
    behind: set[int] = set()
    ahead: set[int] = set()
    for ranks in last.values():
        least = min(ranks.values())
        late = {rank for rank, sequence in ranks.items() if sequence == least}
        if len(late) < len(ranks):
            behind |= late
            ahead |= set(ranks) - late
    return sorted(behind - ahead or behind)


def _call(entry: dict) -> list:
    name = entry["profiling_name"].rpartition(":")[2]
    sized = any(kind in name.lower() for kind in _SAME_SIZES)
    operation = f"{name} {entry.get('input_sizes')}" if sized else name
    return [str(entry["process_group"][0]), int(entry["collective_seq_id"]), operation]


def _common_places(calls: Mapping[int, Calls]) -> list[tuple[str, int, dict[int, str]]]:
    """(group, sequence, {rank: operation}) where two ranks or more have a record, earliest first.

    Coalesced calls share a number, and a dump may catch a rank between them: such a place says nothing.
    """
    places: dict[tuple[str, int], dict[int, str]] = {}
    coalesced: set[tuple[str, int]] = set()
    for rank, records in calls.items():
        for group, sequence, operation in records:
            by_rank = places.setdefault((group, sequence), {})
            if rank in by_rank:
                coalesced.add((group, sequence))
            by_rank[rank] = operation
    told = [(place, by_rank) for place, by_rank in places.items() if len(by_rank) > 1 and place not in coalesced]
    shared = [(group, sequence, by_rank) for (group, sequence), by_rank in told]
    return sorted(shared, key=lambda place: place[1])


def _habit(calls: Mapping[int, Calls], group: str, sequence: int, by_rank: Mapping[int, str], operation: str) -> int:
    """How often the operation came after its predecessor, before this place, on the ranks that now called it."""
    count = 0
    for rank in (rank for rank, called in by_rank.items() if called == operation):
        own = [(number, name) for name_of_group, number, name in calls[rank] if name_of_group == group]
        before = next((name for number, name in own if number == sequence - 1), None)
        pairs = itertools.pairwise(own)
        count += sum(
            first == before and second == operation and number < sequence for (_, first), (number, second) in pairs
        )
    return count


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket in the file system; through its folder's descriptor, since such paths are limited to 108
    bytes."""

    def __init__(self, door: Path) -> None:
        super().__init__("localhost", timeout=_ANSWER_SECONDS)
        self._door = door

    def connect(self) -> None:
        folder = os.open(self._door.parent, os.O_RDONLY)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(_ANSWER_SECONDS)
            self.sock.connect(f"/proc/self/fd/{folder}/{self._door.name}")
        finally:
            os.close(folder)

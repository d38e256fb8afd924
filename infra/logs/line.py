"""One line of a rank's output as a record of JSON: made by the agent that follows the rank, read by `infra.logs`.

    {"t": "2026-11-21T04:22:17.123Z", "job", "generation", "node", "rank", "step", "phase", "text", "start", "end"}

t is when the agent read the line, as a rule within 50 ms of its writing. start and end are the byte offsets of the line
in the rank's own raw log, its line feed included: they tell a copy from another record, and what has no record yet.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from ebbflow.infra.foreign_text import one_line, printable, without_colours

# A line that is longer becomes several records; `more` marks all of them but the last.
LONGEST_LINE_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """t: UTC, when the agent read the line. step and phase: where the rank was then, by its heartbeat; None: unknown.

    dropped: bytes of the raw log after this record's `end` that have no record, because the rank printed too much.
    """

    t: str
    job: str
    generation: int
    node: int
    rank: int
    step: int | None
    phase: str | None
    text: str
    start: int
    end: int
    more: bool = False
    dropped: int = 0

    @property
    def identity(self) -> tuple[int, int, int, int, str]:
        """The same in every copy. The time is part of it: a job that was deleted and begun anew counts anew."""
        return self.generation, self.node, self.rank, self.start, self.t

    def to_json(self) -> str:
        """One line, safe to print. The two rare fields are left out where they say nothing."""
        record = dict(self.__dict__)
        for name in ("more", "dropped"):
            if not record[name]:
                del record[name]
        return printable(json.dumps(record, separators=(",", ":"), ensure_ascii=False))

    @classmethod
    def from_json(cls, line: str | bytes) -> LogLine:
        """Raises ValueError or TypeError for anything else."""
        line = cls(**json.loads(line))
        places = (line.generation, line.node, line.rank, line.start, line.end)
        if not isinstance(line.t, str) or not isinstance(line.text, str) or not all(type(x) is int for x in places):
            raise ValueError("a field has another type")
        return line

    def render(self) -> str:
        """One line for a terminal."""
        step = "step ?" if self.step is None else f"step {self.step}"
        return f"{one_line(self.t)} g{self.generation} n{self.node} r{self.rank} {step} | {visible(self.text)}"


def utc_text(unix_seconds: float) -> str:
    """ISO 8601 with milliseconds: sorts as text as it does in time."""
    milliseconds = round(unix_seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def visible(text: str) -> str:
    """A rank's line without colours and with all other control characters as escapes.

    Of a progress bar that overwrites itself, the last state, and the number of states before it, which the raw log has.
    """
    parts = [part for part in without_colours(text).split("\r") if part.strip()]
    if not parts:
        return ""
    overwritten = f"[{len(parts) - 1} overwritten] " if len(parts) > 1 else ""
    return overwritten + printable(parts[-1].rstrip("\n")).replace("\n", "\\u000a")


def split_lines(data: bytes, *, at_end: bool) -> list[tuple[bytes, bool]]:
    """The lines in `data` as (bytes with their line feed, whether the line goes on in the next piece).

    What is not whole yet is left over, unless `at_end`: nothing more will come. Pieces of a line that is too long end
    between two characters of UTF-8.
    """
    pieces: list[tuple[bytes, bool]] = []
    at = 0
    while at < len(data):
        feed = data.find(b"\n", at, at + LONGEST_LINE_BYTES)
        if feed >= 0:
            pieces.append((data[at : feed + 1], False))
        elif len(data) - at > LONGEST_LINE_BYTES:
            pieces.append((_whole_characters(data[at : at + LONGEST_LINE_BYTES]), True))
        elif at_end:
            pieces.append((data[at:], False))
        else:
            break
        at += len(pieces[-1][0])
    return pieces


def _whole_characters(piece: bytes) -> bytes:
    """Without a last character that is not whole; bytes that are no UTF-8 at all stay as they are."""
    for tail in range(1, min(4, len(piece))):
        byte = piece[-tail]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return piece[:-tail] if needed > tail else piece
    return piece

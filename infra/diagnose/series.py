"""Losses and step times in a log: signs of progress, and symptoms that only a whole series of values shows."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ebbflow.infra.diagnose.matching import Seen
from ebbflow.infra.diagnose.reading import LogText

_LOSS = re.compile(
    r"(?<![a-z])(?:(?:train|lm|total|avg|mean|batch|running|tr|training)[ _/.-]?)?loss(?:es)?['\"]?"
    r"\s*(?:[:=|]|is|of)?\s*(?:tensor\()?([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf(?:inity)?))(?![\w%])",
    re.IGNORECASE,
)
_FINISHED = re.compile(
    r"training (?:is )?(?:completed|complete|finished|done)|finished training|max_(?:steps|epochs)=\d+.? reached"
    r"|exiting successfully|train_runtime|succeeded|\[exiting program after \d+ iterations|all done|job completed",
    re.IGNORECASE,
)
_STEP_SECONDS = re.compile(
    r"(?:elapsed time per iteration \(ms\)|step[ _]time(?: \(?ms\)?)?|iter[ _]time|time/iter|sec/step|batch[ _]time)"
    r"['\"]?\s*[:=]?\s*(\d+(?:\.\d+)?)|(\d+(?:\.\d+)?) ?(?:s/it\b|sec/(?:batch|step))",
    re.IGNORECASE,
)
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?(?:it|tokens|samples|examples|images|steps)/s", re.IGNORECASE)
_MOST_POINTS = 20_000


@dataclass
class Track:
    """One series of values: (position among all lines read, line, value)."""

    points: list[tuple[int, LogText, float]] = field(default_factory=list)

    def add(self, order: int, line: LogText, value: float) -> None:
        if len(self.points) < _MOST_POINTS:
            self.points.append((order, line, value))


class Series:
    """Losses and step times of each rank, and whether the run made progress or finished."""

    triggers = (
        b"loss", b"train_runtime", b"finished training", b"training complet", b"training finish", b"succeeded",
        b"training done", b"reached", b"exiting", b"step time", b"step_time", b"per iteration", b"iter_time",
        b"s/it", b"it/s", b"sec/", b"tokens/s", b"samples/s", b"examples/s", b"images/s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.losses: dict[tuple[str, int | None], Track] = {}
        self.seconds: dict[tuple[str, int | None], Track] = {}
        self.progress: dict[tuple[str, int | None], tuple[int, int]] = {}
        self.finished: LogText | None = None
        self._steps = 0

    @property
    def sound(self) -> bool:
        """Whether the run printed a completion message, or at least 10 finite losses."""
        return self.finished is not None or self._steps >= 10

    def watch(self, lines: Iterable[LogText]) -> Iterator[LogText]:
        """Yield the lines unchanged, and record the losses, step times and completion messages in them."""
        for order, line in enumerate(lines, start=1):
            low = line.text.lower()
            if "loss" in low and (match := _LOSS.search(line.text)):
                value = float(match[1])
                key = (line.file, line.rank)
                self.losses.setdefault(key, Track()).add(order, line, value)
                if math.isfinite(value):
                    count = self.progress.get(key, (0, 0))[1]
                    self.progress[key] = (line.number, count + 1)
                    self._steps += 1
            if ("time" in low or "sec/" in low or "s/it" in low) and (match := _STEP_SECONDS.search(line.text)):
                self.seconds.setdefault((line.file, line.rank), Track()).add(order, line, float(match[1] or match[2]))
            elif "/s" in low and (match := _RATE.search(line.text)) and float(match[1]):
                self.seconds.setdefault((line.file, line.rank), Track()).add(order, line, 1 / float(match[1]))
            if _FINISHED.search(line.text):
                self.finished = line
            yield line

    def went_on(self, found: Sequence[Seen]) -> bool:
        """Return whether a completion message follows the last line of each failure, or is in another file."""
        end = self.finished
        return end is not None and all(
            seen.last is not None and (seen.last.file != end.file or seen.last.number < end.number) for seen in found
        )

    def survived(self, line: LogText | None) -> bool:
        """Return whether training continued after the line: at least 3 finite losses follow it in the same file."""
        if line is None:
            return False
        later = [
            1
            for (file, _), track in self.losses.items()
            if file == line.file
            for _, point, value in track.points
            if point.number > line.number and math.isfinite(value)
        ]
        return len(later) >= 3


def judge_series(series: Series) -> dict[str, list[tuple[int, LogText]]]:
    """Return the symptoms that the series show: for each rule id, the (position, line) pairs that are its evidence."""
    found: dict[str, list[tuple[int, LogText]]] = {}
    for track in series.losses.values():
        bad = [point for point in track.points if not math.isfinite(point[2])]
        if bad:
            found.setdefault("F01", [(point[0], point[1]) for point in bad[:3]])
            continue
        values = [point[2] for point in track.points]
        if len(values) < 20:
            continue
        head, tail = values[: len(values) // 5], values[-(len(values) // 5) :]
        noise = statistics.pstdev(values[len(values) // 2 :]) + 1e-12
        start, end, low = statistics.median(head), statistics.median(tail), min(values)
        ends = [(track.points[0][0], track.points[0][1]), (track.points[-1][0], track.points[-1][1])]
        rises = end > 2 * abs(low) + 1e-9 and end > start * 1.2 and end - start > noise
        if rises or (len(set(values)) == 1 and values[0] != 0):
            found.setdefault("F02", ends)
    for track in series.seconds.values():
        values = [point[2] for point in track.points]
        if len(values) >= 20:
            base, tail = statistics.median(values[: len(values) // 2]), statistics.median(values[-len(values) // 4 :])
            if base > 0 and tail > 2 * base:
                at = next(point for point in track.points if point[2] > 1.6 * base)
                found.setdefault("G02", [(at[0], at[1])])
    return found

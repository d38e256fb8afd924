"""Record losses, step times and signs of progress while a log's lines are read.

`series_symptoms` judges them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from ebbflow.diagnose.matching import Seen, is_no_evidence
from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.rules import VALUES, load_rules
from ebbflow.diagnose.vocabulary import is_severe

MOST_SCALES = 8  # a log with more lines of rates is no comparison
EVALUATION = re.compile(r"(?<![a-z])(?:eval|val(?:id)?(?![a-z])|validat|test)", re.IGNORECASE)
_FRAME = re.compile(r'File "([^"]+)", line \d+(?:, in (\S+))?')
# Frames of a launcher, which only reports what its children raised.
_LAUNCHER = re.compile(
    r"torchrun|distributed/(?:run|launch)\b|launcher/api|elastic/multiprocessing|commands/launch"
)
_INNERMOST = 3  # innermost frames of a traceback that are searched for the area
_TRACEBACK_LINES = 40
_INNER_FRAMES = 8  # frames that tell what an exception interrupted
_MOST_POINTS = 20_000
_MOST_SEVERE = 12
_SKELETON_LENGTH = 200
_FEWEST_LOSSES = 10  # of a run that made progress
_FEWEST_LATER_LOSSES = 3  # of a run that went on after a failure
_NUMBERS = {"one": 1.0, "single": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "eight": 8.0}
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


class SeriesPoint(NamedTuple):
    """A number that was read from a log line, such as a loss."""

    order: int  # position of its line among all lines read
    line: LogText
    value: float


@dataclass
class Track:
    """Values of one quantity, such as a rank's loss, in the order in which they were logged."""

    points: list[SeriesPoint] = field(default_factory=list)

    def add(self, order: int, line: LogText, value: float) -> None:
        if len(self.points) < _MOST_POINTS:
            self.points.append(SeriesPoint(order, line, value))

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]

    @property
    def finite_values(self) -> list[float]:
        return [point.value for point in self.points if math.isfinite(point.value)]


class LogSource(NamedTuple):
    """Key for the lines that one rank wrote to one file."""

    file: str
    rank: int | None


class TrackKey(NamedTuple):
    """Key for the values that one rank wrote to one file under one name."""

    file: str
    rank: int | None
    name: str


class Timing(Enum):
    """How a log measures the seconds of a step."""

    PLAIN = auto()  # seconds per step or steps per second, without a label
    LABELLED = auto()
    ELAPSED = auto()  # may count from the start of the run
    PER_UNIT = auto()  # from a rate such as tokens per second, which varies more than step times


class TimingKey(NamedTuple):
    """Key for the step times of one kind and label that one rank wrote to one file."""

    file: str
    rank: int | None
    timing: Timing
    label: str


class Scale(NamedTuple):
    """Throughput that was measured with a given number of GPUs or nodes."""

    order: int
    line: LogText
    workers: float
    rate: float


class Series:
    """Losses and step times of each rank, and whether the run made progress or finished."""

    triggers = tuple(text.encode() for text in VALUES["triggers"])

    def __init__(self) -> None:
        self.losses: dict[TrackKey, Track] = defaultdict(Track)
        self.norms: dict[LogSource, Track] = defaultdict(Track)
        self.scores: dict[LogSource, Track] = defaultdict(Track)  # accuracies
        self.seconds: dict[TimingKey, Track] = defaultdict(Track)
        self.data_shares: dict[LogSource, Track] = defaultdict(Track)
        # The steps' seconds, with those of the data
        self.data_totals: dict[LogSource, Track] = defaultdict(Track)
        # The first lines that tell of a failure, by their text without digits
        self.severe: dict[str, LogText] = {}
        self.last_frame: LogText | None = None
        self.scales: list[Scale] = []
        # First line of each step
        self.moments: dict[LogSource, dict[str, LogText]] = defaultdict(dict)
        self.finished: LogText | None = None
        self._frames: dict[str, list[_Frame]] = defaultdict(list)  # by file
        self._last_frame_number = 0
        self._finite_losses = 0

    @property
    def sound(self) -> bool:
        """Whether the run printed a completion message, or at least 10 finite losses."""
        return self.finished is not None or self._finite_losses >= _FEWEST_LOSSES

    def watch(self, lines: Iterable[LogText]) -> Iterator[LogText]:
        """Yield the lines unchanged, and record the losses, step times and completion messages in
        them.
        """
        self._last_frame_number = 0
        for order, line in enumerate(lines, start=1):
            lower = line.text.lower()
            self._record_frame(line, lower)
            self._record_loss(order, line, lower)
            self._record_score_and_norm(order, line, lower)
            self._record_data_share(order, line, lower)
            self._record_seconds(order, line, lower)
            self._record_scale(order, line, lower)
            self._record_moment(line)
            self._record_failure(line)
            if _FINISHED.search(line.text):
                self.finished = line
            yield line

    def forget(self, file: str) -> None:
        """Drop the series of a file, because its job starts again."""
        for tracks in (self.losses, self.norms, self.scores, self.seconds):
            _drop(tracks, file)
        for tracks in (self.data_shares, self.data_totals, self.moments):
            _drop(tracks, file)
        self._frames.pop(file, None)
        self.severe = {key: line for key, line in self.severe.items() if line.file != file}
        self.scales = [scale for scale in self.scales if scale.line.file != file]
        if self.last_frame is not None and self.last_frame.file == file:
            self.last_frame = None
        if self.finished is not None and self.finished.file == file:
            self.finished = None
        self._finite_losses = sum(len(track.finite_values) for track in self.losses.values())

    def went_on(self, found: Sequence[Seen]) -> bool:
        """Return whether the run completed despite the failures.

        The logs contain a completion message, and no failure follows this message in the same file.
        """
        end = self.finished
        return end is not None and all(
            seen.last is not None and (seen.last.file != end.file or seen.last.number < end.number)
            for seen in found
        )

    def raised_in(self, line: LogText) -> str | None:
        """Return the area of the code that raised an exception, such as "data"; None if it is
        unknown.

        The area follows from the innermost stack frames before `line`.
        """
        places = []
        for frame in self._frames.get(line.file, ()):
            is_near = line.number - _TRACEBACK_LINES <= frame.number <= line.number
            # How processes talk does not tell what about
            talks = "/multiprocessing/" in frame.place
            if is_near and frame.rank == line.rank and not talks:
                places.append(frame.place)
        for place in reversed(places[-_INNERMOST:]):
            for family in load_rules().families:
                if family.frames and re.search(family.frames, place):
                    return family.name
        return None

    def frames_before(self, line: LogText) -> list[str]:
        """Return path and function of the inner traceback frames before a line, innermost last."""
        places = []
        for frame in self._frames.get(line.file, ())[-_TRACEBACK_LINES:]:
            is_near = line.number - _TRACEBACK_LINES <= frame.number <= line.number
            if is_near and frame.rank == line.rank:
                places.append(frame.place)
        return places[-_INNER_FRAMES:]

    def recovered(self, line: LogText | None) -> bool:
        """Return whether training recovered after the line.

        The same file must contain later losses or gradient norms, and all of these must be finite.
        """
        later = _values_after(line, self.losses) + _values_after(line, self.norms)
        return bool(later) and all(map(math.isfinite, later))

    def survived(self, line: LogText | None) -> bool:
        """Return whether training continued after the line.

        At least 3 finite losses must follow it in the same file.
        """
        later = _values_after(line, self.losses)
        return sum(map(math.isfinite, later)) >= _FEWEST_LATER_LOSSES

    def _record_frame(self, line: LogText, lower: str) -> None:
        if 'file "' not in lower:
            return
        match = _FRAME.search(line.text)
        if match is None:
            return
        path, function = match.groups(default="")
        self._last_frame_number = line.number
        if not _LAUNCHER.search(path):
            self.last_frame = line
        frames = self._frames[line.file]
        if len(frames) < _MOST_POINTS:
            posix = path.replace("\\", "/")
            frames.append(_Frame(line.number, line.rank, f"/{posix} {function}"))

    def _record_loss(self, order: int, line: LogText, lower: str) -> None:
        if "loss" not in lower:
            return
        match = _LOSS.search(line.text)
        if match is None:
            return
        value = float(match[1])
        name = match[0].lower().partition(match[1].lower())[0].strip(" :=|'\"")
        self.losses[TrackKey(line.file, line.rank, name)].add(order, line, value)
        if math.isfinite(value):
            self._finite_losses += 1

    def _record_score_and_norm(self, order: int, line: LogText, lower: str) -> None:
        source = LogSource(line.file, line.rank)
        if "acc" in lower and (match := _SCORE.search(line.text)):
            self.scores[source].add(order, line, float(match[1]))
        if "norm" in lower and (match := _NORM.search(line.text)):
            self.norms[source].add(order, line, float(match[1]))

    def _record_data_share(self, order: int, line: LogText, lower: str) -> None:
        if "time" not in lower and "data_s" not in lower:
            return
        match = _DATA_SHARE.search(line.text)
        if match is None:
            return
        # Three formats: all and data, data and the rest, the rest and data
        total, data, data_first, rest, rest_first, data_last = match.groups()
        if total:
            data_seconds = float(data)
            seconds = float(total)
        elif data_first:
            data_seconds = float(data_first)
            seconds = data_seconds + float(rest)
        else:
            data_seconds = float(data_last)
            seconds = data_seconds + float(rest_first)
        if seconds:
            source = LogSource(line.file, line.rank)
            self.data_shares[source].add(order, line, data_seconds / seconds)
            self.data_totals[source].add(order, line, seconds)

    def _record_seconds(self, order: int, line: LogText, lower: str) -> None:
        timing = _find_seconds(line.text, lower)
        if timing is not None:
            kind, label, seconds = timing
            key = TimingKey(line.file, line.rank, kind, label)
            self.seconds[key].add(order, line, seconds)

    def _record_scale(self, order: int, line: LogText, lower: str) -> None:
        if len(self.scales) == MOST_SCALES or not _MEASURED.search(lower):
            return
        match = _WORKERS.search(lower)
        if match is not None:
            workers = _NUMBERS.get(match[1]) or float(match[1])
            self.scales.append(Scale(order, line, workers, float(match[2])))

    def _record_moment(self, line: LogText) -> None:
        if not line.time or line.number >= _MOST_POINTS:
            return
        match = _STEP.search(line.text)
        # A separate evaluator follows the training at any distance
        if match is not None and not EVALUATION.search(line.text):
            moments = self.moments[LogSource(line.file, line.rank)]
            moments.setdefault(match[0].lower(), line)

    def _record_failure(self, line: LogText) -> None:
        # The source line of a frame, which may quote any word
        is_quoted = self._last_frame_number and line.number == self._last_frame_number + 1
        if is_quoted or len(self.severe) >= _MOST_SEVERE:
            return
        skeleton = line.text[:_SKELETON_LENGTH].translate(_NO_DIGITS)
        if not skeleton or skeleton in self.severe:
            return
        if is_severe(line.text) and not is_no_evidence(line.text):
            self.severe[skeleton] = line


def _drop(tracks: dict[Any, Any], file: str) -> None:
    for key in [key for key in tracks if key.file == file]:
        del tracks[key]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("|".join(VALUES[name]), re.IGNORECASE)


_LOSS = _pattern("loss")
_NORM = _pattern("norm")
_SCORE = _pattern("score")
_FINISHED = _pattern("finished")
_STEP_SECONDS = _pattern("step_seconds")
_DURATION = _pattern("duration")
_STEP = _pattern("step")
_RATE = _pattern("rate")
_WORKERS = _pattern("workers")
_MEASURED = _pattern("measured")
_DATA_SHARE = _pattern("data_share")


class _Frame(NamedTuple):
    number: int  # of the line
    rank: int | None
    place: str  # path and function


def _find_seconds(text: str, lower: str) -> tuple[Timing, str, float] | None:
    """Find the step time in a line. Return its kind, label and seconds, or None."""
    if "time" in lower or "sec/" in lower or "s/it" in lower:
        match = _STEP_SECONDS.search(text)
        if match is not None and match[1]:
            label = match[0].lower().partition(match[1])[0].strip(" =:'\"")
            return Timing.LABELLED, label, float(match[1])
        if match is not None:
            return Timing.PLAIN, "", float(match[2])
    match = _DURATION.search(text)
    if match is not None and _STEP.search(text):
        return Timing.ELAPSED, match[1].lower(), float(match[2])
    if "/s" in lower:
        return _find_rate(text)
    return None


def _find_rate(text: str) -> tuple[Timing, str, float] | None:
    match = _RATE.search(text)
    if match is None or not float(match[1]):
        return None
    unit = match[2].lower()
    seconds = 1 / float(match[1])
    if unit in ("it", "steps"):
        return Timing.PLAIN, "", seconds
    return Timing.PER_UNIT, unit, seconds


def _values_after(
    line: LogText | None, tracks: Mapping[TrackKey, Track] | Mapping[LogSource, Track]
) -> list[float]:
    """Return the values that were logged after a line in the same file."""
    if line is None:
        return []
    values = []
    for key, track in tracks.items():
        if key.file == line.file:
            values += [point.value for point in track.points if point.line.number > line.number]
    return values

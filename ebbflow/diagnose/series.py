"""Losses and step times in a log: signs of progress, and symptoms that only a whole series of
values shows.
"""

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ebbflow.diagnose.matching import Seen
from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.rules import VALUES, load_rules
from ebbflow.diagnose.vocabulary import is_severe

_NAMES = (
    "loss",
    "norm",
    "score",
    "finished",
    "step_seconds",
    "duration",
    "step",
    "rate",
    "workers",
    "measured",
)
(
    _LOSS,
    _NORM,
    _SCORE,
    _FINISHED,
    _STEP_SECONDS,
    _DURATION,
    _STEP,
    _RATE,
    _WORKERS,
    _MEASURED,
    _DATA_SHARE,
) = (re.compile("|".join(VALUES[name]), re.IGNORECASE) for name in (*_NAMES, "data_share"))
_FRAME = re.compile(r'File "([^"]+)", line \d+(?:, in (\S+))?')
# Frames of a launcher, which only reports what its children raised.
_LAUNCHER = re.compile(
    r"torchrun|distributed/(?:run|launch)\b|launcher/api|elastic/multiprocessing|commands/launch"
)
_INNERMOST = 3  # innermost frames of a traceback that are searched for the area
_TRACEBACK_LINES = 40
_MOST_POINTS = 20_000
_DIVERGED = 1e9  # magnitude of a loss that has diverged
_STALL = 20  # a stalled step takes this many times the median
_MOST_SEVERE = 12
_SINCE = "since "  # label of durations that may count from the start of the run
_PER = "per "  # label of rates, which vary more than step times
_MOST_SCALES = 8  # a log with more lines of rates is no comparison
_NUMBERS = {"one": 1.0, "single": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "eight": 8.0}
_APART = 2.0  # seconds between clocks that are worth a finding
_SAME_STEPS = 0.9  # share of the steps that two ranks of one run have in common
_ATTEMPT = re.compile(r"(?:attempt|generation|retry|restart|try|run)[-_. ]?\d+", re.IGNORECASE)
_EVALUATION = re.compile(r"(?<![a-z])(?:eval|val(?:id)?(?![a-z])|validat|test)", re.IGNORECASE)
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


@dataclass
class Track:
    """One series of values: (position among all lines read, line, value)."""

    points: list[tuple[int, LogText, float]] = field(default_factory=list)

    def add(self, order: int, line: LogText, value: float) -> None:
        if len(self.points) < _MOST_POINTS:
            self.points.append((order, line, value))


class Series:
    """Losses and step times of each rank, and whether the run made progress or finished."""

    triggers = tuple(text.encode() for text in VALUES["triggers"])

    def __init__(self) -> None:
        self.losses: dict[
            tuple[str, int | None, str], Track
        ] = {}  # the last part of a key: the loss's name
        self.norms: dict[tuple[str, int | None, str], Track] = {}
        self.scores: dict[tuple[str, int | None, str], Track] = {}  # accuracies
        self.seconds: dict[
            tuple[str, int | None, str], Track
        ] = {}  # the last part of a key: the value's label
        self.data_shares: dict[tuple[str, int | None], Track] = {}
        self.data_totals: dict[
            tuple[str, int | None], Track
        ] = {}  # the steps' seconds, with those of the data
        self.frames: dict[
            str, list[tuple[int, int | None, str]]
        ] = {}  # file: (line, rank, path and function)
        self.severe: dict[
            str, LogText
        ] = {}  # the first lines that tell of a failure, by their text without digits
        self.last_frame: LogText | None = None
        self.scales: list[
            tuple[int, LogText, float, float]
        ] = []  # rates measured with numbers of GPUs or nodes
        # First line of each step
        self.moments: dict[tuple[str, int | None], dict[str, LogText]] = defaultdict(dict)
        self.finished: LogText | None = None
        self._steps = 0

    @property
    def sound(self) -> bool:
        """Whether the run printed a completion message, or at least 10 finite losses."""
        return self.finished is not None or self._steps >= 10

    def watch(self, lines: Iterable[LogText]) -> Iterator[LogText]:
        """Yield the lines unchanged, and record the losses, step times and completion messages in
        them.
        """
        framed = 0  # the line of the last frame
        for order, line in enumerate(lines, start=1):
            low = line.text.lower()
            if 'file "' in low and (match := _FRAME.search(line.text)):
                framed = line.number
                if not _LAUNCHER.search(match[1]):
                    self.last_frame = line
                frames = self.frames.setdefault(line.file, [])
                if len(frames) < _MOST_POINTS:
                    frames.append(
                        (
                            line.number,
                            line.rank,
                            f"/{match[1].replace(chr(92), '/')} {match[2] or ''}",
                        )
                    )
            if "loss" in low and (match := _LOSS.search(line.text)):
                value = float(match[1])
                name = match[0].lower().partition(match[1].lower())[0].strip(" :=|'\"")
                self.losses.setdefault((line.file, line.rank, name), Track()).add(
                    order, line, value
                )
                self._steps += math.isfinite(value)
            if "acc" in low and (match := _SCORE.search(line.text)):
                self.scores.setdefault((line.file, line.rank, "accuracy"), Track()).add(
                    order, line, float(match[1])
                )
            if "norm" in low and (match := _NORM.search(line.text)):
                self.norms.setdefault((line.file, line.rank, "norm"), Track()).add(
                    order, line, float(match[1])
                )
            if ("time" in low or "data_s" in low) and (match := _DATA_SHARE.search(line.text)):
                data = float(match[2] or match[3] or match[6])
                if match[1]:
                    total = float(match[1])
                else:
                    total = data + float(match[4] or match[5])
                if total:
                    self.data_shares.setdefault((line.file, line.rank), Track()).add(
                        order, line, data / total
                    )
                    self.data_totals.setdefault((line.file, line.rank), Track()).add(
                        order, line, total
                    )
            if ("time" in low or "sec/" in low or "s/it" in low) and (
                match := _STEP_SECONDS.search(line.text)
            ):
                if match[1]:
                    label = match[0].lower().partition(match[1])[0].strip(" =:'\"")
                else:
                    label = ""
                track = self.seconds.setdefault((line.file, line.rank, label), Track())
                track.add(order, line, float(match[1] or match[2]))
            elif (match := _DURATION.search(line.text)) and _STEP.search(line.text):
                track = self.seconds.setdefault(
                    (line.file, line.rank, f"{_SINCE}{match[1].lower()}"), Track()
                )
                track.add(order, line, float(match[2]))
            elif "/s" in low and (match := _RATE.search(line.text)) and float(match[1]):
                if match[2].lower() in ("it", "steps"):
                    unit = ""
                else:
                    unit = f"{_PER}{match[2].lower()}"
                self.seconds.setdefault((line.file, line.rank, unit), Track()).add(
                    order, line, 1 / float(match[1])
                )
            match = _MEASURED.search(low)
            if match and len(self.scales) < _MOST_SCALES and (match := _WORKERS.search(low)):
                workers = _NUMBERS.get(match[1]) or float(match[1])
                self.scales.append((order, line, workers, float(match[2])))
            dated = line.time and line.number < _MOST_POINTS
            # A separate evaluator follows the training at any distance.
            if dated and (match := _STEP.search(line.text)) and not _EVALUATION.search(line.text):
                self.moments[line.file, line.rank].setdefault(match[0].lower(), line)
            quoted = framed and line.number == framed + 1  # the frame's source line
            if quoted or len(self.severe) >= _MOST_SEVERE:
                skeleton = ""
            else:
                skeleton = line.text[:200].translate(_NO_DIGITS)
            if skeleton and skeleton not in self.severe and is_severe(line.text):
                self.severe[skeleton] = line
            if _FINISHED.search(line.text):
                self.finished = line
            yield line

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
        """Return the area of the code that raised an exception, such as "data" or "storage", or
        None if it is unknown.

        The area follows from the innermost stack frames before `line`.
        """
        frames = [
            place
            for number, rank, place in self.frames.get(line.file, ())
            if line.number - _TRACEBACK_LINES <= number <= line.number and rank == line.rank
            if "/multiprocessing/" not in place  # how processes talk does not tell what about
        ]
        for place in frames[: -_INNERMOST - 1 : -1]:
            for family in load_rules().families:
                if family.frames and re.search(family.frames, place):
                    return family.name
        return None

    def recovered(self, line: LogText | None) -> bool:
        """Return whether training recovered after the line.

        The same file must contain later losses or gradient norms, and all of these must be finite.
        """
        later = _values_after(line, self.losses) + _values_after(line, self.norms)
        return bool(later) and all(map(math.isfinite, later))

    def survived(self, line: LogText | None) -> bool:
        """Return whether training continued after the line: at least 3 finite losses follow it in
        the same file.
        """
        return sum(map(math.isfinite, _values_after(line, self.losses))) >= 3


def _values_after(
    line: LogText | None, tracks: Mapping[tuple[str, int | None, str], Track]
) -> list[float]:
    """Return the values that come after a line in the same file."""
    return [
        value
        for (file, *_), track in tracks.items()
        if line is not None and file == line.file
        for _, point, value in track.points
        if point.number > line.number
    ]


def judge_series(series: Series) -> dict[str, list[tuple[int, LogText]]]:
    """Return the symptoms that the series show: for each rule id, the (position, line) pairs that
    are its evidence.
    """
    found: dict[str, list[tuple[int, LogText]]] = {}
    for track in (*series.losses.values(), *series.norms.values()):
        bad = [point for point in track.points if not math.isfinite(point[2])]
        if bad and not math.isfinite(track.points[-1][2]):
            found.setdefault("F01", [(point[0], point[1]) for point in bad[:3]])
    for (_, _, name), track in series.losses.items():
        values = [point[2] for point in track.points if math.isfinite(point[2])]
        if len(values) < len(track.points):
            continue
        ends = [
            (track.points[0][0], track.points[0][1]),
            (track.points[-1][0], track.points[-1][1]),
        ]
        if (_stuck(track) and not name.startswith(("best", "min", "lowest"))) or abs(
            values[-1]
        ) > _DIVERGED:
            found.setdefault("F02", ends)
        if len(values) < 20:
            if (
                len(values) >= 4
                and values[-1] > values[-2] > values[-3]
                and values[-1] > 3 * min(values)
            ):
                found.setdefault("F02", ends)
            continue
        head = values[: len(values) // 5]
        tail = values[-(len(values) // 5) :]
        noise = statistics.pstdev(values[len(values) // 2 :]) + 1e-12
        start = statistics.median(head)
        end = statistics.median(tail)
        low = min(values)
        if end > 2 * abs(low) + 1e-9 and end > start * 1.2 and end - start > noise:
            found.setdefault("F02", ends)
    for (file, _, _), track in series.scores.items():
        values = [point[2] for point in track.points]
        # Other values may be those of a test at the end
        same = values.count(usual := statistics.mode(values))
        falls = _falls(series, file)
        if series.finished is not None or falls:
            continue  # the accuracy is of few examples, or at its best
        if falls is False or "train" in track.points[0][1].text.lower():
            least = 5
        else:
            least = 10
        if same >= least and same > 0.8 * len(values) and usual < 0.9:
            found.setdefault("F02", [(point[0], point[1]) for point in track.points[:3]])
    for track in series.norms.values():
        values = [point[2] for point in track.points if math.isfinite(point[2])]
        if len(values) >= 3 and not any(values[-3:]):
            found.setdefault("F05", [(point[0], point[1]) for point in track.points[-3:]])
        if (
            len(values) >= 4
            and max(values) > 1000
            and max(values) > 100 * statistics.median(values)
        ):
            found.setdefault(
                "F05",
                [(point[0], point[1]) for point in track.points if point[2] == max(values)][:1],
            )
    for key, track in series.data_shares.items():
        high = [point for point in track.points if point[2] > 0.5]
        totals = series.data_totals[key].points
        usual = statistics.median_low(point[2] for point in totals)
        # The first step of an epoch waits for the start of the workers.
        stalls = [
            each
            for each in totals[1:]
            if each[2] > _STALL * usual and not re.search(r"\b0+/\d", each[1].text)
        ]
        if len(totals) >= 4 and 2 * sum(point[2] for point in stalls) > sum(
            point[2] for point in totals[1:]
        ):
            found.setdefault("G11", [(point[0], point[1]) for point in stalls[:3]])
        elif len(high) >= 2 and 2 * len(high) >= len(track.points):
            found.setdefault("E06", [(point[0], point[1]) for point in high[:3]])
    for (_, _, label), track in series.seconds.items():
        values = [point[2] for point in track.points]
        half = len(values) // 2
        if label.startswith(_SINCE) and any(
            part == sorted(part) for part in (values[:half], values[half:])
        ):
            continue  # seconds since the start of the run or epoch
        if half >= 10:
            base = statistics.median(values[:half])
            tail = statistics.median(values[-len(values) // 4 :])
        elif label and len(values) >= (6 if label.startswith(_PER) else 3):
            # Rates without a label may be those of evaluation
            if len(values) >= 6:
                usual = statistics.median
            else:
                usual = min
            base = usual(values[: max(half, 1)])
            tail = usual(values[max(half, 1) :])
        elif len(values) >= 4 and values == sorted(values):
            base = values[0]
            tail = values[0]
        else:
            continue
        grows = (
            values == sorted(values)
            and values[-1] > (1.5 if label and not label.startswith(_PER) else 3) * values[0]
        )
        # Steps that stall again and again take most of the time
        quick = sorted(values)[len(values) // 4]
        stalls = [value for value in values[1:] if value > 5 * quick > 0]
        if not (len(stalls) >= 3 and 2 * sum(stalls) > sum(values[1:])):
            stalls = []
        if base > 0 and (tail > 2 * base or grows or stalls):
            at = next((point for point in track.points if point[2] > 1.4 * base), track.points[-1])
            found.setdefault("G02", [(at[0], at[1])])
    if len(series.scales) < _MOST_SCALES:
        scales = sorted(series.scales, key=lambda each: each[2])
    else:
        scales = []
    if scales and scales[-1][2] > scales[0][2] and scales[-1][3] < 0.8 * scales[0][3]:
        found.setdefault("G05", [(each[0], each[1]) for each in (scales[0], scales[-1])])
    if lines := _clocks_apart(series):
        found["A32"] = lines
    return found


def _falls(series: Series, file: str) -> bool | None:
    """Return whether some loss in the file falls by at least 5 %, or None if there are too few
    losses.
    """
    losses = (
        [point[2] for point in track.points]
        for (place, *_), track in series.losses.items()
        if place == file
    )
    halves = [
        (values[: len(values) // 2], values[len(values) // 2 :])
        for values in losses
        if len(values) >= 4
    ]
    if not halves:
        return None
    return any(
        statistics.median(later) < 0.95 * statistics.median(first) for first, later in halves
    )


def _clocks_apart(series: Series) -> list[tuple[int, LogText]]:
    """Return two lines of one step, if a rank or node stamps all steps seconds before or after the
    first one does.

    Ranks wait for each other in each step, so their times differ by less than a step, unless their
    clocks differ.
    """
    firsts: dict[
        tuple[str, ...], tuple[int | None, dict[str, LogText]]
    ] = {}  # the first rank of each attempt
    for (file, rank), other in series.moments.items():
        if len(other) < 5 or _EVALUATION.search(file.rpartition("/")[2]):
            continue
        first_rank, base = firsts.setdefault(tuple(_ATTEMPT.findall(file)), (rank, other))
        shared = [step for step in other if step in base]
        same_rank = rank is not None and rank == first_rank  # of two attempts
        if (
            base is other
            or same_rank
            or len(shared) < max(5, _SAME_STEPS * max(len(base), len(other)))
        ):
            continue
        times = [base[step].time or 0.0 for step in shared]
        gaps = [(other[step].time or 0.0) - time for step, time in zip(shared, times, strict=True)]
        # An attempt that repeats the steps of another one begins after the end of it.
        if _APART < abs(gap := statistics.median(gaps)) < max(times) - min(times):
            length = statistics.median(later - time for time, later in itertools.pairwise(times))
            if abs(gap) > 2 * length and max(abs(each - gap) for each in gaps) < max(1.0, length):
                first = base[shared[0]]
                second = other[shared[0]]
                if gap > 0:
                    side = "ahead of"
                else:
                    side = "behind"
                text = (
                    f"{second.text}  [clock {abs(gap):,.1f} s {side} the line above, in "
                    f"{len(gaps)} steps]"
                )
                return [(first.number, first), (second.number, replace(second, text=text))]
    return []


def _stuck(track: Track) -> bool:
    """Return whether the loss is stuck at one value other than 0.

    Either the last 4 losses are equal and have at least 4 decimals, or all of at least 20 losses
    are equal.
    """
    values = [point[2] for point in track.points]
    if values[-1] == 0 or len(values) < 4 or len(set(values[-4:])) > 1:
        return False
    last = [point[1] for point in track.points[-4:]]
    if last[-1].number - last[0].number == 3 and len({line.text for line in last}) == 1:
        return False  # each rank printed the same value
    return len(str(values[-1]).partition(".")[2]) >= 4 or (
        len(values) >= 20 and len(set(values)) == 1
    )

"""Symptoms that only a whole series of losses, step times or clocks shows."""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.series import (
    EVALUATION,
    MOST_SCALES,
    LogSource,
    Series,
    SeriesPoint,
    Timing,
    TimingKey,
    Track,
)

# Rule ids
_NON_FINITE = "F01"
_NOT_LEARNING = "F02"
_BAD_GRADIENTS = "F05"
_STALLED_DATA = "G11"
_SLOW_DATA = "E06"
_SLOW_STEPS = "G02"
_POOR_SCALING = "G05"
_CLOCKS_APART = "A32"

_EVIDENCE = 3  # most lines that show a symptom
_DIVERGED = 1e9  # magnitude of a loss that has diverged
_FEW_LOSSES = 20  # fewer are judged by the last ones alone
_STALL = 20  # a stalled step takes this many times the median
_APART = 2.0  # seconds between clocks that are worth a finding
_FEWEST_SHARED = 5  # steps that two ranks have in common, to compare their clocks
_SAME_STEPS = 0.9  # share of the steps that two ranks of one run have in common
_ATTEMPT = re.compile(r"(?:attempt|generation|retry|restart|try|run)[-_. ]?\d+", re.IGNORECASE)
_FIRST_STEP = re.compile(r"\b0+/\d")
_LOWEST_LOSS = ("best", "min", "lowest")  # begin the names of losses that may stay as they are

Evidence = list[tuple[int, LogText]]


def judge_series(series: Series) -> dict[str, Evidence]:
    """Find the symptoms that the series show.

    Return the evidence by rule id, as pairs (position, line).
    """
    symptoms = itertools.chain(
        _find_non_finite(series),
        _find_bad_losses(series),
        _find_flat_scores(series),
        _find_bad_norms(series),
        _find_slow_data(series),
        _find_slow_steps(series),
        _find_poor_scaling(series),
        _find_clocks_apart(series),
    )
    evidence: dict[str, Evidence] = {}
    for rule, points in symptoms:
        evidence.setdefault(rule, [(point.order, point.line) for point in points])
    return evidence


class _Symptom(NamedTuple):
    rule: str
    points: Sequence[SeriesPoint]


def _find_non_finite(series: Series) -> Iterator[_Symptom]:
    for track in (*series.losses.values(), *series.norms.values()):
        if not math.isfinite(track.points[-1].value):
            bad = [point for point in track.points if not math.isfinite(point.value)]
            yield _Symptom(_NON_FINITE, bad[:_EVIDENCE])


def _find_bad_losses(series: Series) -> Iterator[_Symptom]:
    for key, track in series.losses.items():
        values = track.values
        if not all(map(math.isfinite, values)):
            continue
        is_stuck = _is_stuck(track) and not key.name.startswith(_LOWEST_LOSS)
        if is_stuck or abs(values[-1]) > _DIVERGED or _rises(values):
            yield _Symptom(_NOT_LEARNING, [track.points[0], track.points[-1]])


def _find_flat_scores(series: Series) -> Iterator[_Symptom]:
    """Find accuracies that stay at one value while no loss falls."""
    if series.finished is not None:
        return
    for source, track in series.scores.items():
        falls = _falls(series, source.file)
        if falls:
            continue  # the accuracy is of few examples, or at its best
        # Other values may be those of a test at the end
        usual = statistics.mode(track.values)
        same = track.values.count(usual)
        is_of_training = "train" in track.points[0].line.text.lower()
        fewest = 5 if falls is False or is_of_training else 10
        if same >= fewest and same > 0.8 * len(track.points) and usual < 0.9:
            yield _Symptom(_NOT_LEARNING, track.points[:_EVIDENCE])


def _find_bad_norms(series: Series) -> Iterator[_Symptom]:
    """Find gradients that vanish or explode."""
    for track in series.norms.values():
        values = track.finite_values
        if len(values) >= 3 and not any(values[-3:]):
            yield _Symptom(_BAD_GRADIENTS, track.points[-3:])
        if len(values) < 4:
            continue
        highest = max(values)
        if highest > 1000 and highest > 100 * statistics.median(values):
            peaks = [point for point in track.points if point.value == highest]
            yield _Symptom(_BAD_GRADIENTS, peaks[:1])


def _find_slow_data(series: Series) -> Iterator[_Symptom]:
    """Find steps that wait for data.

    Either a few steps wait for very long, or at least half of them wait for most of their time.
    """
    for source, track in series.data_shares.items():
        totals = series.data_totals[source].points
        stalls = _stalls(totals)
        waiting = [point for point in track.points if point.value > 0.5]
        if len(totals) >= 4 and 2 * _sum(stalls) > _sum(totals[1:]):
            yield _Symptom(_STALLED_DATA, stalls[:_EVIDENCE])
        elif len(waiting) >= 2 and 2 * len(waiting) >= len(track.points):
            yield _Symptom(_SLOW_DATA, waiting[:_EVIDENCE])


def _find_slow_steps(series: Series) -> Iterator[_Symptom]:
    for key, track in series.seconds.items():
        if key.timing is Timing.ELAPSED and _counts_from_start(track.values):
            continue
        halves = _typical_halves(key, track.values)
        if halves is None:
            continue
        early, late = halves
        is_slower = late > 2 * early or _grows(key, track.values) or _stalls_often(track.values)
        if early > 0 and is_slower:
            slow = [point for point in track.points if point.value > 1.4 * early]
            yield _Symptom(_SLOW_STEPS, [*slow, track.points[-1]][:1])


def _find_poor_scaling(series: Series) -> Iterator[_Symptom]:
    """Find a throughput that falls although more GPUs or nodes are used."""
    if not 0 < len(series.scales) < MOST_SCALES:
        return
    scales = sorted(series.scales, key=lambda scale: scale.workers)
    fewest = scales[0]
    most = scales[-1]
    if most.workers > fewest.workers and most.rate < 0.8 * fewest.rate:
        points = [SeriesPoint(scale.order, scale.line, scale.rate) for scale in (fewest, most)]
        yield _Symptom(_POOR_SCALING, points)


def _find_clocks_apart(series: Series) -> Iterator[_Symptom]:
    """Find ranks or nodes whose clocks differ by seconds from that of the attempt's first log.

    Ranks wait for each other in each step, so their times differ by less than a step, unless their
    clocks differ.
    """
    first_by_attempt: dict[tuple[str, ...], LogSource] = {}
    for source, moments in series.moments.items():
        name = source.file.rpartition("/")[2]
        if len(moments) < _FEWEST_SHARED or EVALUATION.search(name):
            continue
        attempt = tuple(_ATTEMPT.findall(source.file))
        first = first_by_attempt.setdefault(attempt, source)
        is_same_rank = source.rank is not None and source.rank == first.rank  # of two attempts
        if first == source or is_same_rank:
            continue
        points = _compare_clocks(series.moments[first], moments)
        if points:
            yield _Symptom(_CLOCKS_APART, points)


def _rises(values: list[float]) -> bool:
    """Return whether the losses at the end are clearly higher than at the start."""
    if len(values) < _FEW_LOSSES:
        if len(values) < 4:
            return False
        return values[-1] > values[-2] > values[-3] and values[-1] > 3 * min(values)
    fifth = len(values) // 5
    start = statistics.median(values[:fifth])
    end = statistics.median(values[-fifth:])
    noise = statistics.pstdev(values[len(values) // 2 :]) + 1e-12
    is_high = end > 2 * abs(min(values)) + 1e-9
    return is_high and end > start * 1.2 and end - start > noise


def _is_stuck(track: Track) -> bool:
    """Return whether the loss is stuck at one value other than 0.

    Either the last 4 losses are equal and have at least 4 decimals, or all of at least 20 losses
    are equal.
    """
    values = track.values
    last = values[-1]
    if last == 0 or len(values) < 4 or len(set(values[-4:])) > 1:
        return False
    lines = [point.line for point in track.points[-4:]]
    are_adjacent = lines[-1].number - lines[0].number == 3
    if are_adjacent and len({line.text for line in lines}) == 1:
        return False  # each rank printed the same value
    decimals = str(last).partition(".")[2]
    return len(decimals) >= 4 or (len(values) >= _FEW_LOSSES and len(set(values)) == 1)


def _falls(series: Series, file: str) -> bool | None:
    """Return whether a loss in the file falls by more than 5 %; None if the losses are too few."""
    falls = None
    for key, track in series.losses.items():
        values = track.values
        if key.file != file or len(values) < 4:
            continue
        half = len(values) // 2
        falls = falls or statistics.median(values[half:]) < 0.95 * statistics.median(values[:half])
    return falls


def _stalls(totals: Sequence[SeriesPoint]) -> list[SeriesPoint]:
    """Return the steps that take many times longer than the median step.

    The first step of an epoch does not count, since it waits for the start of the workers.
    """
    usual = statistics.median_low(point.value for point in totals)
    stalls = []
    for point in totals[1:]:
        if point.value > _STALL * usual and not _FIRST_STEP.search(point.line.text):
            stalls.append(point)
    return stalls


def _sum(points: Iterable[SeriesPoint]) -> float:
    return sum(point.value for point in points)


def _counts_from_start(values: list[float]) -> bool:
    """Return whether seconds count from the start of the run or epoch, not of each step."""
    half = len(values) // 2
    early = values[:half]
    late = values[half:]
    return early == sorted(early) or late == sorted(late)


def _typical_halves(key: TimingKey, values: list[float]) -> tuple[float, float] | None:
    """Return the typical seconds of a step early and late in a series; None if it is too short.

    A short series without a label may come from evaluation, and is judged only if it grows.
    """
    half = len(values) // 2
    if half >= 10:
        # A quarter, rounded up
        last_quarter = values[-len(values) // 4 :]
        return statistics.median(values[:half]), statistics.median(last_quarter)
    fewest = 6 if key.timing is Timing.PER_UNIT else 3
    if key.timing is not Timing.PLAIN and len(values) >= fewest:
        typical = statistics.median if len(values) >= 6 else min
        return typical(values[:half]), typical(values[half:])
    if len(values) >= 4 and values == sorted(values):
        return values[0], values[0]
    return None


def _grows(key: TimingKey, values: list[float]) -> bool:
    """Return whether each step takes longer than the one before it, and the last one far longer."""
    is_precise = key.timing in (Timing.LABELLED, Timing.ELAPSED)
    factor = 1.5 if is_precise else 3
    return values == sorted(values) and values[-1] > factor * values[0]


def _stalls_often(values: list[float]) -> bool:
    """Return whether steps that stall again and again take most of the time."""
    quick = sorted(values)[len(values) // 4]
    stalls = [seconds for seconds in values[1:] if seconds > 5 * quick > 0]
    return len(stalls) >= 3 and 2 * sum(stalls) > sum(values[1:])


def _compare_clocks(first: dict[str, LogText], other: dict[str, LogText]) -> list[SeriesPoint]:
    """Compare the clocks of two ranks by the times of their common steps.

    Return the two lines of one step if the clocks differ, else an empty list.
    """
    shared = [step for step in other if step in first]
    if len(shared) < max(_FEWEST_SHARED, _SAME_STEPS * max(len(first), len(other))):
        return []
    times = [first[step].time or 0.0 for step in shared]
    gaps = [(other[step].time or 0.0) - time for step, time in zip(shared, times, strict=True)]
    gap = statistics.median(gaps)
    # An attempt that repeats the steps of another one begins after the end of it
    if not _APART < abs(gap) < max(times) - min(times):
        return []
    length = statistics.median(later - time for time, later in itertools.pairwise(times))
    spread = max(abs(step_gap - gap) for step_gap in gaps)
    if abs(gap) <= 2 * length or spread >= max(1.0, length):
        return []
    line = first[shared[0]]
    other_line = other[shared[0]]
    side = "ahead of" if gap > 0 else "behind"
    note = f"[clock {abs(gap):,.1f} s {side} the line above, in {len(gaps)} steps]"
    noted = replace(other_line, text=f"{other_line.text}  {note}")
    return [SeriesPoint(line.number, line, gap), SeriesPoint(noted.number, noted, gap)]

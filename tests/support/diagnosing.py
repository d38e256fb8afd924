"""Diagnose the lines of an excerpt without a file."""

from __future__ import annotations

from collections.abc import Iterable

from ebbflow.diagnose.judging import Diagnosis, judge
from ebbflow.diagnose.matching import Seen, load_matcher
from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.series import Series


def diagnose_lines(lines: Iterable[LogText]) -> Diagnosis:
    """Diagnose the lines of an excerpt."""
    seen: dict[str, Seen] = {}
    series = Series()
    load_matcher().collect(series.watch(lines), seen)
    return judge(seen, series, [])

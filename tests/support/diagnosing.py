"""Diagnose the lines of an excerpt without a file."""

from __future__ import annotations

from collections.abc import Iterable

from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.judging import Diagnosis, judge
from ebbflow.diagnose.reading import LogText


def diagnose_lines(lines: Iterable[LogText]) -> Diagnosis:
    """Diagnose the lines of an excerpt."""
    evidence = Evidence()
    evidence.read(lines)
    return judge(evidence)

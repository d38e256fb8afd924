"""Findings as figures: medians, 95th percentiles and worst cases, by kind and of all."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.training.survival.judge import Finding
from benchmarks.training.tables import table


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, p95 (the smallest value that 95 % do not exceed) and worst; None where there is no
    value.
    """
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    median, p95 = (known[max(0, math.ceil(part * len(known)) - 1)] for part in (0.5, 0.95))
    return {"median": median, "p95": p95, "worst": known[-1], "count": len(known)}


def share(values: Iterable[bool | None]) -> dict[str, int] | None:
    known = [value for value in values if value is not None]
    if known:
        return {"right": sum(known), "of": len(known)}
    return None


def survival_figures(findings: Sequence[Finding]) -> dict[str, Any]:
    """Summarise the findings by kind and of all; every finding is included as it is."""
    kinds: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        kinds[finding.kind].append(finding)
    return {
        "injections": len(findings),
        "all": _summary(findings),
        "kinds": {kind: _summary(kinds[kind]) for kind in sorted(kinds)},
        "findings": [finding.to_json() for finding in findings],
    }


def survival_text(figures: dict[str, Any]) -> str:
    """Render the table, at most 100 columns wide."""
    heads = ["kind", "n", "verdict s", "p95", "worst", "guilty", "place", "reason"]
    heads += ["back s", "worst", "false"]
    rows = [_row(kind, summary) for kind, summary in figures["kinds"].items()]
    return table(heads, [*rows, _row("all", figures["all"])], text_columns=1)


def _summary(findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "injections": len(findings),
        "verdict_seconds": spread(
            finding.verdict_seconds for finding in findings if finding.guilty is not None
        ),
        "back_seconds": spread(finding.back_seconds for finding in findings),
        "caught_up_seconds": spread(finding.caught_up_seconds for finding in findings),
        "guilty": share(finding.guilty for finding in findings),
        "place": share(finding.place for finding in findings),
        "reason": share(finding.reason for finding in findings),
        "in_time": share(finding.in_time for finding in findings),
        "false_kills": sum(finding.false_kill for finding in findings),
        "overdue": sum(finding.overdue for finding in findings),
    }


def _row(kind: str, summary: dict[str, Any]) -> tuple[str, ...]:
    verdict = summary["verdict_seconds"]
    back = summary["back_seconds"]
    return (
        kind,
        str(summary["injections"]),
        *(_seconds(verdict, key) for key in ("median", "p95", "worst")),
        *(_right(summary[key]) for key in ("guilty", "place", "reason")),
        *(_seconds(back, key) for key in ("median", "worst")),
        str(summary["false_kills"]),
    )


def _seconds(times: dict[str, float] | None, key: str) -> str:
    if times is None:
        return ""
    return f"{times[key]:.1f}"


def _right(counts: dict[str, int] | None) -> str:
    if counts is None:
        return ""
    return f"{counts['right']}/{counts['of']}"

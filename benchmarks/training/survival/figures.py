"""Findings as figures: medians, 95th percentiles and worst cases, by kind and of all."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.training.survival.judge import Finding


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
    """`kinds` by name and `all`, each with the same entries; and every finding as it is."""
    kinds: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        kinds[finding.kind].append(finding)
    return {
        "injections": len(findings),
        "all": _summary(findings),
        "kinds": {kind: _summary(found) for kind, found in sorted(kinds.items())},
        "findings": [finding.to_json() for finding in findings],
    }


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


def survival_text(figures: dict[str, Any]) -> str:
    """The table, at most 100 columns wide."""
    head = (
        "kind",
        "n",
        "verdict s",
        "p95",
        "worst",
        "guilty",
        "place",
        "reason",
        "back s",
        "worst",
        "false",
    )
    rows = [_row(kind, found) for kind, found in figures["kinds"].items()] + [
        _row("all", figures["all"])
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(row, widths) for row in (head, rule, *rows))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return "  ".join((row[0].ljust(widths[0]), *numbers))


def _row(kind: str, found: dict[str, Any]) -> tuple[str, ...]:
    verdict = found["verdict_seconds"]
    back = found["back_seconds"]
    return (
        kind,
        str(found["injections"]),
        *(_seconds(verdict, key) for key in ("median", "p95", "worst")),
        *(_right(found[key]) for key in ("guilty", "place", "reason")),
        *(_seconds(back, key) for key in ("median", "worst")),
        str(found["false_kills"]),
    )


def _seconds(found: dict[str, float] | None, key: str) -> str:
    if found is None:
        return ""
    return f"{found[key]:.1f}"


def _right(found: dict[str, int] | None) -> str:
    if found is None:
        return ""
    return f"{found['right']}/{found['of']}"

"""Preflight: everything that can be known to be wrong before anything is paid for, checked at once.

Each room keeps its checks beside what they check, as `CHECKS` in its `checks.py`. They run in parallel, each within its
deadline; one that hangs or raises is reported and holds up nobody. Results are plain data, in the order of the checks.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ebbflow.infra.config.schema import RunConfig

Severity = Literal["error", "warning"]  # of a check that fails: does it stop the job?
Target = Literal["local", "batch", "kubernetes"]  # where the steps of a run are sent
Tier = Literal["quick", "full"]  # quick: pure or local, well under a second, imports no torch
Status = Literal["passed", "failed", "warning", "skipped"]

_MARKS: dict[Status, str] = {"passed": "ok", "failed": "FAIL", "warning": "warn", "skipped": "skip"}


@dataclass(frozen=True, kw_only=True)
class PreflightContext:
    """What the checks look at. config_path: None when the configuration was not read from a file. job: its name, where
    it has been given one: there may be something of it in the store already. target: where the run is sent; None when
    nobody has said, and the configuration is to be judged for where it could go.
    """

    config: RunConfig
    project_root: Path
    config_path: Path | None = None
    job: str | None = None
    target: Target | None = None


@dataclass(frozen=True)
class CheckFinding:
    """What a check found. Made by `passed`, `failed` or `skipped`."""

    status: Literal["passed", "failed", "skipped"]
    detail: str
    fix: str | None = None

    @classmethod
    def passed(cls, detail: str) -> CheckFinding:
        return cls("passed", detail)

    @classmethod
    def failed(cls, detail: str, fix: str) -> CheckFinding:
        return cls("failed", detail, fix)

    @classmethod
    def skipped(cls, reason: str) -> CheckFinding:
        """The check could not be made. reason goes on from "skipped, because "."""
        return cls("skipped", f"skipped, because {reason}")


@dataclass(frozen=True)
class Check:
    """One check. symptoms: the ids of the troubles that it catches, from the table of known symptoms."""

    id: str
    title: str
    severity: Severity
    tier: Tier
    deadline_seconds: float
    symptoms: tuple[str, ...]
    run: Callable[[PreflightContext], CheckFinding]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What became of one check. seconds: how long it took, or was waited for."""

    id: str
    title: str
    severity: Severity
    tier: Tier
    symptoms: tuple[str, ...]
    status: Status
    detail: str
    fix: str | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"symptoms": list(self.symptoms)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CheckResult:
        return cls(**(data | {"symptoms": tuple(data["symptoms"])}))


def run_checks(checks: Sequence[Check], context: PreflightContext, *, quick_only: bool = False) -> list[CheckResult]:
    """Run the checks side by side and return their results in the order of the checks.

    Takes no longer than the longest deadline. The threads are daemons: a check that never returns keeps no process
    from ending. quick_only leaves out the full tier. Raises ValueError when two checks share an id.
    """
    ids = [check.id for check in checks]
    if len(set(ids)) != len(ids):
        raise ValueError(f"two checks share an id: {sorted({name for name in ids if ids.count(name) > 1})}")
    running = [_Running(check, context) for check in checks if not quick_only or check.tier == "quick"]
    return [one.result() for one in running]


def failed_results(results: Sequence[CheckResult]) -> list[CheckResult]:
    """The results that forbid the run: warnings and skips do not."""
    return [result for result in results if result.status == "failed"]


def render_results(results: Sequence[CheckResult]) -> str:
    """One line for each check with the fix under those that need one, and a line that counts."""
    width = max((len(result.id) for result in results), default=0)
    lines = [line for result in results for line in _lines(result, width)]
    return "\n".join([*lines, _summary(results)])


def render_checks(checks: Sequence[Check]) -> str:
    """What is checked, as a table in Markdown: the one of docs/preflight.md."""
    rows = [
        f"| `{check.id}` | {_purpose(check)} | {check.severity} | {check.tier} | {check.deadline_seconds:g} s "
        f"| {', '.join(check.symptoms)} |"
        for check in checks
    ]
    return "\n".join(
        ["| check | what it makes sure of | fails as | tier | deadline | catches |", "|---" * 6 + "|", *rows]
    )


def _purpose(check: Check) -> str:
    """The first paragraph of the docstring beside the check."""
    paragraph = (check.run.__doc__ or check.title).strip().split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


class _Running:
    """A check in a thread of its own."""

    def __init__(self, check: Check, context: PreflightContext) -> None:
        self._check = check
        self._context = context
        self._answer: tuple[CheckFinding, float] | None = None
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"check {check.id}", daemon=True)
        self._thread.start()

    def result(self) -> CheckResult:
        check = self._check
        self._thread.join(max(0.0, self._started + check.deadline_seconds - time.monotonic()))
        answer = self._answer  # read once: a late answer must not come between the two uses
        finding, seconds = answer or (_no_answer(check), time.monotonic() - self._started)
        warns = finding.status == "failed" and check.severity == "warning"
        return CheckResult(
            id=check.id,
            title=check.title,
            severity=check.severity,
            tier=check.tier,
            symptoms=check.symptoms,
            status="warning" if warns else finding.status,
            detail=finding.detail,
            fix=finding.fix,
            seconds=round(seconds, 3),
        )

    def _run(self) -> None:
        try:
            finding = self._check.run(self._context)
        except BaseException as error:  # even SystemExit: a check that leaves has not passed
            finding = _raised(error)
        self._answer = (finding, time.monotonic() - self._started)


def _no_answer(check: Check) -> CheckFinding:
    return CheckFinding.failed(
        f"did not answer within {check.deadline_seconds:g} s",
        "see whether a disk, network or name server that it asks is hanging, then run the preflight again",
    )


def _raised(error: BaseException) -> CheckFinding:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split()) or "no text"
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return CheckFinding.failed(
        f"the check itself raised {type(error).__name__}: {text}", f"see {where}, in {frame.name}"
    )


def _lines(result: CheckResult, width: int) -> list[str]:
    first, *rest = result.detail.splitlines() or [""]
    margin = " " * (6 + width + 2)
    lines = [f"{_MARKS[result.status]:<4}  {result.id:<{width}}  {first}".rstrip()]
    lines += [margin + line for line in rest]
    if result.fix:
        first, *rest = result.fix.splitlines()
        lines.append(f"{margin}fix: {first}")
        lines += [f"{margin}     {line}" for line in rest]
    return lines


def _summary(results: Sequence[CheckResult]) -> str:
    names: dict[Status, str] = {"passed": "passed", "failed": "failed", "warning": "warned", "skipped": "skipped"}
    counts = {name: sum(result.status == status for result in results) for status, name in names.items()}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"preflight: {said or 'no checks'}"

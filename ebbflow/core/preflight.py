"""Preflight: checks that run in parallel before anything is paid for, and their rendered results.

The packages infra, cost, training and flows each list their own checks in CHECKS. A check that
reaches its deadline or raises is reported as failed, and does not delay other checks.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.json_values import JsonObject

Severity = Literal["error", "warning"]  # effect of a failed check: error stops the job
Target = Literal["local", "batch", "kubernetes", "slurm"]  # where a run's steps are sent
Tier = Literal["quick", "full"]  # quick: local, well under a second, imports no torch
Status = Literal["passed", "failed", "warning", "skipped"]

# Troubles that checks name in `symptoms`; docs/preflight-checks.md lists them.
TROUBLES = {
    "A01": "a module of the project cannot be imported",
    "A02": "a package is missing, or could not be built",
    "A03": "a package's version does not go with the rest",
    "A04": 'CUDA, driver and GPU do not go together ("no kernel image")',
    "A05": "a configuration that contradicts itself",
    "A06": "a batch that the ranks do not divide, also after the gang has shrunk",
    "A07": "a quantity that rounds to zero",
    "A08": "too little data for the number of ranks",
    "A10": "a port is taken",
    "A11": "a port is closed, or behind a firewall",
    "A13": "a host name that does not resolve",
    "A14": "the wrong network interface",
    "A15": "a hang while the ranks meet",
    "A18": "a path that is not there, or not for every node",
    "A19": "a right on the store or the account is missing",
    "B01": "a GPU that is not seen",
    "B09": "processor cores are the bottleneck",
    "B10": "the kernel kills a process for memory",
    "C01": "out of memory in the first steps",
    "C09": "/dev/shm is too small",
    "C10": "memory that may not be locked",
    "D01": "a collective that times out after a long silence",
    "D12": "a rank is killed by a signal",
    "D14": "tensors on different devices",
    "D15": "processes or jobs that outlive the run",
    "E08": "too few open files",
    "E09": "missing or damaged data",
    "F06": "mixed precision is unstable",
    "H02": "a checkpoint, or a part of it, is missing",
    "H04": "names of parameters that do not match",
    "H10": "the disk is full",
    "H11": "a quota is exceeded",
    "I01": "a spot interruption notice",
    "I04": "no capacity that will do",
    "I05": "the budget would be exceeded",
    "I09": "prices that are stale, or cannot be had",
}
# A check that computes may take so many times its deadline, since a busy machine is no fault
_BUSY_FACTOR = 12
# It computes if it uses this share of a core over the time of one look
_COMPUTING_SHARE = 0.005
_WINDOW_SECONDS = 1.0
_MARKS: dict[Status, str] = {"passed": "ok", "failed": "FAIL", "warning": "warn", "skipped": "skip"}


@dataclass(frozen=True, kw_only=True)
class PreflightContext:
    """Information about a run that is passed to every check."""

    config: RunConfig  # the job's configuration
    project_root: Path  # folder of the project
    config_path: Path | None = None  # the configuration's file; None: it was not read from a file
    job: str | None = None  # the job's name, if it has one; the store may then have objects of it
    # Where the run is sent; None: check all that the configuration allows
    target: Target | None = None


@dataclass(frozen=True)
class CheckFinding:
    """Result that a check returns: its status, the details, and how to repair a failure."""

    status: Literal["passed", "failed", "skipped"]  # passed, failed or skipped
    detail: str  # what the check found
    fix: str | None = None  # how to repair it; None: there is nothing to repair

    @classmethod
    def passed(cls, detail: str) -> CheckFinding:
        return cls("passed", detail)

    @classmethod
    def failed(cls, detail: str, fix: str) -> CheckFinding:
        return cls("failed", detail, fix)

    @classmethod
    def skipped(cls, reason: str) -> CheckFinding:
        """Return the finding of a check that could not run.

        `reason` completes "skipped, because …".
        """
        return cls("skipped", f"skipped, because {reason}")


passed = CheckFinding.passed
failed = CheckFinding.failed
skipped = CheckFinding.skipped


@dataclass(frozen=True)
class Check:
    """A preflight check: its function, deadline, severity and title."""

    id: str  # name of the check in reports
    title: str  # short description
    severity: Severity  # effect of a failure
    tier: Tier  # quick or full
    deadline_seconds: float  # time after which the check counts as failed
    # Ids of the troubles (`TROUBLES`) that the check detects, such as A05
    symptoms: tuple[str, ...]
    run: Callable[[PreflightContext], CheckFinding]  # the check's function


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The finding of a check, together with the check's id, title, severity and tier.

    A failed check of severity "warning" has the status "warning".
    """

    id: str
    title: str
    severity: Severity
    tier: Tier
    symptoms: tuple[str, ...]
    status: Status
    detail: str
    fix: str | None
    seconds: float

    def to_json(self) -> JsonObject:
        return {**asdict(self), "symptoms": list(self.symptoms)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CheckResult:
        fields = {**data, "symptoms": tuple(data["symptoms"])}
        return cls(**fields)


def run_checks(
    checks: Sequence[Check], context: PreflightContext, *, quick_only: bool = False
) -> list[CheckResult]:
    """Run the checks in parallel, and return one result for each, in the same order.

    With `quick_only`, checks of the full tier are left out. The call takes no longer than the
    longest deadline, unless a check still computes then, as on a busy machine: at most
    `_BUSY_FACTOR` times as long. Checks run in daemon threads, so that a check that never returns
    does not keep the process from exiting. Raises ValueError if two checks share an id.
    """
    ids = [check.id for check in checks]
    if len(set(ids)) != len(ids):
        raise ValueError(
            f"two checks share an id: {sorted({name for name in ids if ids.count(name) > 1})}"
        )
    running = [
        _Running(check, context) for check in checks if not quick_only or check.tier == "quick"
    ]
    _wait_for(running)
    return [check.result() for check in running]


def failed_results(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the results that forbid the run: failures, without warnings and skipped checks."""
    return [result for result in results if result.status == "failed"]


def render_results(results: Sequence[CheckResult]) -> str:
    """Render one line per check, fixes below failed checks, and a last line with the counts."""
    width = max((len(result.id) for result in results), default=0)
    lines = []
    for result in results:
        lines += _lines(result, width)
    lines.append(_summary(results))
    return "\n".join(lines)


def render_checks(checks: Sequence[Check]) -> str:
    """Render the checks as the table in docs/preflight-checks.md."""
    rows = [
        "| check | what it makes sure of | fails as | tier | deadline | catches |",
        "|---" * 6 + "|",
    ]
    for check in checks:
        purpose = " ".join(
            (check.run.__doc__ or check.title).strip().split("\n\n")[0].split()
        ).replace("|", "\\|")
        cells = (
            purpose,
            check.severity,
            check.tier,
            f"{check.deadline_seconds:g} s",
            ", ".join(check.symptoms),
        )
        rows.append(f"| `{check.id}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _wait_for(running: Sequence[_Running]) -> None:
    """Wait for the answers of all checks, or until their deadlines.

    A check that uses the processor after its deadline is given more time.
    """
    waiting = list(running)
    while waiting:
        # All checks of one window share it, so that those that hang do not add up
        end = time.monotonic() + _WINDOW_SECONDS
        for check in waiting:
            window_left = end - time.monotonic()
            deadline_left = check.seconds_left()
            if deadline_left > 0:
                window_left = min(window_left, deadline_left)
            check.join(max(0.0, window_left))
        waiting = [check for check in waiting if check.is_awaited()]


class _Running:
    def __init__(self, check: Check, context: PreflightContext) -> None:
        self._check = check
        self._context = context
        self._answer: tuple[CheckFinding, float] | None = None
        self._cpu_clock: int | None = None  # of the check's thread
        self._is_computing = False
        self._computed = 0.0
        self._looked = time.monotonic()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"check {check.id}", daemon=True)
        self._thread.start()

    def result(self) -> CheckResult:
        check = self._check
        answer = self._answer  # read once: a late answer could come between two reads
        finding, seconds = answer or (self._late(), time.monotonic() - self._started)
        if finding.status == "failed" and check.severity == "warning":
            status = "warning"
        else:
            status = finding.status
        known = {
            name: getattr(check, name) for name in ("id", "title", "severity", "tier", "symptoms")
        }
        return CheckResult(
            **known,
            status=status,
            detail=finding.detail,
            fix=finding.fix,
            seconds=round(seconds, 3),
        )

    def is_awaited(self) -> bool:
        """Return whether to keep waiting for the check's answer.

        That is so before the deadline and, up to `_BUSY_FACTOR` times as long, while the check
        computes.
        """
        if not self._thread.is_alive():
            return False
        now = time.monotonic()
        computed = self._cpu_seconds()
        share = (computed - self._computed) / max(now - self._looked, _WINDOW_SECONDS)
        self._is_computing = share >= _COMPUTING_SHARE
        self._computed = computed
        self._looked = now
        lasted = now - self._started
        deadline = self._check.deadline_seconds
        return lasted < deadline or (self._is_computing and lasted < _BUSY_FACTOR * deadline)

    def seconds_left(self) -> float:
        """Return the time until the deadline; negative after it."""
        return self._started + self._check.deadline_seconds - time.monotonic()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _cpu_seconds(self) -> float:
        """Return the processor time of the check's thread; 0 before its start and after its end."""
        if self._cpu_clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:  # the thread has ended
            return 0.0

    def _late(self) -> CheckFinding:
        deadline = self._check.deadline_seconds
        if self._is_computing:
            load = os.getloadavg()[0]
            return failed(
                f"still computes after {_BUSY_FACTOR * deadline:g} s, at a load of {load:.0f} on "
                f"{os.cpu_count()} cores",
                "run the preflight again when the machine is less busy",
            )
        return failed(
            f"did not answer within {deadline:g} s",
            "see whether a disk, network or name server that it asks is hanging, then run the "
            "preflight again",
        )

    def _run(self) -> None:
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            finding = self._check.run(self._context)
        except BaseException as error:  # even SystemExit: a check that exits has not passed
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split()) or "no text"
            where = f"see {Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
            finding = failed(f"the check itself raised {type(error).__name__}: {text}", where)
        self._answer = (finding, time.monotonic() - self._started)


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
    names: dict[Status, str] = {
        "passed": "passed",
        "failed": "failed",
        "warning": "warned",
        "skipped": "skipped",
    }
    counts = Counter(result.status for result in results)
    parts = [f"{counts[status]} {name}" for status, name in names.items() if counts[status]]
    return f"preflight: {', '.join(parts) or 'no checks'}"

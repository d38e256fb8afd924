"""How a job can end, and the process exit code that says so."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The end of a job. The exit codes are part of the public contract and never change meaning."""

    COMPLETED = "completed"
    FAILED = "failed"
    CONFIG = "config"
    PREFLIGHT = "preflight"
    BUDGET = "budget"
    NO_CAPACITY = "no_capacity"
    CRASH_LOOP = "crash_loop"
    NON_FINITE = "non_finite"
    DEADLINE = "deadline"
    NO_RESTORE = "no_restore"
    ROLLED_BACK = "rolled_back"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Outcome.COMPLETED: 0,
    Outcome.FAILED: 1,
    Outcome.CONFIG: 2,
    Outcome.PREFLIGHT: 3,
    Outcome.BUDGET: 4,
    Outcome.NO_CAPACITY: 5,
    Outcome.CRASH_LOOP: 6,
    Outcome.NON_FINITE: 7,
    Outcome.DEADLINE: 8,
    Outcome.NO_RESTORE: 9,
    Outcome.ROLLED_BACK: 10,
    Outcome.INTERRUPTED: 75,  # EX_TEMPFAIL: run the same job again
}

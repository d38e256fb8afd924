"""Exceptions of the cost package. Each class determines the outcome and exit code of a job that it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ebbflow.infra.errors import InfraError, Outcome, describe_error
from ebbflow.infra.process import silence_stdout


class CostError(Exception):
    """Base class of all errors of the cost package. If such an error ends a job, the job's outcome is `outcome`."""

    outcome = Outcome.FAILED

    def __init_subclass__(cls, *, outcome: Outcome | None = None) -> None:
        cls.outcome = outcome or cls.outcome


class CatalogueError(CostError, outcome=Outcome.CONFIG):
    """A table of prices or GPUs has an invalid line. The message has file:line:column, value and expected form."""


class PlanError(CostError):
    """No pool is suitable, or a stored plan cannot be used."""


class PlacementError(CostError):
    """The next attempt cannot be placed: budget or deadline would be exceeded, or no queue can run it."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class LedgerError(CostError):
    """The events contradict each other or have an invalid value, so no ledger can be computed."""


class ReportError(CostError, outcome=Outcome.CONFIG):
    """A report cannot be made or read. The message has the reason, such as the places searched for the job's events."""


class PriceError(CostError, outcome=Outcome.CONFIG):
    """A file of recorded prices is unreadable or has an invalid price. The message has file:line or the record."""


class BillError(CostError, outcome=Outcome.CONFIG):
    """A Cost and Usage Report is unreadable or inconsistent. The message has file:line and the column."""


class TeamError(CostError, outcome=Outcome.CONFIG):
    """A team's budget file (team.yaml) is unreadable or has an invalid value. The message has file:line and the key."""


class ReplayError(CostError, outcome=Outcome.CONFIG):
    """A run cannot be replayed: the pool has no recorded price, or the run completed no step."""


def run_command(command: Callable[[], int]) -> int:
    """Run a command of the command line and return its exit code. An expected error becomes one line on stderr."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except (CostError, InfraError) as error:
        print(describe_error(error), file=sys.stderr)
        return error.outcome.exit_code
    except BrokenPipeError:
        return silence_stdout()

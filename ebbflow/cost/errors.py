"""Exceptions of the cost package.

Each class determines the outcome and exit code of a job that it ends.
"""

from ebbflow.core.errors import EbbflowError, Outcome


class CostError(EbbflowError):
    """Base class of all errors of the cost package."""


class CatalogueError(CostError, outcome=Outcome.CONFIG):
    """A table of prices or GPUs has an invalid line.

    The message has file:line:column, value and expected form.
    """


class PlanError(CostError):
    """No pool is suitable, or a stored plan cannot be used."""


class PlacementError(CostError):
    """The next attempt cannot be placed: budget or deadline would be exceeded, or no queue can run
    it.
    """

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class LedgerError(CostError):
    """The events contradict each other or have an invalid value, so no ledger can be computed."""


class ReportError(CostError, outcome=Outcome.CONFIG):
    """A report cannot be made or read.

    The message has the reason, such as the places searched for the job's events.
    """


class PriceError(CostError, outcome=Outcome.CONFIG):
    """A file of recorded prices is unreadable or has an invalid price.

    The message has file:line or the record.
    """


class BillError(CostError, outcome=Outcome.CONFIG):
    """A Cost and Usage Report is unreadable or inconsistent.

    The message has file:line and the column.
    """


class TeamError(CostError, outcome=Outcome.CONFIG):
    """A team's budget file (team.yaml) is unreadable or has an invalid value.

    The message has file:line and the key.
    """


class ReplayError(CostError, outcome=Outcome.CONFIG):
    """A run cannot be replayed: the pool has no recorded price, or the run completed no step."""

"""The exceptions of the money. Each maps to an outcome of the public contract."""

from __future__ import annotations

from ebbflow.infra.errors import Outcome


class CostError(Exception):
    """Anything `cost` could not do. `outcome` says how a job that dies of it ends."""

    outcome = Outcome.FAILED


class CatalogueError(CostError):
    """A line of a price or GPU table that cannot be right. Names file:line:column, the value and what is expected."""

    outcome = Outcome.CONFIG


class PlanError(CostError):
    """A plan was asked for something it does not have, such as the terms of a refused plan."""


class PlacementError(CostError):
    """The next attempt has no place: budget or deadline no longer bear the rest, or no queue can run it."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class LedgerError(CostError):
    """The events contradict each other, so that no honest ledger can be made. Names the rank and the classes."""


class ReportError(CostError):
    """There is nothing to report on, or not where it was looked for. Names the places."""

    outcome = Outcome.CONFIG


class PriceError(CostError):
    """A file of recorded prices that cannot be read or holds what cannot be a price. Names file:line or record."""

    outcome = Outcome.CONFIG


class TraceError(CostError):
    """A trace of availability or prices that cannot be read, or in two ways. Names the file and the key."""

    outcome = Outcome.CONFIG


class SimulationError(CostError):
    """A simulation was asked for what is not there: an unknown policy or zone, a job longer than its trace."""

    outcome = Outcome.CONFIG


class BillError(CostError):
    """A Cost and Usage Report that cannot be read, or not be joined with a job. Names file:line and column."""

    outcome = Outcome.CONFIG


class ReplayError(CostError):
    """A finished run cannot be replayed as asked: a pool without a recorded price, or a run that took no step."""

    outcome = Outcome.CONFIG

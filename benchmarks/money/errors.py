"""Exceptions of the simulator of spot markets."""

from __future__ import annotations

from ebbflow.core.errors import Outcome
from ebbflow.cost.errors import CostError


class TraceError(CostError, outcome=Outcome.CONFIG):
    """A trace of availability or prices is unreadable or ambiguous.

    The message has the file and the JSON key.
    """


class SimulationError(CostError, outcome=Outcome.CONFIG):
    """A simulation names an unknown policy or zone, or its job is longer than its trace."""

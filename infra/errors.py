"""The exceptions of the ground. Each maps to an outcome of the public contract."""

from __future__ import annotations

from infra.outcome import Outcome


class InfraError(Exception):
    """Anything the ground could not do. `outcome` says how a job that dies of it ends."""

    outcome = Outcome.FAILED


class LayoutError(InfraError):
    """A name that cannot stand in the layout of a store."""

    outcome = Outcome.CONFIG


class StoreError(InfraError):
    """The object store did not do what was asked, within its deadline. Names store, key, operation and cause."""


class ObjectNotFound(StoreError):
    """There is no object under that key."""

"""The exceptions of the ground. Each maps to an outcome of the public contract."""

from __future__ import annotations

from ebbflow.infra.outcome import Outcome


class InfraError(Exception):
    """Anything the ground could not do. `outcome` says how a job that dies of it ends."""

    outcome = Outcome.FAILED


class LayoutError(InfraError):
    """A name that cannot stand in the layout of a store."""

    outcome = Outcome.CONFIG


class JobIsRunning(InfraError):
    """Another launcher runs the job, or has taken it over. Nothing was changed."""

    outcome = Outcome.PREFLIGHT


class StoreError(InfraError):
    """The object store did not do what was asked, within its deadline. Names store, key, operation and cause."""


class ObjectNotFound(StoreError):
    """There is no object under that key."""


class StoreAway(StoreError):
    """Nobody answers, the answer comes too late, or the store is in trouble itself: a later try may do better."""


class StoreHung(StoreAway):
    """An operation on a folder did not come back in time and was abandoned. It may still finish, at any later time."""


class StoreForbidden(StoreError):
    """The store is there and refuses: no credentials, wrong ones, expired ones, or ones without this right."""


class StoreFull(StoreError):
    """No room, or a quota is used up: nothing can be written until something is deleted."""


class StoreMisconfigured(StoreError):
    """There is no such store: an unknown kind, no such bucket, or a bucket of another region."""

    outcome = Outcome.CONFIG


class CloudError(InfraError):
    """AWS did not do what was asked within its deadline. Names the action, the region and the cause."""


class CloudAway(CloudError):
    """Nobody answers, the answer comes too late, or requests are throttled: a later try may do better."""


class CloudForbidden(CloudError):
    """No credentials, wrong or expired ones, or ones without this right."""


class CloudRefused(CloudError):
    """AWS finds the request wrong. code: its word for it, "" where the request did not even leave."""

    outcome = Outcome.CONFIG

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code

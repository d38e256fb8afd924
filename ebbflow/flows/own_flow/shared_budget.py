"""A budget that all trials of a foreach share.

It is a list of numbered records in the store. Each record is the whole state: the dollars that each
trial holds. A trial reads the newest record and creates the next number, which succeeds for only one
of several writers; the others read again. Records are kept, since a late writer could otherwise
create a number that was in use.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ebbflow.core.errors import ObjectNotFound, StoreError
from ebbflow.core.layout import parse_shared_budget_key, shared_budget_key, shared_budget_prefix
from ebbflow.core.store import Store

_MOST_TRIES = 1000  # records that others write first; beyond this the store is faulty
_TOLERANCE_USD = 1e-9  # of sums of floats


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Dollars of one trial: its reservation or, after its end, its cost."""

    usd: float
    has_ended: bool


@dataclass(frozen=True, kw_only=True)
class SharedBudget:
    """Budget that the trials of a sweep share.

    Attributes:
        store: The store of all jobs.
        name: Name of the sweep, equal for its trials and in resumed runs.
        limit_usd: Dollars of all trials together.
    """

    store: Store
    name: str
    limit_usd: float

    def find_hold(self, trial: str) -> Hold | None:
        return self._read()[1].get(trial)

    def hold(self, trial: str, *, needed_usd: float, wanted_usd: float) -> float | None:
        """Reserve dollars of the shared budget for a trial. This replaces the trial's earlier
        reservation.

        Returns the reserved dollars: `wanted_usd`, or less if the other trials leave less. If they
        leave less than `needed_usd`, returns None and changes nothing. Raises StoreError.
        """
        for _ in range(_MOST_TRIES):
            number, holds = self._read()
            left = self._left(holds, trial)
            if needed_usd > left + _TOLERANCE_USD:
                return None
            granted = max(needed_usd, min(wanted_usd, left))
            if self._write(number + 1, {**holds, trial: Hold(usd=granted, has_ended=False)}):
                return granted
        raise self._error()

    def settle(self, trial: str, spent_usd: float) -> None:
        """Reduce the reservation of an ended trial to what it spent, so that the other trials can
        have the rest. Raises StoreError.
        """
        settled = Hold(usd=spent_usd, has_ended=True)
        for _ in range(_MOST_TRIES):
            number, holds = self._read()
            if holds.get(trial) == settled:
                return
            if self._write(number + 1, {**holds, trial: settled}):
                return
        raise self._error()

    def describe(self, trial: str) -> str:
        """Describe what a trial has left, such as "$1.20 of $40.00 are left to it …"."""
        _, holds = self._read()
        others = [hold for job, hold in holds.items() if job != trial]
        ended = [hold.usd for hold in others if hold.has_ended]
        running = [hold.usd for hold in others if not hold.has_ended]
        left = max(0.0, self._left(holds, trial))
        return (
            f"${left:.4f} of ${self.limit_usd:.4f} are left to it (${sum(ended):.4f} spent by "
            f"{len(ended)} ended trials, ${sum(running):.4f} held by {len(running)} others)"
        )

    def _left(self, holds: Mapping[str, Hold], trial: str) -> float:
        return self.limit_usd - sum(hold.usd for job, hold in holds.items() if job != trial)

    def _read(self) -> tuple[int, dict[str, Hold]]:
        """Return the number and content of the newest record, or (0, {}) if there is none."""
        listed = self.store.list(shared_budget_prefix(self.name))
        number = parse_shared_budget_key(listed[-1].key) if listed else 0
        content = None if number == 0 else self.store.get(shared_budget_key(self.name, number))
        # A listing can lack the newest objects of some services
        while True:
            try:
                content = self.store.get(shared_budget_key(self.name, number + 1))
            except ObjectNotFound:
                break
            number += 1
        if content is None:
            return 0, {}
        try:
            holds = json.loads(content)["holds"]
            return number, {trial: Hold(**hold) for trial, hold in holds.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            key = shared_budget_key(self.name, number)
            raise StoreError(
                f"{self.store.uri}/{key} is no record of a budget: {error!r}"
            ) from error

    def _write(self, number: int, holds: Mapping[str, Hold]) -> bool:
        """Create a record. Return False if another writer has created this number."""
        record = {
            "schema": 1,
            "limit_usd": self.limit_usd,
            "holds": {trial: asdict(hold) for trial, hold in holds.items()},
            # `Store.create` takes equal content for its own
            "writer": secrets.token_hex(8),
        }
        return self.store.create(
            shared_budget_key(self.name, number), json.dumps(record, indent=1).encode()
        )

    def _error(self) -> StoreError:
        place = f"{self.store.uri}/{shared_budget_prefix(self.name)}"
        return StoreError(f"{place}: {_MOST_TRIES} records in a row were written by others")

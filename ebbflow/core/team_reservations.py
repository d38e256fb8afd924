"""Reader of the documents in the store that record which jobs reserve a part of a team's budget.

`ebbflow.cost.finance.team_store` writes them; the agents of a job only look for its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ebbflow.core.errors import StoreError
from ebbflow.core.layout import RESERVATIONS_PREFIX
from ebbflow.core.store import Store


@dataclass(frozen=True)
class ReservationsDocument:
    """The newest document of reservations; if there is none, its number is 0 and it has no rows."""

    key: str = ""
    number: int = 0
    rows: tuple[dict[str, Any], ...] = ()  # fields of `BudgetReservation`


def read_newest_document(root: Store) -> ReservationsDocument:
    """Read the newest document of reservations. Raises StoreError, also if it is damaged."""
    for meta in reversed(root.list(RESERVATIONS_PREFIX)):
        name = meta.key.rpartition("/")[2].removesuffix(".json")
        if not name.isdigit():
            continue
        try:
            rows = json.loads(root.get(meta.key))["reservations"]
            for row in rows:
                str(row["job"])
        except (ValueError, TypeError, KeyError) as error:
            raise damaged_document(root, meta.key, error) from error
        return ReservationsDocument(meta.key, int(name), tuple(rows))
    return ReservationsDocument()


def damaged_document(root: Store, key: str, error: Exception) -> StoreError:
    return StoreError(f"{root.uri}/{key}: not reservations of a team: {error!r}; fix: delete it")


def is_reserved(root: Store, job: str) -> bool:
    """Return whether the job has a reservation in the newest document. Raises StoreError."""
    return any(row["job"] == job for row in read_newest_document(root).rows)

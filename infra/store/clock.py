"""What time it is by the store's own clock, which dates its objects: that of a small object, put and taken away.

This machine's clock says nothing of a store's, and the newest object of a job says little once nothing is put any more.
"""

from __future__ import annotations

import contextlib
import secrets
import time

from ebbflow.infra.errors import StoreError
from ebbflow.infra.layout import clock_key
from ebbflow.infra.store import ObjectMeta, Store

_ASK_AGAIN_SECONDS = 600.0
_PROBE = b"the store's clock"


class StoreClock:
    """Asks rarely. What it says is never later than the store's time, so that what is judged by it is kept too long
    rather than too short: the probe is dated before its answer comes, and after that only elapsed time is added.
    """

    def __init__(self) -> None:
        self._dated: float | None = None  # by the store's clock, at the time `_at` or before it
        self._at = 0.0

    def now(self, store: Store, newest: float) -> float:
        """Unix time. newest: of the objects that are known, which stands in where nothing can be put: no room, or no
        permission."""
        elapsed = time.monotonic() - self._at
        if self._dated is None or elapsed > _ASK_AGAIN_SECONDS:
            self._dated, self._at, elapsed = _probed(store), time.monotonic(), 0.0
        return newest if self._dated is None else self._dated + elapsed


def _probed(store: Store) -> float | None:
    """The listing dates it like the objects it is compared with; where that lags, a look at the object itself does."""
    key = clock_key(secrets.token_hex(8))
    found: ObjectMeta | None = None
    left = {key}
    try:
        store.put(key, _PROBE)
        listed = store.list("clock")
        left |= {meta.key for meta in listed}  # with those of processes that were killed here
        found = next((meta for meta in listed if meta.key == key), None) or store.head(key)
    except StoreError:
        pass
    for name in left:
        with contextlib.suppress(StoreError):  # then the next one takes it away
            store.delete(name)
    return found and found.modified

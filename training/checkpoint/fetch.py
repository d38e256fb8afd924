"""Small objects that carry their own checksum: what does not fit it is fetched once more before it is believed bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from infra.store import Store
from training.errors import CorruptCommit

T = TypeVar("T")


def fetched(store: Store, key: str, parse: Callable[[bytes, str], T], what: str | None = None) -> T:
    """`parse(bytes, what)` of an object. It may have been hurt on the way only, so CorruptCommit has a second try.

    what: the name that errors give it, else the key. Raises ObjectNotFound, StoreError, and what `parse` raises.
    """
    try:
        return parse(store.get(key), what or key)
    except CorruptCommit:
        return parse(store.get(key), what or key)

"""Small objects, for certain: what was put is read back; what does not fit its own checksum is fetched once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from infra.errors import ObjectNotFound, StoreError
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


def put_settled(store: Store, key: str, data: bytes) -> None:
    """Put and read back: it is there, and it is these bytes. An error, even a refusal, is settled by what is read.

    Raises the StoreError of the put when the bytes are not there, and StoreError when others are.
    """
    try:
        store.put(key, data)
        cause = None
    except StoreError as error:
        cause = error
    try:
        found = store.get(key)
    except ObjectNotFound as error:
        raise cause or error from error
    if found != data:
        raise cause or StoreError(f"put {store.uri}/{key}: {len(found)} other bytes than the {len(data)} put are read")

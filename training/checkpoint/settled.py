"""Small objects, for certain: what was put is read back; what does not fit its own checksum is fetched again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ebbflow.infra.errors import ObjectNotFound, StoreError
from ebbflow.infra.store import Store
from ebbflow.training.errors import CorruptCommit

T = TypeVar("T")
_READINGS = 6


def fetched(store: Store, key: str, parse: Callable[[bytes, str], T], what: str | None = None) -> T:
    """`parse(bytes, what)` of an object that may be hurt where it lies, or on the way only.

    Harm on the way is not the same twice: CorruptCommit is believed when two readings running are alike. A start that
    passes over a commit for two unlucky readings would lose its work.

    what: the name that errors give it, else the key. Raises ObjectNotFound, StoreError, and what `parse` raises.
    """
    before, readings = None, 0
    while True:
        data, readings = store.get(key), readings + 1
        try:
            return parse(data, what or key)
        except CorruptCommit:
            if data == before or readings == _READINGS:
                raise
        before = data


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

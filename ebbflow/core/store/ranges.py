"""Reader of byte ranges of local files into existing memory, without copies and without the GIL."""

import os
from collections.abc import Iterator, Sequence

from ebbflow.core.errors import ObjectNotFound, StoreError
from ebbflow.core.store import Store
from ebbflow.core.store.folder import open_regular

_MOST_BUFFERS = 1024  # limit of one preadv (POSIX IOV_MAX)


def read_blocks(
    store: Store, key: str, start: int, buffers: Sequence[memoryview], *, block_bytes: int
) -> Iterator[list[memoryview]]:
    """Read a part of an object in a local store into buffers, and yield each block once it is read.

    The part begins at byte `start` of the object. The buffers are filled in order and completely. A
    block has at most `block_bytes`, so that its bytes are still in the CPU cache when the caller
    computes their checksum.

    Raises:
        ObjectNotFound: there is no such object.
        StoreError: the object is too short, cannot be read, or is not in a local store.
    """
    path = store.local_path(key)
    if path is None:
        raise StoreError(f"get {store.uri}/{key}: only a local store is read into memory")
    what = f"get {store.uri}/{key}"
    try:
        descriptor = open_regular(path)
    except FileNotFoundError as error:
        raise ObjectNotFound(f"{what}: no such object") from error
    except OSError as error:
        raise StoreError(f"{what}: {error}") from error
    try:
        for block in _blocks(buffers, block_bytes):
            start += _fill(descriptor, start, block, what)
            yield block
    finally:
        os.close(descriptor)


def _blocks(buffers: Sequence[memoryview], block_bytes: int) -> Iterator[list[memoryview]]:
    block: list[memoryview] = []
    room = block_bytes
    for buffer in buffers:
        while len(buffer):
            block.append(buffer[:room])
            room -= len(block[-1])
            buffer = buffer[len(block[-1]) :]
            if room == 0 or len(block) == _MOST_BUFFERS:
                yield block
                block = []
                room = block_bytes
    if block:
        yield block


def _fill(descriptor: int, start: int, block: list[memoryview], what: str) -> int:
    left = block
    at = start
    while left:
        try:
            count = os.preadv(descriptor, left, at)
        except OSError as error:
            raise StoreError(f"{what}: {error}") from error
        if count == 0:
            expected = sum(map(len, block))
            raise StoreError(
                f"{what}: {at - start} bytes at {start}, expected {expected}: truncated"
            )
        at += count
        while left and count >= len(left[0]):
            count = count - len(left[0])
            left = left[1:]
        if left and count:
            left = [left[0][count:], *left[1:]]
    return at - start

"""Checksums, sealed documents, and reads and writes that are tried again, each at its edges."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from ebbflow.core.errors import (
    CloudUnavailable,
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
    StoreTimeout,
    StoreUnavailable,
)
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.verified_io import (
    CHUNK_BYTES,
    Deadline,
    canonical_json,
    chunk_crcs,
    combine_crcs,
    crc_digits,
    crc_of_pieces,
    crc_text,
    fetch_verified,
    is_curable,
    put_verified,
    retry_until,
    seal,
    sha256_text,
    unseal,
)
from ebbflow.training.errors import CheckpointError, CorruptCommit

CHECK = b"123456789"
CHECK_CRC = 0xAE8B14860A799888  # CRC-64/NVME, catalogue of parametrised CRC algorithms

DOCUMENTS = [{"a": 1, "z": "x"}, {"a": 1}, {"z": [1, {"seal": "x"}]}]

AWAY = StoreUnavailable("the answer was lost")


class Clock:
    """The process's clock, which only pauses move. A pause is as long as its upper limit."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


class Answers(Store):
    """A remote store that gives these answers in turn to every get, and counts them."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__(MemoryStore(), "s3://bucket", None)
        self._answers = answers
        self.asked: list[str] = []

    def get(self, key: str) -> bytes:
        self.asked.append(key)
        return self._answers[len(self.asked) - 1]


class LosingStore(Store):
    """A remote store whose puts store `stored` (None: nothing), and then fail if there is an
    `error`.
    """

    def __init__(self, stored: bytes | None, error: StoreError | None) -> None:
        super().__init__(MemoryStore(), "s3://bucket", None)
        self._stored = stored
        self._error = error

    def put(self, key: str, data: Any, **options: Any) -> None:
        if self._stored is not None:
            super().put(key, self._stored, **options)
        if self._error is not None:
            raise self._error


def test_the_checksum_is_the_one_of_the_catalogue() -> None:
    assert crc_text(CHECK) == "ae8b14860a799888"
    assert crc_text(b"") == "0" * 16
    assert crc_digits(0xABC) == "0000000000000abc"
    assert sha256_text(CHECK) == hashlib.sha256(CHECK).hexdigest()


@pytest.mark.parametrize(
    ("length", "lengths"),
    [(0, [0]), (1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])],
)
def test_data_is_summed_by_chunk(length: int, lengths: list[int]) -> None:
    data = CHECK[:length]
    sums = chunk_crcs(memoryview(data), 4)
    assert [size for _, size in sums] == lengths
    assert [value for value, _ in sums] == [
        int(crc_text(data[at : at + 4]), 16) for at in range(0, max(length, 1), 4)
    ]


@pytest.mark.parametrize(("length", "lengths"), [(0, [0]), (1, [1]), (2, [1, 1])])
def test_a_chunk_may_be_one_byte(length: int, lengths: list[int]) -> None:
    assert [size for _, size in chunk_crcs(memoryview(CHECK[:length]), 1)] == lengths


def test_a_chunk_has_16_mib() -> None:
    data = memoryview(bytes(CHUNK_BYTES + 1))
    assert CHUNK_BYTES == 16 * 1024 * 1024
    assert [size for _, size in chunk_crcs(data)] == [CHUNK_BYTES, 1]


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_checksums_of_pieces_combine_to_that_of_the_whole(pieces: list[bytes]) -> None:
    whole = int(crc_text(b"".join(pieces)), 16)
    assert combine_crcs([(int(crc_text(piece), 16), len(piece)) for piece in pieces]) == whole
    assert crc_of_pieces(pieces) == whole
    for cut in range(len(pieces) + 1):
        assert crc_of_pieces(pieces[cut:], crc_of_pieces(pieces[:cut])) == whole


def test_checksums_of_nothing_and_of_one_piece() -> None:
    assert combine_crcs([]) == 0
    assert combine_crcs([(CHECK_CRC, 9)]) == crc_of_pieces([CHECK]) == CHECK_CRC


def test_json_has_one_spelling() -> None:
    assert canonical_json({"b": [1, "é"], "a": {"d": None, "c": 0.1}}) == (
        rb'{"a":{"c":0.1,"d":null},"b":[1,"\u00e9"]}'
    )
    for number in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            canonical_json({"a": number})


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_sealed_document_has_its_checksum_and_is_returned_without_it(
    document: dict[str, Any],
) -> None:
    sealed = seal(document)
    assert json.loads(sealed) == {**document, "seal": crc_text(canonical_json(document))}
    assert sealed == canonical_json(json.loads(sealed))
    assert unseal(sealed, "what") == document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_any_other_byte_of_a_sealed_document_is_found(document: dict[str, Any]) -> None:
    sealed = seal(document)
    for at in range(len(sealed)):
        for bit in (0, 5):
            changed = bytearray(sealed)
            changed[at] ^= 1 << bit
            with pytest.raises(CorruptCommit, match=r"^what: "):
                unseal(bytes(changed), "what")
        with pytest.raises(CorruptCommit, match=r"^what: "):
            unseal(sealed[:at], "what")


def respelled() -> list[bytes]:
    stated = json.loads(seal({"a": 1}))["seal"]
    return [
        json.dumps({"a": 1, "seal": stated}).encode(),
        f'{{"seal":"{stated}","a": 1}}'.encode(),
        f'{{"a":1,"a":1,"seal":"{stated}"}}'.encode(),
        f'{{"a":1,"seal":"{stated}","seal":"{stated}"}}'.encode(),
        seal({"a": 1}) + b"\n",
    ]


@pytest.mark.parametrize("spelling", respelled())
def test_a_sealed_document_in_another_spelling_is_refused(spelling: bytes) -> None:
    assert json.loads(spelling)["a"] == 1
    with pytest.raises(CorruptCommit, match=r"^what: its seal says (\w{16}), its content is \1$"):
        unseal(spelling, "what")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"null",
        b'{"a":1}',
        b"[" * 9999,
        b'{"a":NaN,"seal":"x"}',
        b'{"a":1,"seal":"\\ud800"}',
    ],
    ids=["empty", "bytes", "list", "number", "null", "unsealed", "nested", "nan", "surrogate"],
)
def test_an_unsealed_document_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCommit, match=r"^what: not a sealed JSON document: "):
        unseal(data, "what")


def test_a_seal_of_other_content_is_refused() -> None:
    stated = json.loads(seal({"a": 1}))["seal"]
    with pytest.raises(CorruptCommit, match=f"^what: its seal says {stated}, its content is "):
        unseal(canonical_json({"a": 2, "seal": stated}), "what")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.seconds)
    monkeypatch.setattr(random.SystemRandom, "uniform", lambda _, least, most: most)
    return clock


def test_a_deadline_is_that_many_seconds_away(clock: Clock) -> None:
    deadline = Deadline(5.0)
    assert (deadline.seconds, deadline.remaining_seconds) == (5.0, 5.0)
    clock.seconds += 7.0
    assert (deadline.seconds, deadline.remaining_seconds) == (5.0, -2.0)


@pytest.mark.parametrize(
    ("error", "curable"),
    [
        (StoreError("x"), True),
        (StoreUnavailable("x"), True),
        (StoreTimeout("x"), True),
        (ObjectNotFound("x"), True),
        (StoreForbidden("x"), False),
        (StoreFull("x"), False),
        (StoreMisconfigured("x"), False),
        (CloudUnavailable("x"), False),
        (CorruptCommit("x"), False),
        (OSError("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_store_is_curable_unless_a_retry_cannot_help(
    error: Exception, curable: bool
) -> None:
    assert is_curable(error) is curable


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def operation() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return operation


def test_an_operation_is_retried_until_its_deadline(clock: Clock) -> None:
    away = [StoreUnavailable(f"failure {number}") for number in range(99)]
    assert retry_until(Deadline(60.0), "put k", failing(*away[:3]), sleep=clock.sleep) == "done"
    assert clock.pauses == pytest.approx([0.02, 0.04, 0.08])
    clock.pauses.clear()
    with pytest.raises(CheckpointError) as failed:
        retry_until(Deadline(7.0), "put k", failing(*away), sleep=clock.sleep)
    assert clock.pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0])
    assert str(failed.value) == "put k: gave up after 10 tries in 6.54 of 7 s: failure 9"
    assert failed.value.__cause__ is away[9]
    clock.pauses.clear()
    with pytest.raises(CheckpointError):
        retry_until(Deadline(3.0), "put k", failing(*away), sleep=clock.sleep, longest_seconds=0.5)
    assert max(clock.pauses) == 0.5


def test_a_permanent_failure_is_tried_once_and_names_the_key(clock: Clock) -> None:
    refused = StoreForbidden("refused")
    with pytest.raises(CheckpointError) as failed:
        retry_until(Deadline(1.5), "put k", failing(refused), where="part 2", sleep=clock.sleep)
    assert str(failed.value) == "put k: gave up after 1 try in 0 of 1.5 s: part 2: refused"
    with pytest.raises(ValueError, match="wrong"):
        retry_until(Deadline(60.0), "put k", failing(ValueError("wrong")), sleep=clock.sleep)
    assert clock.pauses == []
    curable = failing(ValueError("wrong"))
    assert (
        retry_until(Deadline(60.0), "put k", curable, curable=lambda error: True, sleep=clock.sleep)
        == "done"
    )


def parse_good(data: bytes, what: str) -> str:
    if not data.startswith(b"good"):
        raise CorruptCommit(f"{what}: {data!r}")
    return f"{what}: {data.decode()}"


@pytest.mark.parametrize(
    ("answers", "readings"),
    [
        ([b"good"], 1),
        ([b"1", b"good"], 2),
        ([b"1", b"2", b"1", b"2", b"1", b"good"], 6),
    ],
)
def test_an_object_damaged_in_transit_is_read_again(answers: list[bytes], readings: int) -> None:
    store = Answers(*answers)
    assert fetch_verified(store, "k", parse_good) == "k: good"
    assert store.asked == ["k"] * readings
    assert fetch_verified(Answers(b"good"), "k", parse_good, "the object k") == "the object k: good"


@pytest.mark.parametrize(
    ("answers", "last"),
    [
        ([b"1", b"1"], b"1"),
        ([b"1", b"2", b"2"], b"2"),
        ([b"1", b"2", b"3", b"4", b"5", b"6"], b"6"),
    ],
)
def test_damage_in_the_store_is_confirmed_by_equal_bytes_or_six_reads(
    answers: list[bytes], last: bytes
) -> None:
    store = Answers(*answers)
    with pytest.raises(CorruptCommit, match=f"^k: {last!r}$"):
        fetch_verified(store, "k", parse_good)
    assert len(store.asked) == len(answers)


@pytest.mark.parametrize("error", [None, AWAY])
def test_a_put_to_a_remote_store_succeeds_if_the_object_is_there(error: StoreError | None) -> None:
    store = LosingStore(b"content", error)
    put_verified(store, "k", b"content")
    assert store.get("k") == b"content"


@pytest.mark.parametrize(
    ("stored", "error", "raised"),
    [
        (None, AWAY, "^the answer was lost$"),
        (b"older", AWAY, "^the answer was lost$"),
        (None, None, "^get s3://bucket/k: no such object$"),
        (b"other", None, "^put s3://bucket/k: read back 5 bytes that differ from the 7 put$"),
    ],
)
def test_a_put_fails_if_the_object_is_not_what_was_put(
    stored: bytes | None, error: StoreError | None, raised: str
) -> None:
    with pytest.raises(StoreError, match=raised):
        put_verified(LosingStore(stored, error), "k", b"content")


def test_a_put_to_a_folder_reads_back_what_it_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(str(tmp_path))
    put_verified(store, "k", b"content")
    assert store.get("k") == b"content"
    monkeypatch.setattr(store, "get", lambda key: b"damaged")
    with pytest.raises(StoreError, match="read back 7 bytes that differ from the 7 put"):
        put_verified(store, "k", b"content")

"""What a signature covers, worked out by an independent formula: any other job, key, data or secret
is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import replace
from typing import Any

import pytest
from obstore.store import MemoryStore

from ebbflow.core.layout import commit_key, data_key, index_key, signature_key
from ebbflow.core.signing_key import NAME_VARIABLE
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.manifest import CheckpointId, DataObject, Manifest, RankIndex
from ebbflow.training.checkpoint.signing import (
    Signer,
    sha256_of_chunks,
    signed_index_bytes,
    signer,
    use_signing_key,
)
from ebbflow.training.errors import CorruptCommit, NoSigningKey, RefusedCommit

NAME = "EBBFLOW_TEST_KEY"
SECRET = "a key of these tests alone"
SHA256 = "ab" * 32
KEY = commit_key(5, 1, SHA256)
SAVE = CheckpointId(job="job", generation="000001-x", step=5, world_size=1)
INDEX_KEY = index_key(SAVE.generation, SAVE.step, 0)


@pytest.fixture(autouse=True)
def key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, SECRET)


@pytest.fixture
def store() -> Store:
    return Store(MemoryStore(), "s3://bucket/jobs/job", None)


def expected_hmac(purpose: bytes, secret: str = SECRET, **document: Any) -> str:
    key = hmac.new(secret.encode(), purpose, hashlib.sha256).digest()
    content = json.dumps({"version": 1, **document}, sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def commit_hmac(**changes: Any) -> str:
    return expected_hmac(
        b"ebbflow commit signature 1", **{"job": "job", "key": KEY, "data": None, **changes}
    )


def data_object(chunks: int = 1, sha256: tuple[str, ...] = ()) -> DataObject:
    key = data_key(SAVE.generation, SAVE.step, 0)
    sums = ("0" * 16,) * chunks
    return DataObject(
        key=key, size=chunks, crc64nvme="0" * 16, chunk_bytes=1, chunks=sums, sha256=sha256
    )


def index_of(data: DataObject) -> RankIndex:
    return RankIndex(save=SAVE, rank=0, data=data, items=(), common={"extra": {}})


@pytest.mark.parametrize("data", [None, {"data/x": ["1" * 64, "2" * 64]}])
def test_a_signature_covers_the_job_the_commit_and_its_data(
    store: Store, data: dict[str, list[str]] | None
) -> None:
    Signer(NAME).sign(store, KEY, data)
    assert json.loads(store.get(signature_key(SHA256))) == {
        "version": 1,
        "key": KEY,
        "data": data,
        "hmac": commit_hmac(data=data),
    }
    assert [meta.key for meta in store.list()] == [signature_key(SHA256)]
    assert Signer(NAME).check(store, KEY) == (data or {})


@pytest.mark.parametrize(
    "document",
    [
        {"data": None, "hmac": commit_hmac(job="other")},
        {"data": None, "hmac": commit_hmac(key=commit_key(6, 1, SHA256))},
        {"data": {}, "hmac": commit_hmac()},
        {"data": None, "hmac": commit_hmac(data={})},
        {"data": None, "hmac": commit_hmac(secret="a key of a forger alone")},
        {"data": None, "hmac": commit_hmac(version=2)},
        {"data": None, "hmac": expected_hmac(b"ebbflow index 1", job="job", key=KEY, data=None)},
        {"data": None, "hmac": ""},
        {"data": None, "hmac": "\ud800"},
        {"data": None, "hmac": None},
        {"data": None},
        {"hmac": commit_hmac()},
        {"data": float("nan"), "hmac": commit_hmac()},
        [],
        "x",
    ],
)
def test_a_signature_that_is_of_anything_else_is_refused(store: Store, document: Any) -> None:
    store.put(signature_key(SHA256), json.dumps(document).encode())
    with pytest.raises(RefusedCommit) as refused:
        Signer(NAME).check(store, KEY)
    assert str(refused.value) == (
        f"s3://bucket/jobs/job/{KEY}: is refused, because its signature is wrong: it was made "
        f"with another key than {NAME} has, for another job or step, or by a forger"
    )


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[" * 9999])
def test_an_invalid_document_is_no_signature(store: Store, raw: bytes) -> None:
    store.put(signature_key(SHA256), raw)
    with pytest.raises(RefusedCommit, match="its signature is wrong"):
        Signer(NAME).check(store, KEY)


def test_a_signature_that_was_damaged_on_the_way_only_is_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    Signer(NAME).sign(store, KEY)
    answers = [b"damaged", store.get(signature_key(SHA256))]
    monkeypatch.setattr(store, "get", lambda key: answers.pop(0))
    assert Signer(NAME).check(store, KEY) == {}


def test_a_commit_without_a_signature_is_refused_with_the_line_that_signs_it(store: Store) -> None:
    with pytest.raises(RefusedCommit) as refused:
        Signer(NAME).check(store, KEY)
    assert str(refused.value) == (
        f"s3://bucket/jobs/job/{KEY}: is refused, because it is not signed; if it was saved "
        "before signing was on: ebbflow checkpoints sign s3://bucket/jobs/job --signing-key-env "
        f"{NAME}"
    )


def test_an_index_is_signed_for_its_job_and_its_key(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(data_object())
    monkeypatch.setenv(NAME_VARIABLE, NAME)
    signed = RankIndex.from_bytes(signed_index_bytes(store, INDEX_KEY, index), INDEX_KEY)
    content = index.to_bytes().decode()
    assert signed.hmac == expected_hmac(b"ebbflow index 1", job="job", key=INDEX_KEY, index=content)
    assert replace(signed, hmac="") == index
    Signer(NAME).check_index(store, INDEX_KEY, signed)
    again = RankIndex.from_bytes(signed_index_bytes(store, INDEX_KEY, signed), INDEX_KEY)
    assert again == signed, "its own HMAC is not covered"
    monkeypatch.delenv(NAME_VARIABLE)
    assert signed_index_bytes(store, INDEX_KEY, index) == index.to_bytes()


def test_an_index_with_another_hmac_is_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(data_object())
    signed = replace(index, hmac=Signer(NAME).index_hmac(store, INDEX_KEY, index))
    other_job = Store(MemoryStore(), "s3://bucket/jobs/other", None)
    other_data = replace(signed, data=data_object(2))
    wrong = [
        (store, INDEX_KEY + "x", signed, "wrong"),
        (other_job, INDEX_KEY, signed, "wrong"),
        (store, INDEX_KEY, other_data, "wrong"),
        (store, INDEX_KEY, replace(signed, hmac="\ud800"), "wrong"),
        (store, INDEX_KEY, replace(signed, hmac=""), "missing"),
    ]
    for place, key, forged, what in wrong:
        with pytest.raises(CorruptCommit) as refused:
            Signer(NAME).check_index(place, key, forged)
        assert str(refused.value) == (
            f"{place.uri}/{key}: its HMAC is {what}: it was made without the key that {NAME} has "
            "here, or by a forger; fix: give all nodes the same key"
        )
    monkeypatch.setenv(NAME, "a key of a forger alone")
    with pytest.raises(CorruptCommit, match="its HMAC is wrong"):
        Signer(NAME).check_index(store, INDEX_KEY, signed)


@pytest.mark.parametrize(
    ("chunks", "in_manifest", "in_signature", "completed"),
    [
        (2, ("1", "2"), None, ("1", "2")),
        (2, (), {"": ["1", "2"]}, ("1", "2")),
        (2, ("3", "4"), {"": ["1", "2"]}, ("1", "2")),
        (0, (), None, ()),
        (2, (), None, None),
        (2, (), {"elsewhere": ["1", "2"]}, None),
        (2, (), {"": ["1"]}, None),
        (2, (), {"": ["1", "2", "3"]}, None),
    ],
)
def test_a_manifest_is_completed_by_the_sums_that_are_signed(
    store: Store,
    chunks: int,
    in_manifest: tuple[str, ...],
    in_signature: dict[str, list[str]] | None,
    completed: tuple[str, ...] | None,
) -> None:
    """In a signature "" stands for the key of the data object here."""
    data = data_object(chunks, in_manifest)
    manifest = Manifest(save=SAVE, data=(data,), indexes=("",), tensors={}, common={})
    signed = in_signature and {key or data.key: sums for key, sums in in_signature.items()}
    Signer(NAME).sign(store, KEY, signed)
    if completed is None:
        with pytest.raises(RefusedCommit) as refused:
            Signer(NAME).check_manifest(store, KEY, manifest)
        assert str(refused.value) == (
            f"{store.uri}/{KEY}: is refused, because {data.key} has no SHA-256 that is signed"
        )
    else:
        checked = Signer(NAME).check_manifest(store, KEY, manifest)
        assert checked == replace(manifest, data=(replace(data, sha256=completed),))


def test_every_data_object_of_a_manifest_needs_sums_that_are_signed(store: Store) -> None:
    summed = data_object(1, ("1",))
    manifest = Manifest(
        save=SAVE,
        data=(summed, replace(data_object(), key="x")),
        indexes=("",),
        tensors={},
        common={},
    )
    Signer(NAME).sign(store, KEY)
    with pytest.raises(RefusedCommit, match="because x has no SHA-256"):
        Signer(NAME).check_manifest(store, KEY, manifest)


@pytest.mark.parametrize("value", ["", "short"])
def test_a_key_that_cannot_be_used_is_an_error_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(NAME, value)
    with pytest.raises(
        NoSigningKey,
        match=rf"{NAME}.*; fix: set it to the job's key, such as that of `openssl rand",
    ):
        Signer(NAME)


def test_a_process_and_its_children_sign_while_the_variable_names_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NAME_VARIABLE, "")
    assert signer() is None
    use_signing_key(NAME)
    assert os.environ[NAME_VARIABLE] == NAME
    found = signer()
    assert found is not None and found.name == NAME
    for _ in range(2):
        use_signing_key(None)
        assert NAME_VARIABLE not in os.environ and signer() is None


@pytest.mark.parametrize(
    ("length", "chunks"), [(0, []), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4])]
)
def test_each_chunk_has_its_sha256(length: int, chunks: list[int]) -> None:
    data = bytes(range(length))
    assert sha256_of_chunks(memoryview(data), 4) == [
        hashlib.sha256(data[4 * number : 4 * number + size]).hexdigest()
        for number, size in enumerate(chunks)
    ]

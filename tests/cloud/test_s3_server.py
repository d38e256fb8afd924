"""The S3 server of the tests is itself tested: against a real one where both must agree, and fault
by fault.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from ebbflow.core.store import Store
from ebbflow.cost.jobs import list_jobs
from tests.support.s3.fixture import FailingServer, failing_s3
from tests.support.swift import Swift, swift

__all__ = ["failing_s3", "swift"]  # fixtures


@pytest.fixture(params=["ours", "swift"])
def server(request: pytest.FixtureRequest) -> FailingServer | Swift:
    """Each test below that takes it runs against both: they must agree."""
    return request.getfixturevalue("failing_s3" if request.param == "ours" else "swift")


def code(operation: Callable[..., Any], **arguments: Any) -> str:
    """What the server answers: the code of its refusal, or "" for none."""
    try:
        operation(**arguments)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return ""


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def test_objects_ranges_and_absence(server: FailingServer | Swift) -> None:
    s3 = server.client()
    bucket = server.new_bucket()
    key = "a folder/ü+&.bin"
    data = os.urandom(1000)
    put = s3.put_object(Bucket=bucket, Key=key, Body=data)
    assert put["ETag"].strip('"') == hashlib.md5(data).hexdigest()
    assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == data
    ranges = {
        "bytes=10-19": data[10:20],
        "bytes=990-": data[990:],
        "bytes=-5": data[-5:],
        "bytes=990-5000": data[990:],
    }
    for wanted, expected in ranges.items():
        answer = s3.get_object(Bucket=bucket, Key=key, Range=wanted)
        assert (
            answer["Body"].read() == expected
            and answer["ResponseMetadata"]["HTTPStatusCode"] == 206
        )
    assert code(s3.get_object, Bucket=bucket, Key=key, Range="bytes=1000-") == "InvalidRange"
    assert s3.head_object(Bucket=bucket, Key=key)["ContentLength"] == 1000
    assert code(s3.get_object, Bucket=bucket, Key="absent") == "NoSuchKey"
    assert code(s3.head_object, Bucket=bucket, Key="absent") == "404"
    assert code(s3.get_object, Bucket="absent-bucket", Key=key) == "NoSuchBucket"
    s3.delete_object(Bucket=bucket, Key=key)
    assert code(s3.get_object, Bucket=bucket, Key=key) == "NoSuchKey"
    # S3: no error; Swift: one
    assert code(s3.delete_object, Bucket=bucket, Key=key) in ("", "NoSuchKey")


def test_the_jobs_of_a_bucket_are_listed(
    server: FailingServer | Swift, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("ENDPOINT_URL", server.endpoint),
        ("ACCESS_KEY_ID", server.access_key),
        ("REGION", server.region),
        ("SECRET_ACCESS_KEY", server.secret_key),
        ("ALLOW_HTTP", "true"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    uri = f"s3://{server.new_bucket()}/prefix"
    assert list_jobs(uri) == []
    for key in ("jobs/one/a", "jobs/one/b/c", "jobs/one0/a", "jobs/two/a", "tokens/a"):
        Store.open(uri).put(key, b"1")
    assert list_jobs(uri) == ["one", "one0", "two"]


def test_listings_have_pages_prefixes_and_folders(server: FailingServer | Swift) -> None:
    s3 = server.client()
    bucket = server.new_bucket()
    keys = []
    for folder in ("one", "two"):
        for number in range(5):
            keys.append(f"{folder}/{number:02d}")
    for key in keys:
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    pages = list(
        s3.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, PaginationConfig={"PageSize": 3}
        )
    )
    listed_keys = []
    for page in pages:
        listed_keys += [entry["Key"] for entry in page["Contents"]]
    assert listed_keys == keys and len(pages) == 4
    found = s3.list_objects_v2(Bucket=bucket, Prefix="two/", StartAfter="two/02")
    assert [entry["Key"] for entry in found["Contents"]] == ["two/03", "two/04"]
    folders = s3.list_objects_v2(Bucket=bucket, Delimiter="/")
    assert [prefix["Prefix"] for prefix in folders["CommonPrefixes"]] == [
        "one/",
        "two/",
    ] and "Contents" not in folders
    gone = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys[:5]]})
    assert len(gone["Deleted"]) == 5 and s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 5


def test_the_s3_server_refuses_a_body_that_changed_in_transit(
    server: FailingServer | Swift,
) -> None:
    s3 = server.client()
    bucket = server.new_bucket()
    put = {"Bucket": bucket, "Key": "k", "Body": b"hello"}
    assert code(s3.put_object, **put, ContentMD5=md5(b"other")) == "BadDigest"
    for wrong in (
        {"ChecksumCRC32": "AAAAAA=="},
        {"ChecksumSHA256": base64.b64encode(bytes(32)).decode()},
    ):
        assert code(s3.put_object, **put, **wrong) in (
            "BadDigest",
            "InvalidRequest",
            "XAmzContentChecksumMismatch",
        )
    assert code(s3.get_object, Bucket=bucket, Key="k") == "NoSuchKey", (
        "what was refused is not there"
    )
    assert code(s3.put_object, **put, ContentMD5=md5(b"hello")) == ""


def test_multipart_shows_all_or_nothing(server: FailingServer | Swift) -> None:
    s3 = server.client()
    bucket = server.new_bucket()
    where = {"Bucket": bucket, "Key": "big"}
    parts = [os.urandom(5 * 2**20), b"the end"]
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    tags = [
        s3.upload_part(**upload, PartNumber=n, Body=part)["ETag"] for n, part in enumerate(parts, 1)
    ]
    assert code(s3.get_object, **where) == "NoSuchKey"
    assert len(s3.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 1
    named = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    assert (
        code(s3.complete_multipart_upload, **upload, MultipartUpload={"Parts": named[::-1]})
        == "InvalidPartOrder"
    )
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": named})
    assert s3.get_object(**where)["Body"].read() == b"".join(parts)
    aborted = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    s3.abort_multipart_upload(**aborted)
    assert code(s3.upload_part, **aborted, PartNumber=1, Body=b"x") == "NoSuchUpload"
    assert not s3.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_create_only_puts_hold_one_after_the_other(server: FailingServer | Swift) -> None:
    s3 = server.client()
    bucket = server.new_bucket()
    assert code(s3.put_object, Bucket=bucket, Key="k", Body=b"first", IfNoneMatch="*") == ""
    assert (
        code(s3.put_object, Bucket=bucket, Key="k", Body=b"second", IfNoneMatch="*")
        == "PreconditionFailed"
    )
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"first"


def test_a_wrong_key_is_refused(failing_s3: FailingServer) -> None:
    bucket = failing_s3.new_bucket()
    wrong = failing_s3.client(aws_secret_access_key="wrong")
    assert code(wrong.list_objects_v2, Bucket=bucket) == "SignatureDoesNotMatch"
    unknown = failing_s3.client(aws_access_key_id="nobody")
    assert code(unknown.put_object, Bucket=bucket, Key="k", Body=b"x") == "InvalidAccessKeyId"


@pytest.mark.parametrize(
    ("kind", "answer", "stored"),
    [
        ("error", "InternalError", False),
        ("slow_down", "SlowDown", False),
        ("conflict", "ConditionalRequestConflict", False),
        ("time_out", "RequestTimeout", False),
        ("reset", "no answer", False),
        ("lost", "no answer", True),
        ("stall", "no answer", False),
        ("stall_done", "no answer", True),
    ],
)
def test_each_put_fault_of_the_s3_server_has_its_effect(
    failing_s3: FailingServer, kind: str, answer: str, stored: bool
) -> None:
    rules = [{"kind": kind, "operation": "put"}]
    bucket = failing_s3.new_bucket(rules=rules, stall_seconds=0.2)
    s3 = failing_s3.client()
    try:
        found = code(s3.put_object, Bucket=bucket, Key="k", Body=b"x" * 100_000)
    except BotoCoreError:
        found = "no answer"
    assert found == answer
    assert code(s3.get_object, Bucket=bucket, Key="k") == ("" if stored else "NoSuchKey")
    assert failing_s3.told(bucket)["met"] == {kind: 1}


def test_flips_hurt_one_read_and_rot_hurts_all(failing_s3: FailingServer) -> None:
    s3 = failing_s3.client()
    data = bytes(1000)
    bucket = failing_s3.new_bucket(rules=[{"kind": "flip", "operation": "get"}])
    s3.put_object(Bucket=bucket, Key="k", Body=data)
    reads = [s3.get_object(Bucket=bucket, Key="k")["Body"].read() for _ in range(2)]
    assert reads[0] != data and reads[1] == data
    failing_s3.behave(bucket, rules=[{"kind": "rot", "operation": "put"}])
    s3.put_object(Bucket=bucket, Key="r", Body=data)
    reads = [s3.get_object(Bucket=bucket, Key="r")["Body"].read() for _ in range(2)]
    assert reads[0] == reads[1] != data and failing_s3.told(bucket)["rotten"] == ["r"]


def test_faults_are_the_same_for_the_same_seed(failing_s3: FailingServer) -> None:
    def play(seed: int) -> list[str]:
        s3 = failing_s3.client()
        bucket = failing_s3.new_bucket(seed=seed, rates={"error": 0.3, "slow_down": 0.3})
        return [code(s3.put_object, Bucket=bucket, Key=f"k{n % 3}", Body=b"x") for n in range(30)]

    assert play(1) == play(1) != play(2)


def test_a_stale_listing_omits_what_can_be_read(failing_s3: FailingServer) -> None:
    s3 = failing_s3.client()
    bucket = failing_s3.new_bucket(stale=1.0, stale_up_to_seconds=3600.0)
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"

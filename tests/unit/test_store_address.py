"""Addresses of stores: in another tool's spelling they are refused with ours, and never become a
local folder of that name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbflow.core.config import ConfigError, load_config
from ebbflow.core.errors import StoreMisconfigured
from ebbflow.core.store import Store
from ebbflow.core.store_address import find_address_problem, resolve_address

SPELLINGS = {
    "arn:aws:s3:::bucket/p": "s3://bucket/p",
    "arn:aws-cn:s3:::bucket": "s3://bucket",
    "s3a://bucket/p": "s3://bucket/p",
    "s3n://bucket/p/q": "s3://bucket/p/q",
    "S3://bucket/p": "s3://bucket/p",
    "s3:/bucket/p": "s3://bucket/p",
    "bucket.s3.amazonaws.com/p": "s3://bucket/p",
    "bucket.s3.eu-west-1.amazonaws.com/p": "s3://bucket/p",
    "bucket.s3-eu-west-1.amazonaws.com/p": "s3://bucket/p",
    "https://bucket.s3.amazonaws.com/p/": "s3://bucket/p",
    "https://s3.amazonaws.com/bucket/p": "s3://bucket/p",
    "https://s3.eu-west-1.amazonaws.com/bucket/p": "s3://bucket/p",
    "s3.dualstack.eu-west-1.amazonaws.com/bucket": "s3://bucket",
    "https://bucket.s3.cn-north-1.amazonaws.com.cn/p": "s3://bucket/p",
    "https://eu-west-1.console.aws.amazon.com/s3/buckets/bucket?prefix=p/": "s3://bucket/p",
    "s3://arn:aws:s3:::bucket/p": "s3://bucket/p",
    "ARN:aws-us-gov:s3:::bucket/p": "s3://bucket/p",
    "s3://s3://bucket/p": "s3://bucket/p",
    "s3://bucket/a//p": "s3://bucket/a/p",
    "s3://bucket/a/../p": "s3://bucket/a/p",
}
REFUSED = {
    "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine": "-s3alias",
    "https://minio.example:9000/bucket": "AWS_ENDPOINT_URL",
    "gs://bucket/p": "a folder, or s3://bucket/prefix",
    "az://container/p": "CRC64NVME",
    "hdfs://host/p": "a folder, or s3://bucket/prefix",
    "s3://": "a folder, or s3://bucket/prefix",
    "s3://arn:aws:s3:us-east-1:123456789012:accesspoint/mine/p": "-s3alias",
    "s3://my bucket/p": "has the bucket name 'my bucket'",
    "s3://bucket\\p": "has the bucket name",
    "localhost:9000/bucket": "AWS_ENDPOINT_URL",
    "minio.example:9000/bucket": "AWS_ENDPOINT_URL",
    "\\\\server\\share": "where it is mounted",
    "C:\\runs": "where it is mounted",
    "~nosuchuser/runs": "names a user who does not exist",
}


@pytest.mark.parametrize("address", [*SPELLINGS, *REFUSED])
def test_another_spelling_is_refused_with_ours(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fix = SPELLINGS.get(address) or REFUSED[address]
    with pytest.raises(StoreMisconfigured, match=re.escape(fix)) as refused:
        Store.open(address)
    assert "\n" not in str(refused.value) and repr(address) in str(refused.value)
    with pytest.raises(ConfigError, match=re.escape(fix)):
        load_config(None, [f"store='{address}'"], project_root=tmp_path, cwd=tmp_path)
    assert not list(tmp_path.iterdir()), "a folder of that name was made"


@pytest.mark.parametrize(
    "address", ["s3://bucket", "s3://bucket/p q+c%20d", "runs", "/data/runs", "file://data", "a:b"]
)
def test_our_own_spelling_is_kept(address: str) -> None:
    assert resolve_address(address) == address


@pytest.mark.slow
@given(address=st.text(st.characters(codec="utf-8", exclude_characters="$"), max_size=40))
@example("arn:aws:s3:::b")
@example("http:/x")
def test_each_address_is_a_bucket_a_folder_or_refused(address: str) -> None:
    problem = find_address_problem(address)
    if problem is not None:
        assert all(problem)
    elif "://" in address:
        assert address.startswith(("s3://", "file://")) or not re.match(
            r"[A-Za-z][A-Za-z0-9+.-]+:/", address
        )


def test_variables_are_expanded_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path))
    assert resolve_address("$PLACE/runs") == resolve_address("${PLACE}/runs") == f"{tmp_path}/runs"
    monkeypatch.delenv("PLACE")
    with pytest.raises(StoreMisconfigured, match="the environment variable PLACE is not set"):
        Store.open("s3://$PLACE/runs")


def test_an_endpoint_without_a_scheme_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(StoreMisconfigured) as refused:
        Store.open("s3://bucket")
    assert str(refused.value) == (
        "AWS_ENDPOINT_URL=127.0.0.1:9000 has no scheme; fix: "
        "AWS_ENDPOINT_URL=http://127.0.0.1:9000, or https://"
    )

"""Where region, endpoint and keys of S3 are found, which goes first, and what the client of a
bucket is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import botocore.session
import pytest

from ebbflow.core.errors import StoreError, StoreForbidden, StoreMisconfigured
from ebbflow.core.store.s3 import (
    AwsSettings,
    aws_settings,
    credential_provider,
    open_bucket,
    split_uri,
)

KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "something"}
CONFIG = """
[default]
region = region-of-default
[profile lab]
region = region-of-lab
endpoint_url = http://of-lab
[profile served]
services = ours
endpoint_url = http://of-served
[profile other]
services = others
endpoint_url = http://of-other
[services ours]
s3 =
  max_attempts = 3
  endpoint_url = http://of-ours
[services others]
ec2 =
  endpoint_url = http://of-ec2
"""


class Credentials:
    """Credentials that are read again each time, or that cannot be read."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.times_read = 0

    def get_frozen_credentials(self) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        self.times_read += 1
        return SimpleNamespace(
            access_key="id", secret_key="secret", token=f"token {self.times_read}"
        )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without an .aws folder, on a machine that is no instance."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def write_config(home: Path, text: str = CONFIG) -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(text)


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        (
            {
                "EBBFLOW_STORE_REGION": "a",
                "AWS_REGION": "b",
                "AWS_DEFAULT_REGION": "c",
                "AWS_PROFILE": "lab",
            },
            "a",
        ),
        (
            {
                "EBBFLOW_STORE_REGION": "",
                "AWS_REGION": "b",
                "AWS_DEFAULT_REGION": "c",
                "AWS_PROFILE": "lab",
            },
            "b",
        ),
        ({"AWS_DEFAULT_REGION": "c", "AWS_PROFILE": "lab"}, "c"),
        ({"AWS_PROFILE": "lab", "AWS_DEFAULT_PROFILE": "served"}, "region-of-lab"),
        ({"AWS_PROFILE": "", "AWS_DEFAULT_PROFILE": "lab"}, "region-of-lab"),
        ({}, "region-of-default"),
        ({"AWS_PROFILE": "served"}, None),
        ({"AWS_PROFILE": "nobody"}, None),
    ],
)
def test_the_first_place_that_names_a_region_decides(
    home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], region: str | None
) -> None:
    write_config(home)
    set_all(monkeypatch, variables)
    settings = aws_settings()
    assert (settings.region, settings.region_is_set) == (region or "us-east-1", region is not None)


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        (
            {
                "AWS_ENDPOINT_URL_S3": "http://a",
                "AWS_ENDPOINT_URL": "http://b",
                "METAFLOW_S3_ENDPOINT_URL": "http://c",
            },
            "http://a",
        ),
        (
            {
                "AWS_ENDPOINT_URL_S3": "",
                "AWS_ENDPOINT_URL": "http://b",
                "METAFLOW_S3_ENDPOINT_URL": "http://c",
            },
            "http://b",
        ),
        ({"METAFLOW_S3_ENDPOINT_URL": "http://c", "AWS_PROFILE": "lab"}, "http://c"),
        ({"AWS_PROFILE": "lab"}, "http://of-lab"),
        ({"AWS_PROFILE": "served"}, "http://of-ours"),
        ({"AWS_PROFILE": "other"}, "http://of-other"),
        ({}, None),
        ({"AWS_PROFILE": "lab", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "1"}, None),
        ({"AWS_PROFILE": "served", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "True"}, None),
        (
            {"AWS_PROFILE": "served", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false"},
            "http://of-ours",
        ),
        ({"AWS_ENDPOINT_URL": "http://b", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "0"}, "http://b"),
    ],
)
def test_the_first_place_that_names_an_endpoint_decides(
    home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], endpoint: str | None
) -> None:
    write_config(home)
    set_all(monkeypatch, variables)
    assert aws_settings().endpoint == endpoint


def test_an_endpoint_that_is_both_set_and_ignored_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contradiction = {
        "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true",
        "AWS_ENDPOINT_URL": "b",
        "AWS_ENDPOINT_URL_S3": "a",
    }
    set_all(monkeypatch, contradiction)
    with pytest.raises(
        StoreMisconfigured,
        match=(
            r"^AWS_IGNORE_CONFIGURED_ENDPOINT_URLS contradicts AWS_ENDPOINT_URL_S3 and "
            r"AWS_ENDPOINT_URL; fix: unset"
        ),
    ):
        aws_settings()


def test_the_configuration_file_may_be_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert aws_settings() == AwsSettings("us-east-1", None, region_is_set=False)
    (tmp_path / "elsewhere").write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "elsewhere"))
    assert aws_settings() == AwsSettings("region-of-default", None)


@pytest.mark.parametrize("content", [b"no section", b"[default]\nregion = \xff"])
def test_a_configuration_file_that_cannot_be_read_is_named(home: Path, content: bytes) -> None:
    write_config(home)
    (home / ".aws" / "config").write_bytes(content)
    with pytest.raises(
        StoreError, match=rf"^{home}/\.aws/config cannot be read: .*; fix: correct it, or set"
    ):
        aws_settings()


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        aws_settings().region = "another"


@pytest.mark.parametrize(
    "variables",
    [KEYS, {"AWS_SKIP_SIGNATURE": "1"}, {"AWS_SKIP_SIGNATURE": "TRUE"}],
    ids=["keys", "1", "true"],
)
def test_no_source_of_credentials_is_asked_if_none_is_needed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_all(monkeypatch, variables)
    assert credential_provider(5.0) is None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"AWS_ACCESS_KEY_ID": "somebody"},
        {"AWS_SECRET_ACCESS_KEY": "something"},
        {"AWS_SKIP_SIGNATURE": "0"},
    ],
    ids=["none", "half", "other-half", "signed"],
)
def test_credentials_that_are_missing_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(StoreForbidden, match="no AWS credentials"):
        credential_provider(5.0)


def use_credentials(monkeypatch: pytest.MonkeyPatch, credentials: Credentials | None) -> None:
    monkeypatch.setattr(botocore.session.Session, "get_credentials", lambda _: credentials)


def test_credentials_of_a_role_are_asked_for_again_every_five_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_credentials(monkeypatch, Credentials())
    ask = credential_provider(5.0)
    assert ask is not None
    before = datetime.now(UTC)
    given = ask()
    expires_at = given.pop("expires_at")
    assert given == {"access_key_id": "id", "secret_access_key": "secret", "token": "token 2"}, (
        "read once to try them"
    )
    assert before + timedelta(minutes=5) <= expires_at <= datetime.now(UTC) + timedelta(minutes=5)
    assert ask()["token"] == "token 3"


def test_a_source_of_credentials_that_fails_is_named_with_its_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_credentials(monkeypatch, Credentials(ValueError("the profile is wrong")))
    with pytest.raises(StoreForbidden) as refused:
        credential_provider(5.0)
    assert str(refused.value) == (
        "no AWS credentials: the profile is wrong; fix: AWS_PROFILE, or renew them (aws sso login)"
    )
    use_credentials(monkeypatch, None)
    with pytest.raises(StoreForbidden) as missing:
        credential_provider(5.0)
    assert str(missing.value) == (
        "no AWS credentials: none in the environment, the shared files, a container's or an "
        "instance's role; fix: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, "
        "or give the machine a role"
    )


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://bucket/some/prefix", ("bucket", "some/prefix")),
    ],
)
def test_an_address_is_split_into_bucket_and_prefix(uri: str, parts: tuple[str, str]) -> None:
    assert split_uri(uri) == parts


@pytest.mark.parametrize("uri", ["s3://", "s3:///prefix"])
def test_an_address_without_a_bucket_is_refused(uri: str) -> None:
    with pytest.raises(
        StoreMisconfigured, match=f"^store {uri!r}: names no bucket; fix: s3://bucket/prefix$"
    ):
        split_uri(uri)


@pytest.mark.parametrize(
    ("seconds", "init", "longest", "start", "one_try", "connect"),
    [(10.0, 0.1, 1.0, 1.8, "7s", "2s 500ms"), (0.5, 0.05, 0.05, 0.09, "350ms", "125ms")],
)
def test_the_last_try_of_a_request_ends_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    init: float,
    longest: float,
    start: float,
    one_try: str,
    connect: str,
) -> None:
    """Tries start within 0.18, a pause is at most 0.1, and the last try takes 0.7 of the deadline:
    0.98 of it.
    """
    set_all(monkeypatch, KEYS)
    opened = open_bucket("bucket", seconds)
    assert opened.retry_config == {
        "max_retries": 4,
        "retry_timeout": timedelta(seconds=start),
        "backoff": {
            "init_backoff": timedelta(seconds=init),
            "max_backoff": timedelta(seconds=longest),
            "base": 2.0,
        },
    }
    assert opened.client_options["timeout"] == one_try
    assert opened.client_options["connect_timeout"] == connect


@pytest.mark.parametrize(
    ("bucket", "variables", "config", "allows_http"),
    [
        ("bucket", {}, {"virtual_hosted_style_request": "true"}, "false"),
        ("dotted.bucket", {}, {}, "false"),
        ("bucket", {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false"}, {}, "false"),
        (
            "bucket",
            {"AWS_REGION": "r"},
            {"region": "r", "virtual_hosted_style_request": "true"},
            "false",
        ),
        (
            "bucket",
            {"AWS_ENDPOINT_URL": "http://h/"},
            {"endpoint": "http://h", "disable_tagging": "true"},
            "true",
        ),
        (
            "bucket",
            {"AWS_ENDPOINT_URL": "https://h"},
            {"endpoint": "https://h", "disable_tagging": "true"},
            "false",
        ),
    ],
)
def test_the_client_of_a_bucket_is_configured_for_its_service(
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    variables: dict[str, str],
    config: dict[str, str],
    allows_http: str,
) -> None:
    """Amazon's names the bucket in the host name and takes tags; others take it in the path."""
    set_all(monkeypatch, KEYS | variables)
    opened = open_bucket(bucket, 10.0)
    told = {"bucket": bucket, "region": "us-east-1", "unsigned_payload": "true"} | config
    assert opened.config == told
    assert opened.client_options["allow_http"] == allows_http


def test_the_client_of_a_bucket_asks_the_source_of_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_all(monkeypatch, KEYS)
    assert open_bucket("bucket", 10.0).credential_provider is None
    for name in KEYS:
        monkeypatch.delenv(name)
    use_credentials(monkeypatch, Credentials())
    provider = open_bucket("bucket", 10.0).credential_provider
    assert provider is not None and provider()["access_key_id"] == "id"


def test_a_bucket_that_the_client_refuses_is_an_error_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_all(monkeypatch, KEYS | {"AWS_CONDITIONAL_PUT": "what"})
    with pytest.raises(StoreMisconfigured) as refused:
        open_bucket("bucket", 10.0)
    assert str(refused.value) == (
        'store s3://bucket: cannot be opened: Generic Config error: Failed to parse "what" as S3PutConditional; fix: '
        "the AWS_* settings"
    )

"""Access to S3: a client for a bucket, with credentials, region and endpoint found as by AWS tools.

Uploaders must start fast, so botocore is not imported if the environment has access keys. Otherwise
botocore searches for credentials: profile and role, web identity, SSO, shared files, container,
instance metadata.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.exceptions import BaseError
from obstore.store import S3Store

from ebbflow.core.errors import StoreError, StoreForbidden, StoreMisconfigured, StoreUnavailable
from ebbflow.core.retry import call_within

if TYPE_CHECKING:
    from obstore.store import ClientConfig

T = TypeVar("T")

_DEFAULT_REGION = "us-east-1"
# botocore renews credentials that expire within 10 minutes, so asking every 5 minutes never returns
# expired ones.
_ASK_AGAIN = timedelta(minutes=5)
_TRUE = ("1", "true")
# Metaflow passes the last one to its containers.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "METAFLOW_S3_ENDPOINT_URL")

# Region of the store, for processes that run in another region.
STORE_REGION_VARIABLE = "EBBFLOW_STORE_REGION"

# Fractions of a request's deadline. The last try starts within `_TRIES_START` + `_PAUSE` and takes
# at most `_TRY`, together less than the deadline.
_TRY = 0.7  # one try
_TRIES_START = 0.18  # the period in which tries may start
_PAUSE = 0.1  # a pause between tries
_CONNECT = 0.25  # connecting
_RETRIES = 4


@dataclass(frozen=True)
class AwsSettings:
    """Region and endpoint of S3."""

    region: str
    endpoint: str | None  # URL; None for Amazon S3
    region_is_set: bool = True  # False if the region is the default


def aws_settings() -> AwsSettings:
    """Return the region and the endpoint of S3 from environment variables or the AWS profile.

    Environment variables take precedence. If AWS_IGNORE_CONFIGURED_ENDPOINT_URLS is true, the
    profile's endpoint is ignored.

    Raises:
        StoreError: the profile cannot be read.
        StoreMisconfigured: AWS_IGNORE_CONFIGURED_ENDPOINT_URLS is true, but an environment variable
            sets an endpoint. obstore would use that endpoint in spite of the setting.
    """
    environment = os.environ
    profile = _Profile()
    names = (STORE_REGION_VARIABLE, "AWS_REGION", "AWS_DEFAULT_REGION")
    region = next(
        (environment[name] for name in names if environment.get(name)), None
    ) or profile.get("region")
    endpoint = next((environment[name] for name in _ENDPOINTS if environment.get(name)), None)
    ignored = environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() in _TRUE
    if ignored and endpoint is not None:
        names = " and ".join(name for name in _ENDPOINTS if environment.get(name))
        raise StoreMisconfigured(
            f"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS contradicts {names}; fix: unset one of them"
        )
    if not ignored:
        endpoint = endpoint or profile.service("s3", "endpoint_url") or profile.get("endpoint_url")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        name = next((name for name in _ENDPOINTS if environment.get(name)), "endpoint_url")
        raise StoreMisconfigured(
            f"{name}={endpoint} has no scheme; fix: {name}=http://{endpoint}, or https://"
        )
    return AwsSettings(region or _DEFAULT_REGION, endpoint, bool(region))


def read_certificates() -> bytes | None:
    """Read the PEM file of private certificate authorities that other AWS tools use, if one is set.

    Raises StoreMisconfigured if the file that a variable names cannot be read.
    """
    names = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
    found = [(name, os.environ[name]) for name in names if os.environ.get(name)]
    in_profile = _Profile().get("ca_bundle")
    if in_profile:
        found.insert(len(found[:1]), ("ca_bundle of the AWS profile", in_profile))
    if not found:
        return None
    (name, path) = found[0]
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise StoreMisconfigured(
            f"{name} names {path}: {error.strerror}; fix: a PEM file of certificates"
        ) from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise StoreMisconfigured(
            f"{name} names {path}, which has no certificate; fix: a PEM file of certificates"
        )
    return content


def credential_provider(seconds: float) -> Callable[[], dict] | None:
    """Return a function that gives obstore credentials within `seconds`, or None if none is needed.

    obstore needs no function if the environment has access keys, or if AWS_SKIP_SIGNATURE is true
    because the bucket is public. Raises StoreForbidden if there are no credentials, and
    StoreUnavailable if their source does not answer in time.
    """
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return None
    if environment.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE:  # a public bucket
        return None
    return _within(seconds, lambda: _from_chain(seconds))


def split_uri(uri: str) -> tuple[str, str]:
    """Split ``s3://bucket/prefix`` into (bucket, prefix).

    Raises StoreMisconfigured if there is no bucket.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise StoreMisconfigured(f"store {uri!r}: names no bucket; fix: s3://bucket/prefix")
    return bucket, prefix


def open_bucket(bucket: str, seconds: float) -> S3Store:
    """Open a client for a bucket. Each of its requests ends within `seconds`, retries included.

    Raises StoreMisconfigured (obstore refuses the settings), and the errors of `aws_settings` and
    `credential_provider`.
    """
    settings = aws_settings()
    endpoint = settings.endpoint
    options: dict[str, Any] = {"region": settings.region}
    if endpoint is not None:
        options["endpoint"] = endpoint.rstrip("/")
        # Few other stores support tags; some refuse the whole request
        options["disable_tagging"] = True
    elif "AWS_VIRTUAL_HOSTED_STYLE_REQUEST" not in os.environ and "." not in bucket:
        # Amazon's own style; a dot in the name would not match its certificate. Others expect the
        # bucket in the path.
        options["virtual_hosted_style_request"] = True
    provider = credential_provider(seconds)
    if provider is not None:
        options["credential_provider"] = provider
    client_options: ClientConfig = {
        "timeout": timedelta(seconds=_TRY * seconds),
        "connect_timeout": timedelta(seconds=_CONNECT * seconds),
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
    }
    certificates = read_certificates()
    if certificates is not None:
        client_options["root_certificate"] = certificates
    try:
        return S3Store(
            bucket,
            client_options=client_options,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=_TRIES_START * seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=min(0.1, _PAUSE * seconds)),
                    "max_backoff": timedelta(seconds=_PAUSE * seconds),
                    "base": 2,
                },
            },
            unsigned_payload=True,
            **options,
        )
    except BaseError as error:
        cause = " ".join(str(error).split("Debug source")[0].split())
        raise StoreMisconfigured(
            f"store s3://{bucket}: cannot be opened: {cause}; fix: the AWS_* settings"
        ) from error


def _from_chain(seconds: float) -> Callable[[], dict]:
    try:
        from botocore.session import Session
    except ModuleNotFoundError as error:
        raise StoreMisconfigured(
            "AWS profiles and roles are read by boto3, which is not installed; fix: pip install "
            "'ebbflow[flow]', or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error

    try:
        credentials = Session().get_credentials()
        if credentials is None:
            raise StoreForbidden(
                "no AWS credentials: none in the environment, the shared files, a container's or "
                "an instance's role; fix: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
                "AWS_PROFILE, or give the machine a role"
            )
        credentials.get_frozen_credentials()
    except StoreError:
        raise
    except Exception as error:  # botocore's errors, a refused role, errors of a credential_process
        raise StoreForbidden(
            f"no AWS credentials: {error}; fix: AWS_PROFILE, or renew them (aws sso login)"
        ) from error

    def ask() -> dict:
        frozen = _within(seconds, credentials.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _ASK_AGAIN,
        }

    return ask


def _within(seconds: float, find: Callable[[], T]) -> T:
    return call_within(
        seconds,
        find,
        "credentials",
        lambda: StoreUnavailable(
            f"the source of AWS credentials did not answer within {seconds:g} s; fix: set "
            "AWS_PROFILE or keys, or AWS_EC2_METADATA_DISABLED=true on a machine that is no "
            "instance"
        ),
    )


class _Profile:
    """The active AWS profile in the shared configuration file.

    Without a file or profile, every key is None.
    """

    def __init__(self) -> None:
        name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
        path = Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser()
        self._file = configparser.RawConfigParser()
        try:
            self._file.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            cause = " ".join(str(error).split())
            raise StoreError(
                f"{path} cannot be read: {cause}; fix: correct it, or set AWS_CONFIG_FILE"
            ) from error
        if name == "default":
            self._section = name
        else:
            self._section = f"profile {name}"

    def get(self, key: str) -> str | None:
        return self._file.get(self._section, key, fallback=None)

    def service(self, service: str, key: str) -> str | None:
        """Return a setting of one service, such as s3's endpoint_url, from the profile's `services`
        section.
        """
        section = f"services {self.get('services')}"
        for line in self._file.get(section, service, fallback="").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == key:
                return value.strip()
        return None

"""Opening a bucket: where it is, who asks, and how long an answer may take."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import S3Store

from ebbflow.infra.errors import StoreMisconfigured
from ebbflow.infra.store.aws import aws_settings, credential_provider

# Shares of a request's time, which add up to less than all of it: a last try starts before the second is over, after
# a pause of at most the third, and takes at most the first.
_TRY, _TRIES_START, _PAUSE, _CONNECT = 0.7, 0.18, 0.1, 0.25
_RETRIES = 4


def split_uri(uri: str) -> tuple[str, str]:
    """(bucket, prefix) of ``s3://bucket/prefix``. Raises StoreMisconfigured without a bucket."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise StoreMisconfigured(f"store {uri!r}: names no bucket; fix: s3://bucket/prefix")
    return bucket, prefix


def open_bucket(bucket: str, seconds: float) -> S3Store:
    """A client for `bucket` whose every request, its retries included, ends within `seconds`.

    Raises StoreForbidden without credentials, StoreAway when their source hangs, StoreMisconfigured for a setting
    that no bucket can be opened with.
    """
    settings = aws_settings()
    endpoint = settings.endpoint
    options: dict[str, Any] = {"region": settings.region}
    if endpoint is not None:
        options["endpoint"] = endpoint.rstrip("/")
        options["disable_tagging"] = True  # few but Amazon's know tags; some refuse the whole request
    elif "AWS_VIRTUAL_HOSTED_STYLE_REQUEST" not in os.environ and "." not in bucket:
        # Amazon's own style; a dot in the name would not match its certificate. Others expect the bucket in the path.
        options["virtual_hosted_style_request"] = True
    provider = credential_provider(seconds)
    if provider is not None:
        options["credential_provider"] = provider
    try:
        return S3Store(
            bucket,
            client_options={
                "timeout": timedelta(seconds=_TRY * seconds),
                "connect_timeout": timedelta(seconds=_CONNECT * seconds),
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
            },
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
        raise StoreMisconfigured(f"store s3://{bucket}: cannot be opened: {cause}; fix: the AWS_* settings") from error

"""Who asks which endpoint: the same region, endpoint and keys as the store's own requests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.infra.store.aws import aws_settings, credential_provider

_CREDENTIALS_SECONDS = 30.0


@dataclass(frozen=True)
class Account:
    """endpoint: scheme, host and port, None for Amazon's own. access_key "": requests are not signed."""

    region: str
    endpoint: str | None
    access_key: str = ""
    secret_key: str = ""
    token: str | None = None


def find_account() -> Callable[[], Account]:
    """What to ask before each request: keys that expire are renewed in between.

    Raises StoreForbidden without any, StoreAway when their source does not answer.
    """
    settings = aws_settings()
    provider = credential_provider(_CREDENTIALS_SECONDS)
    if provider is not None:
        return lambda: _of(settings.region, settings.endpoint, provider())
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        known = Account(
            settings.region,
            settings.endpoint,
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
            environment.get("AWS_SESSION_TOKEN"),
        )
    else:  # a public bucket
        known = Account(settings.region, settings.endpoint)
    return lambda: known


def _of(region: str, endpoint: str | None, keys: dict) -> Account:
    return Account(region, endpoint, keys["access_key_id"], keys["secret_access_key"], keys["token"])

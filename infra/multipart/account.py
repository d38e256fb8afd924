"""Who asks which endpoint: keys and region as every AWS tool finds them, an SDK loaded only where it has to be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from infra.errors import StoreForbidden

_DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Account:
    """endpoint: scheme, host and port, None for Amazon's own. access_key "": requests are not signed."""

    region: str
    endpoint: str | None
    access_key: str = ""
    secret_key: str = ""
    token: str | None = None


def find_account() -> Callable[[], Account]:
    """What to ask before each request: keys that expire are renewed in between. Raises StoreForbidden without any."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        anonymous = Account(region, endpoint)
        return lambda: anonymous
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        known = Account(region, endpoint, key, secret, os.environ.get("AWS_SESSION_TOKEN"))
        return lambda: known
    return _from_chain(region, endpoint)


def _from_chain(region: str, endpoint: str | None) -> Callable[[], Account]:
    from botocore.session import Session

    credentials = Session().get_credentials()
    if credentials is None:
        raise StoreForbidden(
            "no AWS credentials: none in the environment, the shared files, a container's or an instance's role; "
            "fix: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the machine a role"
        )

    def ask() -> Account:
        frozen = credentials.get_frozen_credentials()
        return Account(region, endpoint, frozen.access_key, frozen.secret_key, frozen.token)

    return ask

"""One-line errors of the store, made from exceptions of obstore and of the operating system.

Each names the operation, the object, what happened and what to do. obstore gives the HTTP status, the S3 error code and
errno only within its exceptions' texts, so this module searches the texts.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any

from obstore.exceptions import BaseError, NotFoundError

from ebbflow.infra.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)

# The IAM action that each operation needs.
ACTIONS = {
    "put": "s3:PutObject",
    "get": "s3:GetObject",
    "head": "s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_RENEW = "renew them (aws sso login), or let a role renew them"
_REFUSALS = {
    "InvalidAccessKeyId": ("unknown access key", f"check {_KEYS}, and the endpoint"),
    "SignatureDoesNotMatch": ("the secret key does not match the access key", f"check {_KEYS}"),
    "ExpiredToken": ("the credentials have expired", _RENEW),
    "InvalidToken": ("the session token is not valid", "renew the credentials, or unset AWS_SESSION_TOKEN"),
    "RequestTimeTooSkewed": (
        "this machine's clock is more than 15 minutes off the store's",
        "set the clock (chronyc makestep, or timedatectl set-ntp true)",
    ),
}
_FULL_CODES = frozenset({"EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"})
_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"})
_FULL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN_NUMBERS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class as_store_errors:  # noqa: N801 - reads as a phrase: with as_store_errors("put", uri)
    """Context manager that turns exceptions of obstore and of the operating system into a StoreError."""

    def __init__(self, operation: str, uri: str) -> None:
        self._operation = operation
        self._uri = uri

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, BaseError | OSError):
            raise _store_error(self._operation, self._uri, error) from error


def _store_error(operation: str, uri: str, error: BaseException) -> StoreError:
    text = str(error)
    what = f"{operation} {uri}: "
    if uri.startswith("s3://"):
        kind, words = _remote(
            operation, uri, text, isinstance(error, NotFoundError | FileNotFoundError | NotADirectoryError)
        )
        return kind(what + words)
    number = error.errno if isinstance(error, OSError) and error.errno else _system_number(text)
    kind, words = _local(number, text, isinstance(error, NotFoundError | FileNotFoundError | NotADirectoryError))
    return kind(what + words)


def _local(number: int | None, text: str, missing: bool) -> tuple[type[StoreError], str]:
    if number in _FULL_NUMBERS:
        return StoreFull, f"no space: {os.strerror(number)}; fix: free space, or a store on another disk"
    if number in _FORBIDDEN_NUMBERS:
        return StoreForbidden, f"not allowed: {os.strerror(number)}; fix: the folder's owner and permissions"
    if missing:
        return ObjectNotFound, "no such object"
    return StoreError, _first_sentence(text)


def _remote(operation: str, uri: str, text: str, missing: bool) -> tuple[type[StoreError], str]:
    bucket = uri.removeprefix("s3://").partition("/")[0]
    # A delete is one key of a bulk request, and its refusal is part of a successful answer.
    code = _found(r"<Code>\s*(\w+)\s*</Code>", text) or _found(r"\(code: (\w+)\)", text)
    status = int(_found(r"status code: (\d{3})", text) or 0)
    if code == "NoSuchBucket":
        fix = f"create it, or correct the name or the endpoint ({_host(text)})"
        return StoreMisconfigured, f"there is no bucket {bucket!r}; fix: {fix}"
    if missing:
        return ObjectNotFound, "no such object"
    if source := _found(r"External AWS credential provider: ([^\n]+)", text):
        if source.startswith(
            f"{StoreUnavailable.__name__}: "
        ):  # raised by `ebbflow.infra.store.s3` for a hanging source
            return StoreUnavailable, source.partition(": ")[2]
        return StoreForbidden, f"forbidden: the credentials could not be renewed: {source[:200]}; fix: {_RENEW}"
    if code in _REGION_CODES or "BareRedirect" in text:
        region = _found(r"expecting '([\w-]+)'", text)
        fix = f"AWS_REGION={region}" if region else f"AWS_REGION (aws s3api get-bucket-location --bucket {bucket})"
        return StoreMisconfigured, f"bucket {bucket!r} is in another region; fix: set {fix}"
    if code in _FULL_CODES or status in (413, 507):
        answer = " ".join(filter(None, [f"HTTP {status}", code]))
        return StoreFull, f"no space: the store is full ({answer}); fix: delete old jobs, or raise the quota"
    if code in _REFUSALS or code == "AccessDenied" or status in (401, 403):
        return StoreForbidden, _refusal(operation, bucket, code)
    return _away(text, status, code)


def _refusal(operation: str, bucket: str, code: str) -> str:
    if code in _REFUSALS:
        words, fix = _REFUSALS[code]
        return f"forbidden: {words} ({code}); fix: {fix}"
    action = ACTIONS[operation]
    target = f"arn:aws:s3:::{bucket}" + ("" if operation == "list" else "/*")
    return f"forbidden ({code or 'no reason given'}); fix: allow {action} on {target}, or check {_KEYS}"


def _away(text: str, status: int, code: str) -> tuple[type[StoreError], str]:
    host = _host(text)
    if status == 429 or status >= 500:
        answer = " ".join(filter(None, [f"HTTP {status}", code]))
        tries = _found(r"after (\d+) retries", text)
        after = f" after {tries} retries" if tries else ""
        return (
            StoreUnavailable,
            f"{host} has an internal error{after} ({answer}); fix: try again later, or ask the store's operator",
        )
    if "dns error" in text:
        return StoreUnavailable, f"the name of {host} does not resolve; fix: the endpoint (AWS_ENDPOINT_URL), or DNS"
    if "ConnectionRefused" in text:
        return StoreUnavailable, f"connection refused by {host}; fix: start it, or correct AWS_ENDPOINT_URL"
    if "Timeout" in text or "TimedOut" in text:
        seconds = _seconds(text)
        within = f" within {seconds:.1f} s" if seconds is not None else " in time"
        if "Connect," in text:
            fix = "a firewall or security group that drops packets, the route, or AWS_ENDPOINT_URL"
            return StoreUnavailable, f"no connection to {host}{within}; fix: {fix}"
        return StoreUnavailable, f"no answer from {host}{within}; fix: the network to it, or the store itself"
    if "kind: Connect" in text or "kind: Request" in text:
        cause = _found(r'message: "([^"]+)"', text) or _first_sentence(text)
        return StoreUnavailable, f"the connection to {host} broke: {cause}; fix: the network to it, or AWS_ENDPOINT_URL"
    return StoreError, _first_sentence(text)


def _host(text: str) -> str:
    """Return the endpoint's URL without its path, or "the store" if the text contains none."""
    return _found(r"(https?://[^/\s\"?]+)", text) or "the store"


def _seconds(text: str) -> float | None:
    """Return the seconds that obstore tried, parsed from "in 2.801919468s" or "in 928.5ms"; else None."""
    match = re.search(r" in ([\d.]+)(ms|s)\b", text)
    return None if match is None else float(match[1]) / (1000 if match[2] == "ms" else 1)


def _system_number(text: str) -> int | None:
    number = _found(r"os error (\d+)", text) or _found(r"code: (\d+)", text)
    return int(number) if number else None


def _first_sentence(text: str) -> str:
    return " ".join(text.split("Debug source")[0].split())[:300]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""

"""Conversion of errors of obstore and the operating system to one-line errors of the store.

Each error names the operation, the object, what happened and what to do. obstore gives the HTTP
status, the S3 error code and errno only within its exceptions' texts, so this module searches the
texts.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import BaseError, NotFoundError

from ebbflow.core.errors import (
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
    "InvalidToken": (
        "the session token is not valid",
        "renew the credentials, or unset AWS_SESSION_TOKEN",
    ),
    "RequestTimeTooSkewed": (
        "this machine's clock is more than 15 minutes off the store's",
        "set the clock (chronyc makestep, or timedatectl set-ntp true)",
    ),
}
_CERTIFICATE_PROBLEMS = {
    "UnknownIssuer": "the certificate is signed by an unknown authority; fix: name the PEM file of "
    "your certificate authority in AWS_CA_BUNDLE",
    "Expired": "the certificate has expired; fix: renew it, or set this machine's clock",
    "NotValidYet": "the certificate is not valid yet; fix: set this machine's clock",
    "NotValidForName": "the certificate is for another name; fix: the host's name in the endpoint",
    "NotValidForNameContext": "the certificate is for another name; fix: the host's name in the "
    "endpoint",
}
_FULL_CODES = frozenset(
    {"EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
)
_REGION_CODES = frozenset(
    {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
)
_FULL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN_NUMBERS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def as_store_errors(
    operation: str, uri: str, otherwise: type[StoreError] = StoreError
) -> Iterator[None]:
    """Convert exceptions of obstore and the operating system to StoreError, with a one-line
    message.

    `otherwise` is the class to raise for an unrecognised error of a folder.
    """
    try:
        yield
    except (BaseError, OSError) as error:
        missing = isinstance(error, NotFoundError | FileNotFoundError | NotADirectoryError)
        if uri.startswith("s3://"):
            kind, words = _remote(operation, uri, str(error), missing)
        else:
            kind, words = _local(error, missing, otherwise)
        raise kind(f"{operation} {uri}: {words}") from error


def _local(
    error: BaseException, missing: bool, otherwise: type[StoreError]
) -> tuple[type[StoreError], str]:
    text = str(error)
    number = getattr(error, "errno", None)
    if not number and (found := _found(r"os error (\d+)", text) or _found(r"code: (\d+)", text)):
        number = int(found)
    if number in _FULL_NUMBERS:
        return (
            StoreFull,
            f"no space: {os.strerror(number)}; fix: free space, or a store on another disk",
        )
    if number == errno.EROFS:
        return StoreForbidden, f"not allowed: {os.strerror(errno.EROFS)}; fix: mount it for writing"
    if number in _FORBIDDEN_NUMBERS:
        return (
            StoreForbidden,
            f"not allowed: {os.strerror(number)}; fix: the folder's owner and permissions",
        )
    if missing:
        return ObjectNotFound, "no such object"
    return otherwise, _first_sentence(text)


def _remote(operation: str, uri: str, text: str, missing: bool) -> tuple[type[StoreError], str]:  # noqa: PLR0911 (one return for each kind of error)
    bucket = uri.removeprefix("s3://").partition("/")[0]
    # A delete is one key of a bulk request, and its refusal is part of a successful answer.
    code = _found(r"<Code>\s*(\w+)\s*</Code>", text) or _found(r"\(code: (\w+)\)", text)
    status = int(_found(r"status code: (\d{3})", text) or 0)
    if code == "NoSuchBucket":
        host = _found(r"(https?://[^/\s\"?]+)", text) or "the store"
        fix = f"create it, or correct the name or the endpoint ({host})"
        return StoreMisconfigured, f"there is no bucket {bucket!r}; fix: {fix}"
    if missing:
        return ObjectNotFound, "no such object"
    if source := _found(r"External AWS credential provider: ([^\n]+)", text):
        # From `ebbflow.core.store.s3`, for a hanging source
        if source.startswith(f"{StoreUnavailable.__name__}: "):
            return StoreUnavailable, source.partition(": ")[2]
        return (
            StoreForbidden,
            f"forbidden: the credentials could not be renewed: {source[:200]}; fix: {_RENEW}",
        )
    if code in _REGION_CODES or "BareRedirect" in text:
        region = _found(r"expecting '([\w-]+)'", text)
        if region:
            fix = f"AWS_REGION={region}"
        else:
            fix = f"AWS_REGION (aws s3api get-bucket-location --bucket {bucket})"
        return StoreMisconfigured, f"bucket {bucket!r} is in another region; fix: set {fix}"
    if code in _FULL_CODES or status in (413, 507):
        answer = _status_and_code(status, code)
        return (
            StoreFull,
            f"no space: the store is full ({answer}); fix: delete old jobs, or raise the quota",
        )
    if code in _REFUSALS or code == "AccessDenied" or status in (401, 403):
        return StoreForbidden, _refusal(operation, bucket, code)
    return _away(text, status, code)


def _refusal(operation: str, bucket: str, code: str) -> str:
    if code in _REFUSALS:
        words, fix = _REFUSALS[code]
        return f"forbidden: {words} ({code}); fix: {fix}"
    target = f"arn:aws:s3:::{bucket}" + ("" if operation == "list" else "/*")
    return (
        f"forbidden ({code or 'no reason given'}); fix: allow {ACTIONS[operation]} on {target}, "
        f"or check {_KEYS}"
    )


def _away(text: str, status: int, code: str) -> tuple[type[StoreError], str]:  # noqa: PLR0912 (one branch for each kind of failure)
    host = _found(r"(https?://[^/\s\"?]+)", text) or "the store"
    if status == 429 or status >= 500:
        answer = _status_and_code(status, code)
        tries = _found(r"after (\d+) retries", text)
        if tries:
            after = f" after {tries} retries"
        else:
            after = ""
        words = (
            f"{host} has an internal error{after} ({answer}); fix: try again later, or ask the "
            "store's operator"
        )
    elif "dns error" in text:
        words = f"the name of {host} does not resolve; fix: the endpoint (AWS_ENDPOINT_URL), or DNS"
    elif "ConnectionRefused" in text:
        words = f"connection refused by {host}; fix: start it, or correct AWS_ENDPOINT_URL"
    elif "Timeout" in text or "TimedOut" in text:
        tried = re.search(r" in ([\d.]+)(ms|s)\b", text)  # "in 2.801919468s" or "in 928.5ms"
        if tried:
            within = f" within {float(tried[1]) / (1000 if tried[2] == 'ms' else 1):.1f} s"
        else:
            within = " in time"
        words = f"no answer from {host}{within}; fix: the network to it, or the store itself"
        if "Connect," in text:
            fix = "a firewall or security group that drops packets, the route, or AWS_ENDPOINT_URL"
            words = f"no connection to {host}{within}; fix: {fix}"
    elif problem := _found(r"InvalidCertificate\(\s*(\w+)", text):
        words = f"{_CERTIFICATE_PROBLEMS.get(problem, f'the certificate is {problem}')} ({host})"
    elif "InvalidContentType" in text:
        words = f"{host} answers without TLS; fix: write it with http://"
    elif "kind: Connect" in text or "kind: Request" in text:
        cause = _found(r'message: "([^"]+)"', text) or _first_sentence(text)
        words = (
            f"the connection to {host} broke: {cause}; fix: the network to it, or AWS_ENDPOINT_URL"
        )
    else:
        return StoreError, _first_sentence(text)
    return StoreUnavailable, words


def _status_and_code(status: int, code: str) -> str:
    words = [f"HTTP {status}" if status else "", code]
    return " ".join(filter(None, words))


def _first_sentence(text: str) -> str:
    return " ".join(text.split("Debug source")[0].split())[:300]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match:
        return match[1]
    return ""

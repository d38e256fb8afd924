"""Each answer of a store and each number of the operating system becomes one class of error and one
line.
"""

from __future__ import annotations

import errno
import os

import pytest
from obstore.exceptions import BaseError, GenericError, NotFoundError, PermissionDeniedError

from ebbflow.core.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from ebbflow.core.store.errors import as_store_errors

KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
HOST = "http://127.0.0.1:5501"
RENEW = "renew them (aws sso login), or let a role renew them"
QUOTA = "fix: delete old jobs, or raise the quota"
REGION = "bucket 'bucket' is in another region; fix: set "

LOCAL = "/store/k"


def raised(
    error: Exception,
    operation: str = "put",
    uri: str = "s3://bucket/k",
    otherwise: type[StoreError] = StoreError,
) -> StoreError:
    with pytest.raises(StoreError) as caught, as_store_errors(operation, uri, otherwise):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


def words_of(error: StoreError, operation: str = "put", uri: str = "s3://bucket/k") -> str:
    start = f"{operation} {uri}: "
    assert str(error).startswith(start)
    return str(error).removeprefix(start)


def answer(status: int, code: str = "", message: str = "") -> BaseError:
    """As obstore prints it, with the digits of other statuses in a port and in durations."""
    if code:
        body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    else:
        body = message
    return GenericError(
        f"Generic S3 error: Error performing PUT {HOST}/bucket/k in 501.7ms, after 4 retries, "
        f"max_retries: 4, retry_timeout: 429ms  - Server returned non-2xx status code: {status} "
        f"Words: {body}\n\nDebug source:\nGeneric {{ store: S3 }}"
    )


def no_answer(words: str, cause: str) -> BaseError:
    """As obstore prints a request that brought no answer: the cause is in the source's debug form."""
    return GenericError(
        f"Generic S3 error: Error performing PUT {HOST}/bucket/k{words} - HTTP error: error "
        f"sending request\n\nDebug source:\n{cause}"
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StoreError),
        (401, StoreForbidden),
        (402, StoreError),
        (403, StoreForbidden),
        (404, StoreError),
        (409, StoreError),
        (412, StoreError),
        (413, StoreFull),
        (414, StoreError),
        (428, StoreError),
        (429, StoreUnavailable),
        (430, StoreError),
        (499, StoreError),
        (500, StoreUnavailable),
        (503, StoreUnavailable),
        (506, StoreUnavailable),
        (507, StoreFull),
        (508, StoreUnavailable),
        (599, StoreUnavailable),
    ],
)
def test_a_status_without_a_code_decides_whether_a_retry_can_help(
    status: int, kind: type[StoreError]
) -> None:
    assert type(raised(answer(status))) is kind


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        (
            "EntityTooLarge",
            400,
            StoreFull,
            f"no space: the store is full (HTTP 400 EntityTooLarge); {QUOTA}",
        ),
        (
            "QuotaExceeded",
            403,
            StoreFull,
            f"no space: the store is full (HTTP 403 QuotaExceeded); {QUOTA}",
        ),
        (
            "InsufficientStorage",
            500,
            StoreFull,
            f"no space: the store is full (HTTP 500 InsufficientStorage); {QUOTA}",
        ),
        (
            "XMinioStorageFull",
            503,
            StoreFull,
            f"no space: the store is full (HTTP 503 XMinioStorageFull); {QUOTA}",
        ),
        (
            "AuthorizationHeaderMalformed",
            400,
            StoreMisconfigured,
            f"{REGION}AWS_REGION (aws s3api get-bucket-location --bucket bucket)",
        ),
        (
            "PermanentRedirect",
            301,
            StoreMisconfigured,
            f"{REGION}AWS_REGION (aws s3api get-bucket-location --bucket bucket)",
        ),
        (
            "IllegalLocationConstraintException",
            400,
            StoreMisconfigured,
            f"{REGION}AWS_REGION (aws s3api get-bucket-location --bucket bucket)",
        ),
        (
            "InvalidAccessKeyId",
            400,
            StoreForbidden,
            f"forbidden: unknown access key (InvalidAccessKeyId); fix: check {KEYS}, and the "
            "endpoint",
        ),
        (
            "SignatureDoesNotMatch",
            400,
            StoreForbidden,
            "forbidden: the secret key does not match the access key (SignatureDoesNotMatch); "
            f"fix: check {KEYS}",
        ),
        (
            "ExpiredToken",
            400,
            StoreForbidden,
            f"forbidden: the credentials have expired (ExpiredToken); fix: {RENEW}",
        ),
        (
            "InvalidToken",
            400,
            StoreForbidden,
            "forbidden: the session token is not valid (InvalidToken); fix: renew the "
            "credentials, or unset AWS_SESSION_TOKEN",
        ),
        (
            "RequestTimeTooSkewed",
            400,
            StoreForbidden,
            "forbidden: this machine's clock is more than 15 minutes off the store's "
            "(RequestTimeTooSkewed); fix: set the clock (chronyc makestep, or timedatectl "
            "set-ntp true)",
        ),
        (
            "AccessDenied",
            400,
            StoreForbidden,
            "forbidden (AccessDenied); fix: allow s3:PutObject on arn:aws:s3:::bucket/*, or "
            f"check {KEYS}",
        ),
        (
            "SlowDown",
            503,
            StoreUnavailable,
            f"{HOST} has an internal error after 4 retries (HTTP 503 SlowDown); fix: try again "
            "later, or ask the store's operator",
        ),
        (
            "NoSuchBucket",
            404,
            StoreMisconfigured,
            "there is no bucket 'bucket'; fix: create it, or correct the name or the endpoint "
            f"({HOST})",
        ),
    ],
)
def test_a_code_decides_whatever_the_status(
    code: str, status: int, kind: type[StoreError], words: str
) -> None:
    for error in (answer(status, code), answer(status, message=f"refused (code: {code})")):
        found = raised(error)
        assert type(found) is kind
        assert words_of(found) == words


def test_a_refusal_within_a_successful_answer_has_no_status() -> None:
    """A delete is one key of a request for many."""
    error = raised(
        GenericError("Generic S3 error: Got error for k: full (code: QuotaExceeded)"), "delete"
    )
    assert words_of(error, "delete") == f"no space: the store is full (QuotaExceeded); {QUOTA}"


@pytest.mark.parametrize(
    ("operation", "right"),
    [
        ("put", "s3:PutObject on arn:aws:s3:::bucket/*"),
        ("get", "s3:GetObject on arn:aws:s3:::bucket/*"),
        ("head", "s3:GetObject on arn:aws:s3:::bucket/*"),
        ("list", "s3:ListBucket on arn:aws:s3:::bucket"),
        ("delete", "s3:DeleteObject on arn:aws:s3:::bucket/*"),
    ],
)
def test_a_refusal_without_a_reason_names_the_right_that_the_operation_needs(
    operation: str, right: str
) -> None:
    error = raised(answer(403), operation, "s3://bucket")
    assert words_of(error, operation, "s3://bucket") == (
        f"forbidden (no reason given); fix: allow {right}, or check {KEYS}"
    )


@pytest.mark.parametrize("message", ["", "nothing in it"])
def test_a_missing_object_differs_from_a_missing_bucket(message: str) -> None:
    for error in (
        NotFoundError(f"Object at location k not found{message}"),
        FileNotFoundError(2, "No such file"),
    ):
        assert type(raised(error)) is ObjectNotFound
        assert words_of(raised(error)) == "no such object"
    bucket = raised(
        NotFoundError("Object at location k not found: <Error><Code>NoSuchBucket</Code></Error>")
    )
    assert type(bucket) is StoreMisconfigured
    assert words_of(bucket) == (
        "there is no bucket 'bucket'; fix: create it, or correct the name or the endpoint (the "
        "store)"
    )


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("the region is wrong; expecting 'eu-west-1'", f"{REGION}AWS_REGION=eu-west-1"),
        ("", f"{REGION}AWS_REGION (aws s3api get-bucket-location --bucket bucket)"),
    ],
)
def test_the_region_that_the_store_expects_is_named(message: str, words: str) -> None:
    assert words_of(raised(answer(400, "AuthorizationHeaderMalformed", message))) == words
    error = raised(GenericError(f"Received redirect without LOCATION: BareRedirect {message}"))
    assert type(error) is StoreMisconfigured and words_of(error) == words


def test_a_failed_source_of_credentials_is_quoted() -> None:
    start = "Generic S3 error: External AWS credential provider: "
    refused = raised(GenericError(f"{start}{'x' * 200}y\nmore"))
    assert type(refused) is StoreForbidden
    assert (
        words_of(refused)
        == f"forbidden: the credentials could not be renewed: {'x' * 200}; fix: {RENEW}"
    )
    hangs = raised(
        GenericError(
            f"{start}StoreUnavailable: the source did not answer: 5 s; fix: set AWS_PROFILE"
        )
    )
    assert type(hangs) is StoreUnavailable
    assert words_of(hangs) == "the source did not answer: 5 s; fix: set AWS_PROFILE"
    named = raised(GenericError(f"{start}KeyError: StoreUnavailable: x"))
    assert type(named) is StoreForbidden, "only a hanging source of ours is unavailable"


@pytest.mark.parametrize(
    ("duration", "cause", "words"),
    [
        (
            "",
            "dns error",
            f"the name of {HOST} does not resolve; fix: the endpoint (AWS_ENDPOINT_URL), or DNS",
        ),
        (
            "",
            "ConnectionRefused",
            f"connection refused by {HOST}; fix: start it, or correct AWS_ENDPOINT_URL",
        ),
        (
            " in 2.851919468s",
            "Timeout",
            f"no answer from {HOST} within 2.9 s; fix: the network to it, or the store itself",
        ),
        (
            " in 928.5ms",
            "TimedOut",
            f"no answer from {HOST} within 0.9 s; fix: the network to it, or the store itself",
        ),
        (
            "",
            "Timeout",
            f"no answer from {HOST} in time; fix: the network to it, or the store itself",
        ),
        (
            " in 2.8s",
            "Connect, TimedOut",
            f"no connection to {HOST} within 2.8 s; fix: a firewall or security group that drops "
            "packets, the route, or AWS_ENDPOINT_URL",
        ),
        (
            "",
            'kind: Request, source: Custom { message: "connection closed before message '
            'completed" }',
            f"the connection to {HOST} broke: connection closed before message completed; fix: "
            "the network to it, or AWS_ENDPOINT_URL",
        ),
        (
            "",
            "kind: Connect",
            f"the connection to {HOST} broke: Generic S3 error: Error performing PUT "
            f"{HOST}/bucket/k - HTTP error: error sending request; fix: the network to it, or "
            "AWS_ENDPOINT_URL",
        ),
    ],
)
def test_a_request_without_an_answer_may_be_retried_and_its_cause_is_named(
    duration: str, cause: str, words: str
) -> None:
    error = raised(no_answer(duration, cause))
    assert type(error) is StoreUnavailable
    assert words_of(error) == words


def test_an_unnamed_internal_store_error_shows_its_details() -> None:
    assert words_of(raised(GenericError("status code: 500"))) == (
        "the store has an internal error (HTTP 500); fix: try again later, or ask the store's "
        "operator"
    )


def test_an_unknown_store_error_is_one_line_without_source_code() -> None:
    error = raised(GenericError(f"first\n  second {'x' * 400} Debug source: third"))
    assert type(error) is StoreError
    assert words_of(error) == f"first second {'x' * 287}", "300 characters"


def local(error: Exception, otherwise: type[StoreError] = StoreError) -> StoreError:
    return raised(error, uri=LOCAL, otherwise=otherwise)


def full_words(number: int) -> str:
    return f"no space: {os.strerror(number)}; fix: free space, or a store on another disk"


def forbidden_words(number: int) -> str:
    return f"not allowed: {os.strerror(number)}; fix: the folder's owner and permissions"


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, StoreFull, full_words(errno.ENOSPC)),
        (errno.EDQUOT, StoreFull, full_words(errno.EDQUOT)),
        (errno.EFBIG, StoreFull, full_words(errno.EFBIG)),
        (errno.EACCES, StoreForbidden, forbidden_words(errno.EACCES)),
        (errno.EPERM, StoreForbidden, forbidden_words(errno.EPERM)),
        (
            errno.EROFS,
            StoreForbidden,
            f"not allowed: {os.strerror(errno.EROFS)}; fix: mount it for writing",
        ),
        (errno.ENOENT, ObjectNotFound, "no such object"),
        (errno.ENOTDIR, ObjectNotFound, "no such object"),
        (errno.EIO, StoreUnavailable, f"[Errno {errno.EIO}] {os.strerror(errno.EIO)}"),
        (errno.EISDIR, StoreUnavailable, f"[Errno {errno.EISDIR}] {os.strerror(errno.EISDIR)}"),
    ],
)
def test_a_number_of_the_operating_system_decides_in_a_folder(
    number: int, kind: type[StoreError], words: str
) -> None:
    """An unknown one is of the class that the caller names."""
    found = local(OSError(number, os.strerror(number)), StoreUnavailable)
    assert type(found) is kind
    assert words_of(found, uri=LOCAL) == words


@pytest.mark.parametrize("text", ["No space left (os error 28)", "Io { code: 28 }"])
def test_a_number_within_a_text_decides_in_a_folder_if_the_error_has_none(text: str) -> None:
    assert type(local(GenericError(text))) is StoreFull
    assert type(local(NotFoundError(text))) is StoreFull, "before what its class says"
    assert type(local(OSError(errno.EACCES, text))) is StoreForbidden, "its own number comes first"
    assert type(local(OSError(text))) is StoreFull


def test_a_folder_error_without_errno_is_named_by_its_class() -> None:
    assert type(local(NotFoundError("x"))) is ObjectNotFound
    assert type(local(PermissionDeniedError("x"))) is StoreError
    assert words_of(local(GenericError("a\n b")), uri=LOCAL) == "a b"


def test_other_exceptions_pass_unchanged() -> None:
    for error in (ValueError("x"), StoreFull("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, as_store_errors("put", LOCAL):
            raise error
        assert caught.value is error

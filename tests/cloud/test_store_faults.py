"""A store that is away, slow or refuses answers with one clear line, within the time it was given."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest

from ebbflow.core.errors import (
    Outcome,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from ebbflow.core.store import Store
from tests.support.faulty_s3 import Fault, closed_port, faulty_s3, swallowing_port

SECONDS = 3.0
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("k", b"1"),
    "get": lambda store: store.get("k"),
    "head": lambda store: store.head("k"),
    "list": lambda store: store.list("k"),
    "delete": lambda store: store.delete("k"),
}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-that-is-never-told")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], StoreError]]:
    """failing(endpoint, operation): the error of that operation, which must be one line and in
    time.
    """

    def ask(endpoint: str, operation: str) -> StoreError:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = Store.open("s3://bucket/prefix", request_timeout_seconds=SECONDS)
        began = time.monotonic()
        with pytest.raises(StoreError) as caught:
            OPERATIONS[operation](store)
        # A busy machine is late by a little; retries that know no deadline would be late by three
        # times as much.
        assert time.monotonic() - began <= 2 * SECONDS, "later than the deadline it was given"
        text = str(caught.value)
        assert text.startswith(f"{operation} s3://bucket/prefix/k: ") and "; fix: " in text, text
        assert "\n" not in text and len(text) < 400 and "never-told" not in text
        return caught.value

    yield ask


@pytest.mark.parametrize("operation", ["put", "list"])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda: nullcontext(closed_port()), r"connection refused by http://127.0.0.1:\d+"),
        (
            lambda: nullcontext("http://no-such-host.invalid"),
            "the name of http://no-such-host.invalid does not resolve",
        ),
        (swallowing_port, r"no connection to http://127.0.0.1:\d+ within 0.8 s"),
        (lambda: faulty_s3(Fault(seconds=60)), r"no answer from http://127.0.0.1:\d+ within 2.1 s"),
        (
            lambda: faulty_s3(Fault(503, "SlowDown")),
            r"has an internal error.* \(HTTP 503 SlowDown\)",
        ),
    ],
    ids=["refused", "no-name", "swallowed", "slow", "overloaded"],
)
def test_a_store_that_is_away(
    failing: Callable, place: Callable[[], AbstractContextManager[str]], words: str, operation: str
) -> None:
    with place() as endpoint:
        error = failing(endpoint, operation)
    assert type(error) is StoreUnavailable
    assert error.outcome is Outcome.FAILED
    assert re.search(words, str(error)), error


@pytest.mark.parametrize("operation", ["put", "get", "list", "delete"])
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault(403, "InvalidAccessKeyId"), StoreForbidden, "unknown access key"),
        (Fault(403, "RequestTimeTooSkewed"), StoreForbidden, "clock is more than 15 minutes off"),
        (Fault(400, "ExpiredToken"), StoreForbidden, "the credentials have expired"),
        (Fault(404, "NoSuchBucket"), StoreMisconfigured, "there is no bucket 'bucket'"),
        (Fault(301, "PermanentRedirect"), StoreMisconfigured, "is in another region"),
        (
            Fault(
                400, "AuthorizationHeaderMalformed", "the region is wrong; expecting 'eu-west-1'"
            ),
            StoreMisconfigured,
            "fix: set AWS_REGION=eu-west-1",
        ),
        (
            Fault(507, "InsufficientStorage"),
            StoreFull,
            r"no space: .* \(HTTP 507 InsufficientStorage\)",
        ),
        (Fault(413, "EntityTooLarge"), StoreFull, "no space"),
    ],
    ids=lambda value: value.code if isinstance(value, Fault) else None,
)
def test_a_store_that_refuses(
    failing: Callable, fault: Fault, kind: type, words: str, operation: str
) -> None:
    with faulty_s3(fault) as endpoint:
        error = failing(endpoint, operation)
    assert type(error) is kind
    assert re.search(words, str(error)), error


@pytest.mark.parametrize(
    ("operation", "action"),
    [
        ("put", "s3:PutObject"),
        ("get", "s3:GetObject"),
        ("head", "s3:GetObject"),
        ("list", "s3:ListBucket"),
        ("delete", "s3:DeleteObject"),
    ],
)
def test_a_missing_right_is_named_as_iam_names_it(
    failing: Callable, operation: str, action: str
) -> None:
    with faulty_s3(Fault(403, "AccessDenied")) as endpoint:
        error = failing(endpoint, operation)
    assert type(error) is StoreForbidden and f"fix: allow {action} on arn:aws:s3:::bucket" in str(
        error
    )


def test_a_short_trouble_is_lived_through(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(503, "SlowDown", times=2)
    with faulty_s3(fault) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        Store.open("s3://bucket", request_timeout_seconds=10).put("k", b"1")
    assert fault.requests == ["PUT /bucket/k"] * 3

"""Calls to AWS with a deadline, bounded retries and one-line errors.

botocore is imported only when a client is made. Its own retries are off because they ignore the
deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import typing_extensions

from ebbflow.core.errors import CloudError, CloudForbidden, CloudRefused, CloudUnavailable
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.retry import backoff_pauses, call_within, retry
from ebbflow.core.store.s3 import aws_settings

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.loaders import Loader

T = typing_extensions.TypeVar("T")
# An answer, or an item of a listing
Answer = typing_extensions.TypeVar("Answer", default=JsonObject)

# AWS's error codes for too many requests, which a later retry may cure.
_THROTTLED = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "TooManyRequestsException",
        "TooManyRequests",
        "SlowDown",
    }
)
_FORBIDDEN = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "UnauthorizedOperation",
        "AuthorizationError",
        "403",
        "Forbidden",
    }
)
_NOT_ACCEPTED = frozenset(
    {
        "AuthFailure",
        "InvalidClientTokenId",
        "InvalidAccessKeyId",
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "InvalidSignatureException",
        "UnrecognizedClientException",
        "IncompleteSignature",
        "RequestTimeTooSkewed",
    }
)
_NOT_IMPLEMENTED = 501  # an AWS emulator's answer to an operation that it lacks
_CONNECT_SECONDS = 4.0
_READ_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.3
_LONGEST_PAUSE_SECONDS = 5.0
# A retry within seconds seldom helps if nothing listens at the endpoint; it does if requests are
# throttled.
_TRIES_TO_REACH = 3
_MOST_PAGES = 2000
_NAMES_IN_A_REQUEST = 100
_AMAZONS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")


@dataclass(frozen=True)
class RequestDeadline:
    """The time by which a request to AWS must have ended, including its retries."""

    until: float  # the time, in seconds of the clock `monotonic`
    # Tests replace it and `sleep`
    monotonic: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @classmethod
    def after(cls, seconds: float) -> Self:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        return self.until - self.monotonic()


def aws_client(service: str, region: str | None = None) -> BaseClient:
    """Make a botocore client with short timeouts. botocore's own retries are off, since `call_aws`
    retries.

    region: None uses the region of the environment or of the AWS profile. AWS_ENDPOINT_URL and
    AWS_ENDPOINT_URL_<SERVICE> replace Amazon's endpoint. Raises CloudRefused if the AWS settings
    are unusable.
    """
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    retries = {"total_max_attempts": 1, "mode": "standard"}
    limits = Config(connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS, retries=retries)
    try:
        session = Session()
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        return session.create_client(
            service, region_name=region or aws_settings().region, config=limits
        )
    except (BotoCoreError, ValueError) as error:
        raise CloudRefused(
            f"{service}: no client: {_one_line(error)}; fix: the AWS_* settings or the profile"
        ) from error


def is_amazons(client: BaseClient) -> bool:
    """Return whether a client's endpoint belongs to Amazon rather than to an AWS emulator, such as
    a test server.
    """
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith(_AMAZONS)


def call_aws(
    client: BaseClient,
    operation: str,
    deadline: RequestDeadline,
    *,
    shape: type[Answer] | None = None,  # noqa: ARG001 (for the type checker)
    iam_action: str = "",
    **request: Json | datetime,
) -> Answer:
    """Send one request to AWS and return the answer. Retry with backoff while a retry may help.

    Args:
        operation: name of the client's method, such as "describe_jobs".
        deadline: limit for the request and all its retries.
        shape: type of the answer (`ebbflow.infra.aws.answers`), which is not checked.
        iam_action: the IAM action to name in errors, if its name differs from the operation's.

    Raises:
        CloudUnavailable: AWS could not be reached or did not answer in time.
        CloudForbidden: AWS rejects the credentials, or they lack a permission.
        CloudRefused: AWS rejects the request for another reason; `code` is AWS's error code.
    """
    question = _Request(client, operation, iam_action)

    def curable(error: Exception, tries: int) -> bool:
        _, most = _retry_reason(error, question)
        return most is None or tries < most

    def give_up(error: Exception, tries: int) -> Exception:
        reason, _ = _retry_reason(error, question)
        return CloudUnavailable(
            f"{question}: {reason}" + (f" ({tries} tries)" if tries > 1 else "")
        )

    return retry(
        lambda: within(
            deadline.left(), lambda: getattr(client, operation)(**request), str(question)
        ),
        left=deadline.left,
        curable=curable,
        give_up=give_up,
        pauses=backoff_pauses(
            first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
        ),
        sleep=deadline.sleep,
    )


def paginate(
    client: BaseClient,
    operation: str,
    key: str,
    deadline: RequestDeadline,
    *,
    shape: type[Answer],  # noqa: ARG001 (for the type checker)
    iam_action: str = "",
    token: str = "nextToken",
    **request: Json | datetime,
) -> Iterator[Answer]:
    """Yield the items of a listing, page by page, for at most 2,000 pages.

    Raises CloudError like `call_aws`.

    The items are in the field `key` of a page. The next page is requested once the caller has
    consumed the items of the current page.

    shape: type of an item (`ebbflow.infra.aws.answers`), which is not checked.
    token: name of the field that requests the next page. It is "nextToken", "NextToken" or
    "Marker", depending on the service.
    """
    following: str | None = None
    for _ in range(_MOST_PAGES):
        if following is None:
            more = {}
        else:
            more = {token: following}
        answer = call_aws(
            client,
            operation,
            deadline,
            shape=dict[str, list[Answer] | str | None],
            iam_action=iam_action,
            **request,
            **more,
        )
        items = answer.get(key)
        if isinstance(items, list):
            yield from items
        before = following
        found = answer.get(token)
        following = found if isinstance(found, str) and found else None
        if following is None or following == before:
            return


def describe_in_parts(
    client: BaseClient,
    operation: str,
    plural: str,
    names: Sequence[str],
    deadline: RequestDeadline,
    *,
    shape: type[Answer],  # noqa: ARG001 (for the type checker)
) -> list[Answer]:
    """Describe resources by name, with at most 100 names per request (Batch's limit).

    Return the descriptions.

    plural: name of the request parameter for the resource names, and of the response field with the
        descriptions.
    shape: type of a description (`ebbflow.infra.aws.answers`), which is not checked.
    """
    found: list[Answer] = []
    for start in range(0, len(names), _NAMES_IN_A_REQUEST):
        part: dict[str, Json] = {plural: list(names[start : start + _NAMES_IN_A_REQUEST])}
        answer = call_aws(
            client,
            operation,
            deadline,
            shape=dict[str, list[Answer] | None],
            iam_action="",
            **part,
        )
        found += answer.get(plural) or []
    return found


def required_field(value: T | None, name: str, client: BaseClient, operation: str) -> T:
    """Return the value of a required field of AWS's answer.

    Raises CloudRefused, which names the call and the field, if the value is None. An answer with
    status 200 may still lack a field if it comes from a proxy, an AWS emulator or another version
    of the service.
    """
    if value is None:
        raise CloudRefused(f"{request_name(client, operation)}: the answer lacks {name}")
    return value


def is_throttled(status: int, code: str) -> bool:
    """Return whether an HTTP status and error code mean "too many requests"."""
    return code in _THROTTLED or status == 429


def request_name(client: BaseClient, operation: str) -> str:
    """Return a request's name for messages, such as "batch:DescribeJobQueues in us-east-1"."""
    return str(_Request(client, operation, ""))


def within(seconds: float, find: Callable[[], T], what: str) -> T:
    """Call `find` and return its result, with a limit on its duration.

    Raises CloudUnavailable if the call takes longer than `seconds`.

    what: name of the call in the error message.
    """
    allowed = max(0.0, seconds)  # a caller's own deadline may have passed
    return call_within(
        allowed, find, what, lambda: CloudUnavailable(f"{what}: timed out after {allowed:.3g} s")
    )


@cache
def _loader(path: str | None) -> Loader:
    """Return a cached loader of botocore's service descriptions.

    Reading EC2's description alone takes a second.
    """
    from botocore.loaders import create_loader

    return create_loader(path)


class _Request:
    def __init__(self, client: BaseClient, operation: str, iam_action: str) -> None:
        meta = client.meta
        self.iam_action = (
            iam_action
            or f"{meta.service_model.signing_name}:{meta.method_to_api_mapping[operation]}"
        )
        self.region = meta.region_name

    def __str__(self) -> str:
        return f"{self.iam_action} in {self.region}"


def _retry_reason(error: Exception, question: _Request) -> tuple[str, int | None]:
    """Return why a failed request may be retried, and the maximum number of tries.

    A maximum of None means that only the deadline limits the tries. Raises CloudError if a retry
    cannot help.
    """
    if isinstance(error, CloudError):
        raise error
    from xml.etree.ElementTree import ParseError

    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if is_throttled(status, code):
            return f"throttled ({code})", None
        if status >= 500 and status != _NOT_IMPLEMENTED:
            return f"AWS has an internal error ({status} {code})", None
        if code in _FORBIDDEN:
            fix = f"allow {question.iam_action} for these credentials"
            raise CloudForbidden(f"{question}: denied ({code}); fix: {fix}") from error
        if code in _NOT_ACCEPTED:
            why = f"the credentials are not accepted ({code})"
            fix = "renew them (aws sso login), set the clock, or enable the region"
            raise CloudForbidden(f"{question}: {why}; fix: {fix}") from error
        message = error.response.get("Error", {}).get("Message", "")
        raise CloudRefused(
            f"{question}: refused: {code}: {_one_line(message)}", code=code
        ) from error
    if isinstance(error, NoConnection | HTTPClientError):
        return f"unreachable: {_one_line(error)}", _TRIES_TO_REACH
    if isinstance(error, NoCredentialsError):
        raise CloudForbidden(
            f"{question}: no AWS credentials; fix: set AWS_PROFILE or keys, or give a role"
        ) from error
    if isinstance(error, BotoCoreError):  # such as incomplete credentials or an unknown parameter
        raise CloudRefused(f"{question}: {_one_line(error)}") from error
    # The endpoint belongs to another service, or to none
    if isinstance(error, ResponseParserError | ParseError):
        raise CloudRefused(
            f"{question}: the endpoint is not this service: {_one_line(error)}"
        ) from error
    raise error


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")

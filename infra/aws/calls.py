"""Questions to AWS that end: few and bounded retries before a deadline, and errors that say what is missing.

botocore is imported when a client is made, and only then. Its own retries are turned off: they know no deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ebbflow.infra.errors import CloudError, CloudForbidden, CloudRefused, CloudUnavailable
from ebbflow.infra.retry import Backoff, call_within, retry
from ebbflow.infra.store.s3 import aws_settings

T = TypeVar("T")

# What AWS says when it is asked too often, or is in trouble itself: asking again later may help.
_THROTTLED = frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
     "RequestThrottledException", "TooManyRequestsException", "TooManyRequests", "SlowDown"}
)  # fmt: skip
_FORBIDDEN = frozenset(
    {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403", "Forbidden"}
)
_NOT_ACCEPTED = frozenset(
    {"AuthFailure", "InvalidClientTokenId", "InvalidAccessKeyId", "ExpiredToken", "ExpiredTokenException",
     "RequestExpired", "SignatureDoesNotMatch", "InvalidSignatureException", "UnrecognizedClientException",
     "IncompleteSignature", "RequestTimeTooSkewed"}
)  # fmt: skip
_NOT_IMPLEMENTED = 501  # by a stand-in for AWS: it will not know the request a second later either
_CONNECT_SECONDS, _READ_SECONDS = 4.0, 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.3, 5.0
# Nobody there is seldom cured by asking again within seconds; a limit of requests is.
_TRIES_TO_REACH = 3
_MOST_PAGES = 2000
_AMAZONS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")


@dataclass(frozen=True)
class RequestDeadline:
    """Until when to ask. until: in the time of `monotonic`, seconds."""

    until: float
    monotonic: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @classmethod
    def after(cls, seconds: float) -> RequestDeadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        return self.until - self.monotonic()


def aws_client(service: str, region: str | None = None) -> Any:
    """Make a client with short time-outs and no retries of its own, since `call_aws` retries.

    AWS_ENDPOINT_URL and AWS_ENDPOINT_URL_<SERVICE> lead elsewhere. Raises CloudRefused for settings that make none.
    """
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    retries = {"total_max_attempts": 1, "mode": "standard"}
    limits = Config(connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS, retries=retries)
    try:
        session = Session()
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        return session.create_client(service, region_name=region or aws_settings().region, config=limits)
    except (BotoCoreError, ValueError) as error:
        raise CloudRefused(
            f"{service}: no client: {_one_line(error)}; fix: the AWS_* settings or the profile"
        ) from error


def is_amazons(client: Any) -> bool:
    """Whether a client asks Amazon, and not a stand-in that AWS_ENDPOINT_URL or its like leads to."""
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith(_AMAZONS)


@cache
def _loader(path: str | None) -> Any:
    """The descriptions of services, read once: that of EC2 alone takes a second."""
    from botocore.loaders import create_loader

    return create_loader(path)


def call_aws(
    client: Any, operation: str, deadline: RequestDeadline, *, iam_action: str = "", **request: Any
) -> Mapping[str, Any]:
    """The answer to one request, asked again after a growing pause while that may help.

    right: the IAM action that is needed, where it is not called as the operation. Raises CloudUnavailable without an
    answer in time, CloudForbidden without the right or with credentials that are not accepted, CloudRefused when
    AWS rejects the request (`code` is AWS's error code).
    """
    question = _Request(client, operation, iam_action)
    return retry(
        lambda: within(deadline.left(), lambda: getattr(client, operation)(**request), str(question)),
        Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS),
        left=deadline.left,
        sleep=deadline.sleep,
        judge=lambda error: _retry_reason(error, question),
        give_up=lambda reason: CloudUnavailable(f"{question}: {reason}"),
    )


def paginate(
    client: Any,
    operation: str,
    key: str,
    deadline: RequestDeadline,
    *,
    iam_action: str = "",
    token: str = "nextToken",
    **request: Any,
) -> Iterator[Any]:
    """Yield the entries under `key` of all pages. token: what the service calls the next page's mark.

    Raises as `call_aws` does.
    """
    following: str | None = None
    for _ in range(_MOST_PAGES):
        more = {} if following is None else {token: following}
        answer = call_aws(client, operation, deadline, iam_action=iam_action, **request, **more)
        yield from answer.get(key) or []
        before, following = following, answer.get(token) or None
        if following is None or following == before:
            return


def required_field(answer: Mapping[str, Any], path: str, client: Any, operation: str) -> Any:
    """What an answer holds under a dotted path. Raises CloudRefused, which names the call and what is missing: a 200
    with nothing in it comes from stand-ins for AWS, proxies and versions of a service that botocore does not know.
    """
    found: Any = answer
    for at, name in enumerate(names := path.split("."), start=1):
        found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            raise CloudRefused(f"{request_name(client, operation)}: the answer lacks {'.'.join(names[:at])}")
    return found


def is_throttled(status: int, code: str) -> bool:
    """Whether an answer's HTTP status and code say that AWS is asked too often."""
    return code in _THROTTLED or status == 429


def request_name(client: Any, operation: str) -> str:
    """How a request is called in messages."""
    return str(_Request(client, operation, ""))


def within(seconds: float, find: Callable[[], T], what: str) -> T:
    """What `find` returns or raises. Raises CloudUnavailable when there is no answer within `seconds`."""
    return call_within(seconds, find, what, lambda: CloudUnavailable(f"{what}: no answer within {seconds:.3g} s"))


class _Request:
    """How a request is called in messages: "batch:DescribeJobQueues in us-east-1"."""

    def __init__(self, client: Any, operation: str, iam_action: str) -> None:
        meta = client.meta
        self.iam_action = iam_action or f"{meta.service_model.signing_name}:{meta.method_to_api_mapping[operation]}"
        self.region = meta.region_name

    def __str__(self) -> str:
        return f"{self.iam_action} in {self.region}"


def _retry_reason(error: Exception, question: _Request) -> tuple[str, int | None]:
    """The reason in words, and how often to ask in all (None: while there is time); raises what cannot be cured."""
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
            return f"AWS is in trouble itself ({status} {code})", None
        if code in _FORBIDDEN:
            fix = f"allow {question.iam_action} to whoever these credentials belong to"
            raise CloudForbidden(f"{question}: denied ({code}); fix: {fix}") from error
        if code in _NOT_ACCEPTED:
            why = f"the credentials are not accepted ({code})"
            fix = "renew them (aws sso login), set the clock, or enable the region"
            raise CloudForbidden(f"{question}: {why}; fix: {fix}") from error
        said = error.response.get("Error", {}).get("Message", "")
        raise CloudRefused(f"{question}: refused: {code}: {_one_line(said)}", code=code) from error
    if isinstance(error, NoConnection | HTTPClientError):
        return f"cannot be reached: {_one_line(error)}", _TRIES_TO_REACH
    if isinstance(error, NoCredentialsError):
        raise CloudForbidden(f"{question}: no AWS credentials; fix: set AWS_PROFILE or keys, or give a role") from error
    if isinstance(error, BotoCoreError):  # half of the credentials, a parameter that the API does not know
        raise CloudRefused(f"{question}: {_one_line(error)}") from error
    if isinstance(error, ResponseParserError | ParseError):  # a stand-in for AWS that has another service, or none
        raise CloudRefused(f"{question}: what answers there is not this service: {_one_line(error)}") from error
    raise error


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")

"""Signature Version 4, checked as S3 does: of the request, and of each chunk where the body is
signed in chunks.

Source: AWS, "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)".
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlsplit

from tests.support.s3.refusals import Refused
from tests.support.s3.request import Request

ACCESS_KEY = "test-access"
SECRET_KEY = "test-secret"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_SKEW_SECONDS = 900
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 +Credential=(?P<credential>[^,]+), *SignedHeaders=(?P<headers>[^,]+), "
    r"*Signature=(?P<sum>\w+)"
)


class Signature:
    """Of one request that has passed the check; signs the chunks of its body."""

    def __init__(self, request: Request) -> None:
        """Raises Refused: AccessDenied, InvalidAccessKeyId, RequestTimeTooSkewed,
        SignatureDoesNotMatch.
        """
        found = _AUTHORIZATION.fullmatch(request.header("authorization") or "")
        if found is None:
            raise Refused("AccessDenied", "no Authorization header of AWS4-HMAC-SHA256")
        access_key, *scope = found["credential"].split("/")
        if access_key != ACCESS_KEY:
            raise Refused("InvalidAccessKeyId", f"there is no access key {access_key}")
        if len(scope) != 4 or scope[2:] != ["s3", "aws4_request"]:
            raise Refused("AccessDenied", f"the scope of the signature is {'/'.join(scope)}")
        self._time = request.header("x-amz-date") or ""
        self._scope = "/".join(scope)
        self._check_time(scope[0])
        self._key = _derived_key(*scope)
        self.value = self._sign(
            "AWS4-HMAC-SHA256", hashlib.sha256(_canonical(request, found["headers"])).hexdigest()
        )
        if not hmac.compare_digest(self.value, found["sum"]):
            raise Refused(
                "SignatureDoesNotMatch",
                "the signature is not that of this request and this secret key",
            )

    def chunk(self, previous: str, data: bytes) -> str:
        """The signature of a chunk that follows the one (or the request) with the signature
        `previous`.
        """
        hashes = f"{previous}\n{EMPTY_SHA256}\n{hashlib.sha256(data).hexdigest()}"
        return self._sign("AWS4-HMAC-SHA256-PAYLOAD", hashes)

    def trailer(self, previous: str, canonical: bytes) -> str:
        """The signature of the trailers after the last chunk."""
        return self._sign(
            "AWS4-HMAC-SHA256-TRAILER", f"{previous}\n{hashlib.sha256(canonical).hexdigest()}"
        )

    def _check_time(self, day: str) -> None:
        try:
            at = datetime.strptime(self._time, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:
            raise Refused("AccessDenied", f"x-amz-date is {self._time!r}") from None
        if abs(
            (datetime.now(UTC) - at).total_seconds()
        ) > _SKEW_SECONDS or not self._time.startswith(day):
            raise Refused("RequestTimeTooSkewed", f"the request is of {self._time}, scope {day}")

    def _sign(self, kind: str, text: str) -> str:
        return hmac.new(
            self._key, f"{kind}\n{self._time}\n{self._scope}\n{text}".encode(), "sha256"
        ).hexdigest()


def check_payload(request: Request) -> None:
    """A body that was signed as a whole must have the stated SHA-256."""
    stated = request.header("x-amz-content-sha256") or ""
    if not re.fullmatch(r"[0-9a-f]{64}", stated):
        return
    actual = hashlib.sha256(request.body).hexdigest()
    if actual != stated:
        raise Refused(
            "XAmzContentSHA256Mismatch", f"the body's SHA-256 is {actual}, signed was {stated}"
        )


def _canonical(request: Request, signed: str) -> bytes:
    query = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(urlsplit(request.target).query, keep_blank_values=True)
    )
    headers = []
    for name in signed.split(";"):
        value = request.headers.get(name)
        if value is None:
            raise Refused("SignatureDoesNotMatch", f"{name} is signed and was not sent")
        headers.append(f"{name}:{' '.join(value.split())}\n")
    if "host" not in signed.split(";"):
        raise Refused("SignatureDoesNotMatch", "host must be signed")
    lines = [
        request.method,
        quote(request.path, safe="/-_.~"),
        "&".join(f"{name}={value}" for name, value in query),
        "".join(headers),
        signed,
        request.header("x-amz-content-sha256") or "",
    ]
    return "\n".join(lines).encode()


def _derived_key(day: str, region: str, service: str, end: str) -> bytes:
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (day, region, service, end):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return key

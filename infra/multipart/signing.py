"""AWS Signature Version 4 for S3, with an unsigned payload: checksums guard the bytes, in a quarter of the time.

Source: AWS, "Signature Calculations for the Authorization Header: Transferring Payload in a Single Chunk".
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from urllib.parse import quote

from ebbflow.infra.multipart.account import Account

_PAYLOAD = "UNSIGNED-PAYLOAD"


def signed_headers(
    account: Account, method: str, path: str, query: str, headers: Mapping[str, str], *, now: float
) -> dict[str, str]:
    """`headers`, which must have "host", with those of the signature. path and query: encoded as they are sent."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    known = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    known |= {"x-amz-date": stamp, "x-amz-content-sha256": _PAYLOAD}
    if not account.access_key:
        return known
    if account.token:
        known["x-amz-security-token"] = account.token
    names = sorted(known)
    lines = [f"{name}:{known[name]}\n" for name in names]
    request = "\n".join([method, path, query, "".join(lines), ";".join(names), _PAYLOAD])
    scope = f"{stamp[:8]}/{account.region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{account.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    credential = f"Credential={account.access_key}/{scope}"
    known["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return known


def encoded_query(parameters: Mapping[str, str]) -> str:
    """Sorted by name, as it is signed and sent."""
    return "&".join(f"{quote(name, safe='-_.~')}={quote(parameters[name], safe='-_.~')}" for name in sorted(parameters))


def encoded_path(key: str) -> str:
    return quote(f"/{key.lstrip('/')}", safe="/-_.~")

"""The instance metadata service of EC2, asked by version 2: a token by PUT first, each request within a deadline.

Who the instance is (`infra.instance`), what preflight tries (`infra.checks.machine`) and notices that it is about to be
taken away (`ebbflow.infra.notices`) are asked of it by this one client.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
MODE_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
HOP_LIMIT_FIX = (
    "in a container, allow one hop more: aws ec2 modify-instance-metadata-options --instance-id ID "
    "--http-put-response-hop-limit 2"
)
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_ENDPOINT, _ENDPOINT_IPV6 = "http://169.254.169.254", "http://[fd00:ec2::254]"
# Any of them says that AWS has started this process.
_AWS_VARIABLES = ("AWS_BATCH_JOB_ID", "ECS_CONTAINER_METADATA_URI_V4", "AWS_EXECUTION_ENV")
_LARGEST_ANSWER = 65536
_SHORTEST_SECONDS = 0.05


def endpoint(environment: Mapping[str, str]) -> str:
    """Where the service is, by the variables that every AWS tool knows."""
    ipv6 = environment.get(MODE_VARIABLE, "").lower() == "ipv6"
    return (environment.get(ENDPOINT_VARIABLE) or (_ENDPOINT_IPV6 if ipv6 else _ENDPOINT)).rstrip("/")


def metadata_unavailable_reason(environment: Mapping[str, str], system: Path = Path("/")) -> str:
    """Why nobody need ask, or "": asking the network would cost a machine elsewhere its time-out.

    system: where /sys lies, whose firmware tells an instance from another machine.
    """
    if environment.get(DISABLED_VARIABLE, "").lower() == "true":
        return f"{DISABLED_VARIABLE} is true"
    if environment.get(ENDPOINT_VARIABLE) or any(environment.get(name) for name in _AWS_VARIABLES):
        return ""
    vendor, xen = (_text(system / path) for path in ("sys/class/dmi/id/sys_vendor", "sys/hypervisor/uuid"))
    return "" if "Amazon" in vendor or xen.lower().startswith("ec2") else "this machine is not on EC2"


class MetadataService:
    """One service at one address. Proxies of the environment are not for it."""

    def __init__(self, address: str) -> None:
        self.endpoint = address.rstrip("/")

    def ask(self, method: str, path: str, headers: Mapping[str, str], *, seconds: float) -> tuple[int, str]:
        """Status and body. Raises TimeoutError when connected and not answered in time, ConnectionError or another
        OSError when not even connected, HTTPException for what is not HTTP, ValueError for an address that is none."""
        limit = time.monotonic() + seconds
        parts = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_left(limit))
        try:
            try:
                connection.connect()
            except TimeoutError:
                raise ConnectionError("no connection within its deadline") from None
            connection.sock.settimeout(_left(limit))
            connection.request(method, parts.path + path, headers=dict(headers))
            answer = connection.getresponse()
            body = b""
            while len(body) < _LARGEST_ANSWER and (piece := answer.read1(4096)):
                body += piece
                if time.monotonic() > limit:  # one that drips must not hold anybody up either
                    raise TimeoutError("an answer that does not end")
            return answer.status, body.decode("utf-8", "replace").strip()
        finally:
            connection.close()

    def token(self, *, ttl_seconds: int, seconds: float) -> tuple[int, str]:
        """A session of version 2: status and token. Raises as `ask` does."""
        return self.ask("PUT", "/latest/api/token", {_TTL_HEADER: str(ttl_seconds)}, seconds=seconds)

    def get(self, path: str, token: str, *, seconds: float) -> tuple[int, str]:
        """What lies at /latest/PATH; without a token: by version 1. Raises as `ask` does."""
        return self.ask("GET", f"/latest/{path}", {TOKEN_HEADER: token} if token else {}, seconds=seconds)


def _left(limit: float) -> float:
    return max(_SHORTEST_SECONDS, limit - time.monotonic())


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

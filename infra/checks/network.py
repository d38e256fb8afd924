"""Checks of what a node asks and speaks through: the metadata service of EC2, and named network interfaces."""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from infra.preflight import Finding, PreflightContext

_ENDPOINT = "http://169.254.169.254"
_ENDPOINT_IPV6 = "http://[fd00:ec2::254]"
_ALL_ANSWERS_SECONDS = 1.8
_TOKEN_TTL_SECONDS = 60
_PATH = "/latest/meta-data/instance-id"
_NOTICE = "/latest/meta-data/spot/instance-action"
_OPTIONS = "aws ec2 modify-instance-metadata-options --instance-id ID"
_VENDOR_FILES = ("/sys/class/dmi/id/sys_vendor", "/sys/class/dmi/id/board_asset_tag", "/sys/hypervisor/uuid")
_INTERFACES = Path("/sys/class/net")


def check_imds(context: PreflightContext) -> Finding:
    """EC2's metadata service: where spot notices and a role's credentials come from. Only ever read, with a token."""
    given = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return Finding.skipped("AWS_EC2_METADATA_DISABLED is true: neither spot notices nor a role's credentials")
    if not given and not _on_ec2():
        return Finding.skipped("this machine is not on EC2")
    ipv6 = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
    service = _Metadata(given or (_ENDPOINT_IPV6 if ipv6 else _ENDPOINT))
    try:
        return _ask(service)
    except TimeoutError:
        detail = f"{service.endpoint} accepts connections and answers none in time: its answer may not leave the host"
        return Finding.failed(detail, f"in a container, allow one hop more: {_OPTIONS} --http-put-response-hop-limit 2")
    except (OSError, http.client.HTTPException, ValueError) as error:
        detail = f"{service.endpoint} cannot be asked: {error}; spot notices would not be heard"
        return Finding.failed(detail, f"let {service.endpoint} through, or: {_OPTIONS} --http-endpoint enabled")


def check_interfaces(context: PreflightContext) -> Finding:
    """The interfaces that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name exist on this machine."""
    if not _INTERFACES.is_dir():
        return Finding.skipped(f"this system has no {_INTERFACES}")
    there = sorted(name for _, name in socket.if_nameindex())
    named = {name: os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    wrong = [
        f"{variable}={value} names no interface of this machine ({', '.join(there)})"
        for variable, value in named.items()
        if value and not _matches(variable, value, there)
    ]
    if wrong:
        outward = next((name for name in there if name != "lo"), "lo")
        return Finding.failed(
            "\n".join(wrong), f"unset it, or name one that leads to the other nodes, such as {outward}"
        )
    given = ", ".join(f"{variable}={value}" for variable, value in named.items() if value)
    return Finding.passed(f"{given or 'none is named: gloo and NCCL choose'}")


class _Metadata:
    """One service, asked a few times within one deadline. Proxies of the environment are not for this address."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._limit = time.monotonic() + _ALL_ANSWERS_SECONDS

    def ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        """Status and body. Raises TimeoutError when connected and not answered, OSError when not even connected."""
        parts = urlsplit(self.endpoint)
        left = max(0.05, self._limit - time.monotonic())
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=left)
        try:
            try:
                connection.connect()
            except TimeoutError:
                raise ConnectionError("no connection within its deadline") from None
            connection.request(method, parts.path + path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(4096).decode("utf-8", "replace").strip()
        finally:
            connection.close()


def _ask(service: _Metadata) -> Finding:
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_SECONDS)}
    status, token = service.ask("PUT", "/latest/api/token", ttl)
    if status == 403:
        return Finding.failed("the metadata service is turned off (403)", f"{_OPTIONS} --http-endpoint enabled")
    if status != 200 or not token:
        detail = f"{service.endpoint} gives no token: status {status}; this is no metadata service of version 2"
        return Finding.failed(detail, "see AWS_EC2_METADATA_SERVICE_ENDPOINT, and what else listens there")
    session = {"X-aws-ec2-metadata-token": token}
    status, instance = service.ask("GET", _PATH, session)
    if status != 200:
        return Finding.failed(
            f"{_PATH} answers {status} to a fresh token", "see what stands between this and the service"
        )
    status, notice = service.ask("GET", _NOTICE, session)
    if status == 200:
        return Finding.failed(f"{instance} is about to be taken away: {notice}", "start on another instance")
    status, _ = service.ask("GET", _PATH, {})
    if status == 200:
        detail = f"{instance}: version 1 of the metadata service answers without a token, to whoever can make a request"
        return Finding.failed(detail, f"{_OPTIONS} --http-tokens required")
    return Finding.passed(f"{instance}: tokens work, version 1 is refused ({status}), no spot notice is pending")


def _on_ec2() -> bool:
    """By what the firmware tells; asking the network would cost a machine elsewhere its time-out."""
    for path in _VENDOR_FILES:
        try:
            text = Path(path).read_text().strip().lower()
        except OSError:
            continue
        if text.startswith(("amazon ec2", "i-", "ec2")):
            return True
    return False


def _matches(variable: str, value: str, there: list[str]) -> bool:
    """gloo takes names. NCCL takes prefixes, all but them after '^', and whole names after '='.

    (NCCL user guide, "NCCL_SOCKET_IFNAME")
    """
    if variable.startswith("GLOO"):
        return all(name.strip() in there for name in value.split(","))
    names = [name.strip().partition(":")[0] for name in value.lstrip("^=").split(",") if name.strip()]
    if value.startswith("="):
        return any(name in there for name in names)
    found = [name for name in there if name.startswith(tuple(names))]
    return len(found) < len(there) if value.startswith("^") else bool(found)

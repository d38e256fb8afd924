"""Checks of what a node asks and speaks through: the metadata service of EC2, and named network interfaces."""

from __future__ import annotations

import http.client
import os
import socket
import time
from pathlib import Path

from infra.metadata import HOP_LIMIT_FIX, MetadataService, endpoint, why_not_asked
from infra.preflight import Finding, PreflightContext

_ALL_ANSWERS_SECONDS = 1.8
_TOKEN_TTL_SECONDS = 60
_PATH = "meta-data/instance-id"
_NOTICE = "meta-data/spot/instance-action"
_OPTIONS = "aws ec2 modify-instance-metadata-options --instance-id ID"
_INTERFACES = Path("/sys/class/net")


def check_imds(context: PreflightContext) -> Finding:
    """EC2's metadata service: where spot notices and a role's credentials come from. Only ever read, with a token."""
    if reason := why_not_asked(os.environ):
        return Finding.skipped(f"{reason}: neither spot notices nor a role's credentials")
    service = MetadataService(endpoint(os.environ))
    try:
        return _ask(service)
    except TimeoutError:
        detail = f"{service.endpoint} accepts connections and answers none in time: its answer may not leave the host"
        return Finding.failed(detail, HOP_LIMIT_FIX)
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


def _ask(service: MetadataService) -> Finding:
    """All answers within one deadline."""
    limit = time.monotonic() + _ALL_ANSWERS_SECONDS

    def get(path: str, token: str) -> tuple[int, str]:
        return service.get(path, token, seconds=limit - time.monotonic())

    status, token = service.token(ttl_seconds=_TOKEN_TTL_SECONDS, seconds=limit - time.monotonic())
    if status == 403:
        return Finding.failed("the metadata service is turned off (403)", f"{_OPTIONS} --http-endpoint enabled")
    if status != 200 or not token:
        detail = f"{service.endpoint} gives no token: status {status}; this is no metadata service of version 2"
        return Finding.failed(detail, "see AWS_EC2_METADATA_SERVICE_ENDPOINT, and what else listens there")
    status, instance = get(_PATH, token)
    if status != 200:
        return Finding.failed(
            f"{_PATH} answers {status} to a fresh token", "see what stands between this and the service"
        )
    status, notice = get(_NOTICE, token)
    if status == 200:
        return Finding.failed(f"{instance} is about to be taken away: {notice}", "start on another instance")
    status, _ = get(_PATH, "")
    if status == 200:
        detail = f"{instance}: version 1 of the metadata service answers without a token, to whoever can make a request"
        return Finding.failed(detail, f"{_OPTIONS} --http-tokens required")
    return Finding.passed(f"{instance}: tokens work, version 1 is refused ({status}), no spot notice is pending")


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

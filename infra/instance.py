"""Which machine this is, as far as it can be known: what joins a node of the ledger to a line of the bill.

Asked in this order: variables that whoever starts the container sets, the instance metadata service (IMDSv2, only where
something says that this is EC2), and what a Nitro instance's firmware shows. Nothing is asked of the network elsewhere.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.metadata import MetadataService, endpoint, metadata_unavailable_reason

# What a pod's downward API or a job definition can set: {field: variable}.
VARIABLES = {
    "instance_id": "EBBFLOW_INSTANCE_ID",
    "instance_type": "EBBFLOW_INSTANCE_TYPE",
    "zone": "EBBFLOW_ZONE",
    "zone_id": "EBBFLOW_ZONE_ID",
    "market": "EBBFLOW_MARKET",
}
_MARKETS = {"spot": "spot", "on-demand": "on_demand"}
_TOKEN_SECONDS = 60
HINT = (
    "fix: let containers reach the metadata service (HttpPutResponseHopLimit 2 in the launch template), or set "
    f"{VARIABLES['instance_id']}, {VARIABLES['instance_type']} and {VARIABLES['zone']}"
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of it; None: not known. uptime_seconds: since it booted. market: spot or on_demand.

    batch_job_id: of the AWS Batch job that this container runs, without a node's number; None: it runs none.
    identified_by: what said so: environment, metadata, firmware; empty: nobody. problem: why an instance of AWS stays
    unknown; empty elsewhere.
    """

    instance_id: str | None = None
    instance_type: str | None = None
    zone: str | None = None
    zone_id: str | None = None
    region: str | None = None
    market: str | None = None
    uptime_seconds: float | None = None
    batch_job_id: str | None = None
    identified_by: str = ""
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """What is known, and nothing of a machine that is nobody's instance."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def identify(
    environment: Mapping[str, str] = os.environ, *, system: Path = Path("/"), deadline_seconds: float = 2.0
) -> Machine:
    """This machine. Never raises, and returns within the deadline. system: where /proc and /sys lie."""
    job = environment.get("AWS_BATCH_JOB_ID", "").split("#")[0]  # of a node of several: "<job>#<node>"
    return replace(_identify(environment, system, deadline_seconds), batch_job_id=job or None)


def _identify(environment: Mapping[str, str], system: Path, deadline_seconds: float) -> Machine:
    told = {name: environment.get(variable) or None for name, variable in VARIABLES.items()}
    found: dict[str, Any] = {}
    source, problem = "environment", ""
    if told["instance_id"] is None and not metadata_unavailable_reason(environment, system):
        source = "metadata"
        try:
            found = _metadata(MetadataService(endpoint(environment)), deadline_seconds)
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            source, found = "firmware", _firmware(system)
            problem = "" if found else f"the instance metadata service did not answer: {error!r}"[:300]
    known = {**found, **{name: value for name, value in told.items() if value}}
    if known.get("market"):  # a label of Kubernetes says ON_DEMAND, the metadata service on-demand
        known["market"] = _MARKETS.get(known["market"].lower().replace("_", "-"), known["market"])
    if not known.get("instance_id"):
        return Machine(**known, identified_by=source if known else "", problem=f"{problem}; {HINT}" if problem else "")
    return Machine(**known, uptime_seconds=_uptime(system), identified_by=source)


def _metadata(service: MetadataService, deadline_seconds: float) -> dict[str, Any]:
    """By IMDSv2: a token first. Raises OSError, ValueError, KeyError or HTTPException, within the deadline."""
    limit = time.monotonic() + deadline_seconds

    def left() -> float:
        if (seconds := limit - time.monotonic()) <= 0:
            raise TimeoutError(f"not within {deadline_seconds:g} s")
        return seconds / 2

    def checked(path: str, answer: tuple[int, str]) -> str:
        status, text = answer
        if status != 200:
            raise ValueError(f"{path}: HTTP {status}")
        return text

    token = checked("api/token", service.token(ttl_seconds=_TOKEN_SECONDS, seconds=left()))

    def ask(path: str) -> str:
        return checked(path, service.get(path, token, seconds=left()))

    document = json.loads(ask("dynamic/instance-identity/document"))
    found = {
        "instance_id": str(document["instanceId"]),
        "instance_type": str(document["instanceType"]),
        "zone": str(document["availabilityZone"]),
        "region": str(document["region"]),
    }
    for name, path in (("zone_id", "placement/availability-zone-id"), ("market", "instance-life-cycle")):
        try:
            found[name] = ask(f"meta-data/{path}")
        except (OSError, ValueError, http.client.HTTPException):
            continue  # an older service does not know it
    return found


def _firmware(system: Path) -> dict[str, Any]:
    """Nitro instances show their id and type in DMI; not verified on an instance."""
    board = _text(system / "sys/class/dmi/id/board_asset_tag")
    if not board.startswith("i-"):
        return {}
    return {"instance_id": board, "instance_type": _text(system / "sys/class/dmi/id/product_name") or None}


def _uptime(system: Path) -> float | None:
    try:
        return float(_text(system / "proc/uptime").split()[0])
    except (ValueError, IndexError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

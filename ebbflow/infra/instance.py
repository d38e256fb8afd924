"""Identification of the machine that a process runs on: EC2 instance metadata, hardware and file
systems.

`identify_machine` tries, in this order, environment variables from the container's definition, the
metadata service (IMDSv2) if the machine seems to be on EC2, and the firmware of a Nitro instance.
Elsewhere it sends no request.
"""

import http.client
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ebbflow.core.json_values import JsonObject
from ebbflow.core.process import read_system_file

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
MODE_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
HOP_LIMIT_FIX = (
    "in a container, allow one hop more: aws ec2 modify-instance-metadata-options --instance-id ID "
    "--http-put-response-hop-limit 2"
)
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_ENDPOINT = "http://169.254.169.254"
_ENDPOINT_IPV6 = "http://[fd00:ec2::254]"
# Any of these variables shows that AWS started this process.
_AWS_VARIABLES = ("AWS_BATCH_JOB_ID", "ECS_CONTAINER_METADATA_URI_V4", "AWS_EXECUTION_ENV")
_LARGEST_ANSWER = 65536
_SHORTEST_SECONDS = 0.05

# Variables that a pod's downward API or a job definition can set: {field: variable}.
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
    "fix: let containers reach the metadata service (HttpPutResponseHopLimit 2 in the launch "
    f"template), or set {VARIABLES['instance_id']}, {VARIABLES['instance_type']} and "
    f"{VARIABLES['zone']}"
)


class MetadataService:
    """Client of the EC2 instance metadata service. It ignores proxy settings in the environment."""

    def __init__(self, address: str) -> None:
        self.endpoint = address.rstrip("/")

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], *, seconds: float
    ) -> tuple[int, str]:
        """Send a request and return (HTTP status, body), within `seconds`.

        Raises:
            TimeoutError: the service accepted the connection but did not respond in time.
            ConnectionError: the service did not accept the connection in time.
            OSError: the connection failed for another reason.
            HTTPException: the response is not HTTP.
            ValueError: the address is invalid.
        """
        limit = time.monotonic() + seconds
        parts = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port or 80, timeout=_left(limit)
        )
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
                # An answer that arrives byte by byte has the same deadline
                if time.monotonic() > limit:
                    raise TimeoutError("an answer that does not end")
            return answer.status, body.decode("utf-8", "replace").strip()
        finally:
            connection.close()

    def token(self, *, ttl_seconds: int, seconds: float) -> tuple[int, str]:
        """Start an IMDSv2 session and return (HTTP status, token).

        Raises the same errors as `ask`.
        """
        return self.ask(
            "PUT", "/latest/api/token", {_TTL_HEADER: str(ttl_seconds)}, seconds=seconds
        )

    def get(self, path: str, token: str, *, seconds: float) -> tuple[int, str]:
        """Return (HTTP status, body) of /latest/PATH. Raises the same errors as `ask`.

        token: an IMDSv2 token, or "" for an IMDSv1 request.
        """
        return self.ask(
            "GET", f"/latest/{path}", {TOKEN_HEADER: token} if token else {}, seconds=seconds
        )


@dataclass(frozen=True, kw_only=True)
class MachineIdentity:
    """Known facts about a machine; None means unknown."""

    instance_id: str | None = None
    instance_type: str | None = None
    zone: str | None = None
    zone_id: str | None = None
    region: str | None = None
    market: str | None = None  # spot or on_demand
    uptime_seconds: float | None = None  # time since boot
    # The AWS Batch job (without a node's number), JobSet or Job of this container
    batch_job_id: str | None = None
    identified_by: str = ""  # environment, metadata or firmware; empty: unidentified
    problem: str = ""  # why an AWS instance is unidentified; empty elsewhere

    def to_json(self) -> JsonObject:
        """Return the known facts by name. Return {} for a machine that is not a cloud instance."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def metadata_endpoint(environment: Mapping[str, str]) -> str:
    ipv6 = environment.get(MODE_VARIABLE, "").lower() == "ipv6"
    return (environment.get(ENDPOINT_VARIABLE) or (_ENDPOINT_IPV6 if ipv6 else _ENDPOINT)).rstrip(
        "/"
    )


def metadata_unavailable_reason(environment: Mapping[str, str], system: Path = Path("/")) -> str:
    """Return why the metadata service must not be queried, or "" if it may be queried.

    A machine outside EC2 sends no query, because the request would only time out.

    system: the folder that contains /sys. Firmware files in /sys identify an EC2 instance.
    """
    if environment.get(DISABLED_VARIABLE, "").lower() == "true":
        return f"{DISABLED_VARIABLE} is true"
    if environment.get(ENDPOINT_VARIABLE) or any(environment.get(name) for name in _AWS_VARIABLES):
        return ""
    vendor, xen = (
        read_system_file(system / path)
        for path in ("sys/class/dmi/id/sys_vendor", "sys/hypervisor/uuid")
    )
    if "Amazon" in vendor or xen.lower().startswith("ec2"):
        return ""
    return "this machine is not on EC2"


def identify_machine(
    environment: Mapping[str, str] = os.environ,
    *,
    system: Path = Path("/"),
    deadline_seconds: float = 2.0,
) -> MachineIdentity:
    """Identify this machine. Never raises.

    system: the folder that contains /proc and /sys. deadline_seconds: limit for all requests
        together.
    """
    job = find_own_job(environment)
    return replace(_identify(environment, system, deadline_seconds), batch_job_id=job)


def find_own_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the AWS Batch job, JobSet or Kubernetes Job that this process runs in."""
    if pod := environment.get("METAFLOW_KUBERNETES_POD_NAME"):
        jobset = environment.get("METAFLOW_KUBERNETES_JOBSET_NAME")
        if jobset:
            owner = f"jobsets/{jobset}"
        else:
            owner = f"jobs/{pod.rpartition('-')[0]}"
        return f"{environment.get('METAFLOW_KUBERNETES_POD_NAMESPACE', '')}/{owner}"
    # A multi-node job has "<job>#<node>"
    return environment.get("AWS_BATCH_JOB_ID", "").split("#")[0] or None


def is_cluster_id(job_id: str) -> bool:
    """Return whether an id has the form NAMESPACE/KIND/NAME of a Kubernetes JobSet or Job.

    Ids of AWS Batch contain no slash.
    """
    return job_id.count("/") == 2


def describe_machine() -> JsonObject:
    """Describe this machine (CPU, usable cores, load average, versions) for the record of a
    measurement.
    """
    import importlib.metadata

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "system": platform.system(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _left(limit: float) -> float:
    return max(_SHORTEST_SECONDS, limit - time.monotonic())


def _identify(
    environment: Mapping[str, str], system: Path, deadline_seconds: float
) -> MachineIdentity:
    told = {name: environment.get(variable) or None for name, variable in VARIABLES.items()}
    found: dict[str, str] = {}
    source = "environment"
    problem = ""
    if told["instance_id"] is None and not metadata_unavailable_reason(environment, system):
        source = "metadata"
        try:
            found = _metadata(MetadataService(metadata_endpoint(environment)), deadline_seconds)
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            source = "firmware"
            found = _firmware(system)
            if found:
                problem = ""
            else:
                problem = f"the instance metadata service did not answer: {error!r}"[:300]
    known = {**found, **{name: value for name, value in told.items() if value}}
    # A Kubernetes label is ON_DEMAND, the metadata service's value on-demand
    if known.get("market"):
        known["market"] = _MARKETS.get(known["market"].lower().replace("_", "-"), known["market"])
    identified = bool(known.get("instance_id"))
    if identified:
        problem = ""
    return MachineIdentity(
        instance_id=known.get("instance_id"),
        instance_type=known.get("instance_type"),
        zone=known.get("zone"),
        zone_id=known.get("zone_id"),
        region=known.get("region"),
        market=known.get("market"),
        uptime_seconds=_uptime(system) if identified else None,
        identified_by=source if known else "",
        problem=f"{problem}; {HINT}" if problem else "",
    )


def _metadata(service: MetadataService, deadline_seconds: float) -> dict[str, str]:
    """Query the metadata service about this machine.

    Raises OSError, ValueError, KeyError, TypeError or HTTPException.
    """
    limit = time.monotonic() + deadline_seconds

    def left() -> float:
        seconds = limit - time.monotonic()
        if seconds <= 0:
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
    for name, path in (
        ("zone_id", "placement/availability-zone-id"),
        ("market", "instance-life-cycle"),
    ):
        try:
            found[name] = ask(f"meta-data/{path}")
        except (OSError, ValueError, http.client.HTTPException):
            continue  # an older service lacks this path
    return found


def _firmware(system: Path) -> dict[str, str]:
    """Read the instance id and type from a Nitro instance's DMI files, or return {} elsewhere.

    Not tested on a real instance.
    """
    board, kind = (
        read_system_file(system / "sys/class/dmi/id" / name)
        for name in ("board_asset_tag", "product_name")
    )
    if board.startswith("i-"):
        found = {"instance_id": board, "instance_type": kind}
        return {name: value for name, value in found.items() if value}
    return {}


def _uptime(system: Path) -> float | None:
    try:
        return float(read_system_file(system / "proc/uptime").split()[0])
    except (ValueError, IndexError):
        return None


def _cpu_model() -> str:
    for line in read_system_file("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()

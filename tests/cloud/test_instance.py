"""Which instance a node is: from its environment, the metadata service or the firmware, and never
by waiting for it.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from ebbflow.infra.instance import identify_machine
from tests.support.imds import FakeMetadata

IDENTITY = {
    "instanceId": "i-0abc",
    "instanceType": "g5.xlarge",
    "availabilityZone": "us-east-1a",
    "region": "us-east-1",
}
ANSWERS = {
    "/latest/dynamic/instance-identity/document": json.dumps(IDENTITY),
    "/latest/meta-data/placement/availability-zone-id": "use1-az4",
    "/latest/meta-data/instance-life-cycle": "spot",
}


def system(folder: Path, **files: str) -> Path:
    """A root with /proc/uptime and what else is named."""
    for name, text in {"proc/uptime": "321.5 99.0", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def test_the_metadata_service_describes_the_instance(tmp_path: Path) -> None:
    with FakeMetadata(ANSWERS) as service:
        machine = identify_machine(
            {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address}, system=system(tmp_path)
        )
    assert machine.to_json() == {
        "instance_id": "i-0abc",
        "instance_type": "g5.xlarge",
        "zone": "us-east-1a",
        "zone_id": "use1-az4",
        "region": "us-east-1",
        "market": "spot",
        "uptime_seconds": 321.5,
        "identified_by": "metadata",
    }


def test_an_older_service_leaves_out_what_it_does_not_know(tmp_path: Path) -> None:
    older = {path: text for path, text in ANSWERS.items() if "meta-data" not in path}
    with FakeMetadata(older) as service:
        machine = identify_machine(
            {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address}, system=system(tmp_path)
        )
    assert (machine.instance_id, machine.zone_id, machine.market) == ("i-0abc", None, None)


def test_the_environment_comes_first_and_no_one_is_asked(tmp_path: Path) -> None:
    environment = {
        "EBBFLOW_INSTANCE_ID": "i-7",
        "EBBFLOW_ZONE": "us-east-1b",
        "AWS_BATCH_JOB_ID": "job",
    }
    environment["EBBFLOW_MARKET"] = "ON_DEMAND"
    machine = identify_machine(environment, system=system(tmp_path), deadline_seconds=0.0)
    assert (machine.instance_id, machine.zone, machine.identified_by) == (
        "i-7",
        "us-east-1b",
        "environment",
    )
    assert machine.market == "on_demand"


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_an_unavailable_metadata_service_delays_nothing_and_has_a_fix(
    tmp_path: Path, kind: str
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "hangs":
            listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint}
        started = time.monotonic()
        machine = identify_machine(
            environment, system=system(tmp_path / "bare"), deadline_seconds=0.5
        )
        assert time.monotonic() - started < 20.0
        assert machine.instance_id is None and "HttpPutResponseHopLimit" in machine.problem
        nitro = {
            "sys/class/dmi/id/board_asset_tag": "i-09",
            "sys/class/dmi/id/product_name": "p4d.24xlarge",
        }
        known = identify_machine(
            environment, system=system(tmp_path / "nitro", **nitro), deadline_seconds=0.5
        )
        assert (known.instance_id, known.instance_type, known.identified_by) == (
            "i-09",
            "p4d.24xlarge",
            "firmware",
        )


def test_outside_aws_the_metadata_service_is_not_asked(tmp_path: Path) -> None:
    started = time.monotonic()
    for environment in ({}, {"AWS_BATCH_JOB_ID": "job", "AWS_EC2_METADATA_DISABLED": "true"}):
        told = identify_machine(
            environment, system=system(tmp_path), deadline_seconds=60.0
        ).to_json()
        assert told == ({"batch_job_id": "job"} if environment else {}), (
            "the job is no word on the machine"
        )
    assert time.monotonic() - started < 20.0

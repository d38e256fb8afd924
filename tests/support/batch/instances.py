"""Instances: what a node runs on, with a metadata service of its own; and the container that runs
on it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.support.imds import FakeMetadata

_CONTAINER = Path(__file__).with_name("container.py")
_METADATA = "/latest/meta-data"


class Instance:
    """One machine of a type in a zone. ends_at: by time.monotonic(), when it is taken away; None
    while it is not.
    """

    def __init__(self, instance_type: str, zone: str, market: str) -> None:
        self.id = f"i-{uuid.uuid4().hex[:17]}"
        self.type = instance_type
        self.zone = zone
        self.ends_at: float | None = None
        region = zone.rstrip("abcdefghijklmnopqrstuvwxyz")
        identity = {
            "instanceId": self.id,
            "instanceType": instance_type,
            "availabilityZone": zone,
            "region": region,
        }
        self._metadata = FakeMetadata(
            {
                "/latest/dynamic/instance-identity/document": json.dumps(identity),
                f"{_METADATA}/instance-id": self.id,
                f"{_METADATA}/instance-type": instance_type,
                f"{_METADATA}/instance-life-cycle": "spot"
                if market.endswith("spot")
                else "on-demand",
                f"{_METADATA}/placement/availability-zone": zone,
                f"{_METADATA}/placement/region": region,
            }
        )

    @property
    def metadata_address(self) -> str:
        return self._metadata.address

    def reclaim(self, seconds: float, *, notice: bool) -> None:
        """Taken away in so many seconds, and told so."""
        if self.ends_at is None:
            self.ends_at = time.monotonic() + seconds
            if notice:
                self._metadata.interrupt(seconds)

    def close(self) -> None:
        self._metadata.close()


class Container:
    """A command in a folder of its own, which is also its home; its output lies beside it, as
    CloudWatch keeps it.
    """

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        own = {"HOME": str(folder), "PWD": str(folder), "TMPDIR": str(folder / "tmp")}
        with open(folder / "output.log", "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", str(_CONTAINER), str(os.getpid()), *command],
                cwd=folder,
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def ask_to_end(self) -> None:
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """At once, with everything in it."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

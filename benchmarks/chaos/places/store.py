"""A store that fails when it is told to: the S3 server of the tests, on the loopback.

It comes with a checkout only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.chaos.places.place import Place
from benchmarks.soak.server import FailingS3
from ebbflow.training.errors import CheckpointError, GangError

_BUCKET = "chaos"
CALM: dict[str, Any] = {"rates": {}}


class FailingStore(Place):
    """One server, one bucket."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server: FailingS3 | None = None

    @classmethod
    def missing(cls) -> str:
        return FailingS3.missing()

    def set_up(self) -> None:
        try:
            self._server = FailingS3()
        except CheckpointError as error:
            raise GangError(str(error)) from error
        self.behave(**CALM)
        self.store = f"s3://{_BUCKET}/runs"
        self.environment = self._server.environment

    def take_down(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def behave(self, **settings: Any) -> None:
        """From now on (`tests/support/s3/faults.py` says what there is)."""
        if self._server is None:
            raise GangError("the failing store is not there")
        self._server.behave(_BUCKET, **settings)

    def met(self) -> dict[str, int]:
        """How many requests met which fault so far."""
        if self._server is None:
            return {}
        return self._server.told(_BUCKET)["met"]

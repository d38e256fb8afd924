"""A gang of ranks in trouble, watched as their agents watch them, down to the culprit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.training.launch.blame import Culprit, blame, detect_mismatch, settle_seconds
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.heartbeat import HangLimits
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.launch.watch import RankWatch
from ebbflow.training.launch.workers import Worker
from tests.support.gangs import free_port
from tests.support.warm import WarmProcess, start_warm

WORLD_SIZE = 2
_POLL_SECONDS = 0.05
_SPEC = {"job": "job", "run": "run", "attempt": 0, "node": 0, "generation": 0, "generation_id": "0"}


class WatchedGang:
    """Rank `guilty` has the trouble.

    Each rank is a node of its own, with its own watch, as in a gang of agents.
    """

    def __init__(
        self, folder: Path, trouble: str, *, guilty: int, floor_seconds: float = 3.0
    ) -> None:
        environment = dict(
            os.environ,
            WORLD_SIZE=str(WORLD_SIZE),
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(PROJECT_ROOT),
        )
        spec = WorkerSpec(
            **_SPEC,
            candidates=[],
            config=RunConfig(),
            store_uri=str(folder),
            prepared={},
            agent_pid=os.getpid(),
        )

        def starter(rank: int):
            def start(name: str, log: Path, environment: Mapping[str, str]) -> WarmProcess:
                paths = [
                    str(folder / f"rank-{rank}.heartbeat"),
                    str(folder / f"rank-{rank}.result.json"),
                ]
                words = [*paths, trouble if rank == guilty else "none"]
                return start_warm(
                    "tests.support.watched_rank", words, environment=environment, output=log
                )

            return start

        self.workers = [
            Worker(rank, 0, folder, spec, environment, starter(rank)) for rank in range(WORLD_SIZE)
        ]
        deadlines = HangLimits(
            floor_seconds=floor_seconds,
            start_seconds=60.0,
            store_seconds=60.0,
            longest_seconds=60.0,
        )
        self.watches = [
            RankWatch([worker], deadlines, folder / f"node-{worker.rank}", node=worker.rank)
            for worker in self.workers
        ]

    def look(self) -> list[WorkerFailure]:
        failures = []
        for watch in self.watches:
            failures += watch.check()
        return failures

    def run_until_step(self, step: int) -> None:
        """Watch while nothing is wrong."""
        limit = time.monotonic() + 150  # importing torch on a loaded machine
        while min(worker.beat.step for worker in self.workers) < step:
            assert time.monotonic() < limit and not self.look(), self.logs()
            time.sleep(_POLL_SECONDS)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.workers[rank].process.pid, number)

    def culprit(self, *, seconds: float = 20.0) -> Culprit:
        """As a lead finds it: the first failure, everybody's evidence, some time for it to come."""
        evidence: list[WorkerFailure] = []
        first: float | None = None
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            fresh = self.look()
            evidence += fresh
            failures = [failure for failure in evidence if not failure.witness]
            if first is None and (failures or detect_mismatch(evidence)):
                first = time.monotonic()
                for watch in self.watches:
                    watch.request_witnesses()
            if first is not None and time.monotonic() - first >= settle_seconds(failures):
                return blame(evidence)
            time.sleep(_POLL_SECONDS)
        raise AssertionError(f"no verdict within {seconds:g} s: {evidence}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(worker.log_path.read_text()[-2000:] for worker in self.workers)

    def close(self) -> None:
        for watch in self.watches:
            watch.close()
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()

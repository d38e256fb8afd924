"""A small job on this machine that is given notices, taken away when their time is up, and started
again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.imds import FakeMetadata
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import Event, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.infra.notices import rehearse_notice
from ebbflow.training.data import prepare_tokens
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.messages import GangOutcome, GangSpec

SOURCES = ("rehearsal", "metadata", "metaflow", "signal")
_POLL_SECONDS = 0.005
_START_SECONDS = 180.0


class NoticeJob:
    """nodes × ranks_per_node ranks of a tiny language model on this project's own sources.

    Needs no network.

    notice_seconds: from a notice until the machine is gone. margin_seconds: kept back of it for the
        save.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        ranks_per_node: int,
        max_steps: int,
        interval_steps: int,
        notice_seconds: float,
        margin_seconds: float,
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.notice_seconds = notice_seconds
        self._file = folder / "spot_termination_notice"
        config = RunConfig(
            store=str(folder / "store"),
            model={"hidden_size": 32, "num_layers": 1, "num_heads": 2, "sequence_length": 32},
            training={
                "batch_size": nodes * ranks_per_node,
                "max_steps": max_steps,
                "evaluation_interval_steps": max_steps,
            },
            data={
                "path": str(PROJECT_ROOT / "ebbflow/training"),
                "held_out_samples": 2 * nodes * ranks_per_node,
            },
            parallel={"mode": "ddp"},
            cluster={"nodes": nodes, "processes_per_node": ranks_per_node},
            checkpoint={
                "interval_steps": interval_steps,
                "stop_seconds": notice_seconds - margin_seconds,
            },
            survival={"notice_margin_seconds": margin_seconds, "notice_file": str(self._file)},
        )
        tokens = prepare_tokens(config.data, Store.open(config.store), project_root=PROJECT_ROOT)
        self._spec = GangSpec(
            job="notices",
            run=f"bench-{os.getpid()}",  # two of these on one machine must not meet
            attempt=-1,
            node=0,
            nodes=nodes,
            processes_per_node=ranks_per_node,
            main_address="127.0.0.1",
            config=config.model_dump(mode="json"),
            store_uri=config.store,
            prepared=tokens.to_json(),
            log_folder=str(folder / "logs"),
        )
        self.gang: LocalGang | None = None

    @property
    def attempts(self) -> int:
        return self._spec.attempt + 1

    @property
    def nodes(self) -> int:
        return self._spec.nodes

    def start(self) -> None:
        """Another machine: nothing of the last notice is known there."""
        self._file.unlink(missing_ok=True)
        self._spec = replace(self._spec, attempt=self._spec.attempt + 1)
        self.gang = LocalGang(self._spec, self._folder / "gang", self._folder / "output.log")

    def await_step(self, wanted: Callable[[int, int], bool]) -> int:
        """Until wanted(step of the last commit when this start began, step under way), or the gang
        ends; that step.

        Raises TrainingError when it does not come in time.
        """
        assert self.gang is not None
        limit = time.monotonic() + _START_SECONDS
        first: int | None = None
        while all(agent.poll() is None for agent in self.gang.agents):
            step = self._step()
            if step and first is None:
                first = step
            if first is not None and wanted(first, step):
                return step
            if time.monotonic() > limit:
                raise TrainingError(
                    f"no progress to the wanted step within {_START_SECONDS:g} s: "
                    f"{self._log_tail()}"
                )
            time.sleep(_POLL_SECONDS)
        return self._step()

    def notify(self, source: str, node: int, metadata: FakeMetadata) -> float:
        """Give a notice of `notice_seconds` to a node. time.monotonic() of it."""
        assert self.gang is not None
        given = time.monotonic()
        if source == "metadata":
            metadata.interrupt(self.notice_seconds)
        elif source == "metaflow":
            moment = time.gmtime(time.time() + self.notice_seconds + 0.999)
            self._file.write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ", moment))
        elif source == "signal":
            self.gang.agents[node].send_signal(signal.SIGTERM)
        else:
            path = Path(self._spec.log_folder) / f"notice-node-{node}.json"
            rehearse_notice(path, action="terminate", seconds=self.notice_seconds)
        return given

    def await_end(self, gone_at: float) -> GangOutcome | None:
        """How the gang ended; None when it was still there at `gone_at` (time.monotonic()), and was
        killed.
        """
        assert self.gang is not None
        while (
            any(agent.poll() is None for agent in self.gang.agents) and time.monotonic() < gone_at
        ):
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(GangError):
            return self.gang.wait(0.0)
        return None

    def finish(self, deadline_seconds: float) -> GangOutcome | None:
        """The end of an undisturbed start."""
        return self.await_end(time.monotonic() + deadline_seconds)

    def events(self) -> list[Event]:
        return read_events(Store.open(self._spec.store_uri).sub(job_prefix(self._spec.job)))

    def close(self) -> None:
        if self.gang is not None:
            self.gang.kill()

    def _step(self) -> int:
        """Rank 0's, of the newest generation of this attempt; 0 before its first."""
        assert self.gang is not None
        paths = sorted(Path(self._spec.log_folder).glob("*/rank-0.heartbeat"))
        try:
            if not paths or paths[-1].stat().st_mtime < self._born:
                return 0
            return Heartbeat(paths[-1]).read().step
        except (OSError, ValueError):  # it is only being made
            return 0

    @property
    def _born(self) -> float:
        return os.stat(self._folder / "gang" / "node-0.spec.json").st_mtime

    def _log_tail(self) -> str:
        return (self._folder / "output.log").read_text(errors="replace")[-400:]

"""All that comes of what a node's ranks print: the terminal, JSON lines on this disk, and their way to the store."""

from __future__ import annotations

from pathlib import Path

from ebbflow.infra.store import Store
from ebbflow.training.launch.echo import Echo, say
from ebbflow.training.launch.lines import GangLines
from ebbflow.training.launch.shipping import LogShipper
from ebbflow.training.launch.spec import GangSpec
from ebbflow.training.launch.workers import WorkerGroup


class GangOutput:
    """Follow it with each look at the ranks; close it when they have ended, so that their last words are kept."""

    def __init__(self, group: WorkerGroup, spec: GangSpec, generation: int, job_store: Store) -> None:
        self._echo = Echo(group)
        self._shipper: LogShipper | None = None
        if not _is_part_of_store(Path(spec.log_folder), job_store):
            self._shipper = LogShipper(job_store, generation=generation, node=spec.node, say=say)
        self._lines = GangLines(
            group,
            job=spec.job,
            generation=generation,
            node=spec.node,
            limit_bytes=spec.survival.rank_log_mib * 2**20,
            pass_on=self._pass_on,
            say=say,
        )

    def follow(self) -> None:
        self._echo.pass_on()
        self._lines.follow()

    def close(self) -> None:
        """The rest of every rank's lines; the store has 5 s to take what is left."""
        self._echo.pass_on()
        self._lines.finish()
        if self._shipper:
            self._shipper.close()

    def _pass_on(self, rank: int, records: list[bytes]) -> None:
        if self._shipper:
            self._shipper.add(rank, records)


def _is_part_of_store(folder: Path, job_store: Store) -> bool:
    """The default store is this machine's runs/: what lies in the job's folder there need not be carried."""
    local = job_store.local_path("logs")
    return local is not None and local.resolve() == folder.resolve()

"""The worker processes of one node: start them, watch them, end them.

Workers are started directly, with torchrun's environment contract, and not through torchrun: its agent imports torch
before it starts anything, comes back from a killed worker several times later than ours (docs/benchmarks.md, Injected
faults), and waits up to 1,801 s for a frozen one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import Outcome
from ebbflow.infra.keeper import Keeper
from ebbflow.infra.process import signal_name
from ebbflow.training import errors
from ebbflow.training.errors import bounded_text, error_class
from ebbflow.training.launch.session import Session, end_left_behind
from ebbflow.training.launch.spec import SPEC_VARIABLE, WorkerSpec
from ebbflow.training.launch.standby import Process, Standby, start_cold, threads_of, with_project_path
from ebbflow.training.launch.watch.dump import WorkerFailure, is_collective_error
from ebbflow.training.launch.watch.heartbeat import Beat, Heartbeat
from ebbflow.training.launch.watch.recorder import BUFFER_RECORDS, BUFFER_VARIABLE

_EXIT_SECONDS = 1.0
_LONGEST_RECORD = 8 * 1024 * 1024
_LONGEST_NAME = 200
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_KILLED_SECONDS = 10.0
Start = Callable[[str, Path, Mapping[str, str]], Process]


class Worker:
    """One rank's process, its log, heartbeat and result, all in `folder`."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        folder: Path,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        start: Start,
        parents: Collection[int] = (),
    ) -> None:
        """parents: who may start it besides this process: the standby and the keeper."""
        self.rank = rank
        self.log_path = folder / f"rank-{rank}.log"
        self._result_path = folder / f"rank-{rank}.result.json"
        self._error_path = folder / f"rank-{rank}.error.json"
        heartbeat_path = folder / f"rank-{rank}.heartbeat"
        spec_path = folder / f"rank-{rank}.spec.json"
        self._heartbeat = Heartbeat.create(heartbeat_path)
        own = replace(spec, heartbeat_path=str(heartbeat_path), result_path=str(self._result_path))
        spec_path.write_text(own.to_json())
        own_environment = dict(
            environment,
            RANK=str(rank),
            LOCAL_RANK=str(local_rank),
            TORCHELASTIC_ERROR_FILE=str(self._error_path),
            **{SPEC_VARIABLE: str(spec_path)},
        )
        self.log_path.write_bytes(b"")
        self.process = start(f"rank {rank}", self.log_path, own_environment)
        self.session = Session(self.process.pid, {os.getpid(), *parents})

    @property
    def beat(self) -> Beat:
        return self._heartbeat.read()

    def result(self) -> dict | None:
        """The outcome that this rank has written, None without a valid one."""
        result = _read_object(self._result_path)
        outcomes = [outcome.value for outcome in Outcome]
        valid = result.get("outcome") in outcomes and isinstance(result.get("step"), int)
        return result if valid and isinstance(result.get("message", ""), str) else None

    def failure(self) -> WorkerFailure | None:
        """Why it ended, or None while it runs or when it ended well (a result was written)."""
        code = self.process.poll()
        if code is None or self.result() is not None:
            return None
        place = {"rank": self.rank, "step": self.beat.step, "phase": self.beat.phase}
        if code < 0:
            name = signal_name(-code)
            return WorkerFailure(**place, message=f"killed by {name}", killed_by=name, timestamp=time.time())
        return WorkerFailure(**place, **self._error(code))

    def _error(self, code: int) -> dict[str, Any]:
        """What the rank has recorded of its exception, in the format of torch's @record."""
        record = _read_object(self._error_path).get("message")
        text = record.get("message") if isinstance(record, dict) else record
        if not isinstance(text, str):
            return {"message": f"exited with code {code} and no error record", "timestamp": time.time()}
        extra = record.get("extraInfo") if isinstance(record, dict) else None
        extra = extra if isinstance(extra, dict) else {}
        message = bounded_text(text)
        module, _, name = str(extra.get("class") or "").rpartition(".")
        name = bounded_text(name or message.partition(":")[0], _LONGEST_NAME)
        if module and module != errors.__name__ and error_class(name) is not errors.GangError:
            name = f"{module}.{name}"  # the user's own exception, which only has the name of one of ours
        return {
            "message": message,
            "cascade": is_collective_error(message),
            "error": name,
            "timestamp": _unix_time(extra.get("timestamp")),
        }


class WorkerGroup:
    """All ranks of a node. standby: forks them, where there is one that can."""

    def __init__(
        self,
        ranks: range,
        world_size: int,
        folder: Path,
        spec: WorkerSpec,
        rendezvous: tuple[str, int],
        standby: Standby | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        environment = _environment(rendezvous, world_size, len(ranks), spec.colocated_ranks)

        def start(name: str, log: Path, environment: Mapping[str, str]) -> Process:
            forked = standby.fork(name, log, environment) if standby and standby.ready and not standby.lost else None
            return forked or start_cold(log, environment, keeper)

        self.workers: list[Worker] = []
        self._standby, self._keeper = standby, keeper
        parents = {parent.pid for parent in (standby, keeper) if parent is not None}
        try:
            for local_rank, rank in enumerate(ranks):
                self.workers.append(Worker(rank, local_rank, folder, spec, environment, start, parents))
        except BaseException:  # a full disk, no more processes: those that were started are nobody's otherwise
            self.end(ranks)
            raise

    def all_exited(self) -> bool:
        return all(worker.process.poll() is not None for worker in self.workers)

    def all_ended_well(self) -> bool:
        return self.all_exited() and len(self.results()) == len(self.workers)

    def results(self) -> dict[int, dict]:
        return {worker.rank: result for worker in self.workers if (result := worker.result())}

    def end(
        self,
        culprits: Sequence[int] = (),
        *,
        grace_seconds: float = _EXIT_SECONDS,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """End every rank and what it has started. Returns the ranks that are left 10 s after SIGKILL: they
        are in uninterruptible sleep (state D), and are waited for no more. meanwhile: called while it waits.

        culprits: ranks to be killed at once (SIGKILL works on stopped ones too). A rank that was waiting for one of
        them in a collective hears of it, writes its last events and leaves; it has the grace for that, and then is
        killed: it could not save any more, since a save is collective too.
        """
        for worker in self.workers:
            if worker.rank in culprits:
                worker.process.kill()
        # A child holds copies of a rank's sockets: the others hear of its end only when both are gone.
        self._end_left_behind([worker for worker in self.workers if worker.rank in culprits])
        limit = time.monotonic() + grace_seconds
        self._await_exits(limit, meanwhile)
        for worker in self.workers:
            worker.process.kill()
        self._await_exits(time.monotonic() + _KILLED_SECONDS, meanwhile)
        self._end_left_behind(self.workers)
        stuck = [worker for worker in self.workers if worker.process.poll() is None]
        for worker in stuck:
            if self._standby is not None:
                self._standby.abandon(worker.process.pid)
        return [worker.rank for worker in stuck]

    def device_held_by(self, rank: int) -> str:
        """The GPU that a rank of this node still has open, "" for none."""
        pid = next(worker.process.pid for worker in self.workers if worker.rank == rank)
        return open_device(pid)

    def _await_exits(self, limit: float, meanwhile: Callable[[], object]) -> None:
        while not self.all_exited() and time.monotonic() < limit:
            meanwhile()
            time.sleep(0.01)

    def _end_left_behind(self, ended: Sequence[Worker]) -> None:
        """What these ranks have started; with the last of them all that is below the keeper but the standby."""
        if ended:
            spare = () if self._standby is None else (self._standby.pid,)
            others = [worker.process for worker in self.workers if worker not in ended]
            living = [process.pid for process in others if process.poll() is None]
            end_left_behind([worker.session for worker in ended], self._keeper, spare=spare, spare_trees=living)


def open_device(pid: int) -> str:
    """The path of a GPU that a process has open; "" for none, or where the kernel does not tell."""
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith(_DEVICES):
                    return target
    except OSError:
        pass
    return ""


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a rank has written; {} for anything else, since a rank may write anything."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_LONGEST_RECORD))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unix_time(text: object) -> float:
    try:
        seconds = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return time.time()
    return seconds if math.isfinite(seconds) else time.time()


def _environment(rendezvous: tuple[str, int], world_size: int, local_world_size: int, colocated: int) -> dict[str, str]:
    address, port = rendezvous
    environment = dict(
        with_project_path(os.environ),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
        OMP_NUM_THREADS=str(threads_of(colocated)),
        PYTHONUNBUFFERED="1",
    )
    environment.setdefault(BUFFER_VARIABLE, BUFFER_RECORDS)
    if address == "127.0.0.1":
        # Otherwise gloo resolves the host name, which may not resolve, or resolve to an interface that is down.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment

"""The worker processes of one node: start, watch and end them.

All that a rank starts stays below the keeper (`ebbflow.infra.keeper`). Where there is none, because the system has no
subreapers or the keeper was killed, what stayed in the rank's own session is found. (What a rank's main thread forks
the kernel ends with it: `ebbflow.infra.process.tie_forked_children`.)

Without it, or when it died, each rank is a new interpreter: slower by all of its imports, otherwise the same.

Workers are started directly, with torchrun's environment contract, and not through torchrun: its agent imports torch
before it starts anything, comes back from a killed worker several times later than ours (docs/benchmarks.md, Injected
faults), and waits up to 1,801 s for a frozen one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.errors import Outcome
from ebbflow.infra.keeper import Keeper, RemoteChild, kill_until_none
from ebbflow.infra.process import (
    MessageReader,
    ProcessStat,
    all_processes,
    descendants,
    process_stat,
    process_state,
    signal_name,
)
from ebbflow.infra.program import python_path
from ebbflow.training import errors
from ebbflow.training.errors import bounded_text, error_class
from ebbflow.training.launch.evidence import BUFFER_RECORDS, BUFFER_VARIABLE, WorkerFailure, is_peer_loss_error
from ebbflow.training.launch.heartbeat import Heartbeat, HeartbeatReading
from ebbflow.training.launch.messages import SPEC_VARIABLE, WorkerSpec

_LEFT_BEHIND_SECONDS = 3.0


class RankSession:
    """Of one rank. To be made when it was just started. parents: who may have started it."""

    def __init__(self, pid: int, parents: Collection[int]) -> None:
        stat = process_stat(pid)
        # A rank that is gone already has left nothing; and a number that is not a rank's must not be ended.
        self._planner = stat if stat is not None and stat.parent in parents else None

    def left_behind(self, living: Sequence[ProcessStat]) -> list[ProcessStat]:
        """The processes of `living` that belong to this rank, the rank itself left out."""
        leader = self._planner
        if leader is None:
            return []
        # The kernel does not give a number anew while a session of that number has members: a process that has it now
        # and is not the rank has a session of its own.
        now = process_stat(leader.pid)
        if now is not None and now.started_ticks != leader.started_ticks:
            return []
        return [
            one
            for one in living
            if one.pid != leader.pid and one.session == leader.pid and one.started_ticks >= leader.started_ticks
        ]


def kill_leftovers(
    sessions: Sequence[RankSession],
    keeper: Keeper | None,
    *,
    spare: Collection[int] = (),
    spare_trees: Collection[int] = (),
) -> list[int]:
    """Kill what is in these sessions, and all that is below the keeper but `spare` and `spare_trees` (with all below
    them). Returns what is left: killed, and in uninterruptible sleep (state D)."""
    spared = [stat for pid in {*spare, *spare_trees} if (stat := process_stat(pid)) is not None]

    def find() -> list[ProcessStat]:
        below = [] if keeper is None or keeper.lost else descendants(keeper.pid, spare, spare_trees)
        if below:
            return below
        living = list(all_processes())
        return [one for session in sessions for one in session.left_behind(living)]

    return kill_until_none(find, _LEFT_BEHIND_SECONDS, spare_groups={stat.group for stat in spared})


_FORK_DEADLINE_SECONDS = 10.0
_END_DEADLINE_SECONDS = 10.0
STANDBY_VARIABLE = "EBBFLOW_STANDBY_OF"


class Process(Protocol):
    """What of a rank's process an agent needs: `subprocess.Popen`, or `RemoteChild`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float) -> int: ...


class Standby:
    """The process that forks. log: what it has to say for itself, when it fails. colocated_ranks: that will share this
    machine's cores. keeper: starts it; without one it is this process's child, to be made in the main thread, which its
    life is tied to then. Raises OSError."""

    def __init__(self, log: Path, *, colocated_ranks: int, keeper: Keeper | None = None) -> None:
        environment = dict(with_project_path(os.environ), PYTHONUNBUFFERED="1")
        environment["OMP_NUM_THREADS"] = str(
            threads_per_rank(colocated_ranks)
        )  # libraries read it when they are loaded
        environment[STANDBY_VARIABLE] = str(os.getpid() if keeper is None else keeper.pid)
        its_input, self._requests = os.pipe()
        self._answers, its_output = os.pipe()
        try:
            with open(log, "wb") as errors:
                command = [sys.executable, "-m", "ebbflow.training", "--standby"]
                self._process = start_process(command, environment, (its_input, its_output, errors.fileno()), keeper)
        except OSError:
            os.close(self._requests)
            os.close(self._answers)
            raise
        finally:
            os.close(its_input)
            os.close(its_output)
        for pipe in (self._requests, self._answers):
            os.set_blocking(pipe, False)
        self._open = True
        self._messages = MessageReader(lambda: os.read(self._answers, 65536))
        self._number = 0
        self._started: dict[int, int] = {}
        self._living: set[int] = set()
        self._ended: dict[int, int] = {}
        self.ready = False
        self.lost = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_settled(self) -> bool:
        """Ready to fork, or lost: nothing to wait for."""
        self._receive()
        return self.ready or self.lost

    def fork(self, name: str, log: Path, environment: Mapping[str, str]) -> RemoteChild | None:
        """A rank as a new process, or None when there is none to be had; this standby is of no use any more then."""
        self._number += 1
        request = {"start": self._number, "environment": dict(environment), "log": str(log), "name": name}
        limit = time.monotonic() + _FORK_DEADLINE_SECONDS
        if not self._ask(json.dumps(request).encode() + b"\n", limit):
            self._lose()
            return None
        while self._number not in self._started and not self.lost:
            left = limit - time.monotonic()
            if left <= 0:
                self._lose()
                break
            select.select([self._answers], [], [], left)
            self._receive()
        pid = self._started.pop(self._number, None)
        return None if pid is None or self.lost else RemoteChild(pid, self)

    def ended(self, pid: int) -> int | None:
        """Exit status of a rank that has ended, negative for a signal's number; None while it lives."""
        self._receive()
        return self._ended.get(pid, -signal.SIGKILL if self.lost else None)

    def close(self) -> None:
        """Gone when this returns, and every rank that is still there with it."""
        self._lose()
        if self._open:
            self._open = False
            os.close(self._requests)
            os.close(self._answers)

    def abandon(self, pid: int) -> None:
        """Wait no more for a rank in uninterruptible sleep (state D); it ends by itself when it wakes."""
        self._living.discard(pid)

    def _ask(self, request: bytes, limit: float) -> bool:
        """Whether it was taken in time: a frozen process reads nothing, and a pipe holds 64 KiB at most."""
        pipe, unsent = self._requests, memoryview(request)
        while unsent and (left := limit - time.monotonic()) > 0:
            select.select([], [pipe], [], left)
            try:
                unsent = unsent[os.write(pipe, unsent) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return not unsent

    def _lose(self) -> None:
        """The kernel ends its ranks with it, so that none can go on unseen."""
        self.lost = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_DEADLINE_SECONDS)
        limit = time.monotonic() + _END_DEADLINE_SECONDS
        while any(process_state(pid) not in ("", "Z") for pid in self._living) and time.monotonic() < limit:
            time.sleep(0.005)
        self._living.clear()

    def _receive(self) -> None:
        if not self.lost and not self._messages.read(self._note):
            self._lose()

    def _note(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.ready = True
        elif "started" in message:
            self._started[message["started"]] = message["pid"]
            self._living.add(message["pid"])
            self._ended.pop(message["pid"], None)  # of one that had this number before
        else:
            self._living.discard(message["ended"])
            self._ended[message["ended"]] = message["status"]


def start_cold(log: Path, environment: Mapping[str, str], keeper: Keeper | None = None) -> Process:
    """A rank as an interpreter of its own."""
    command = [sys.executable, "-m", "ebbflow.training"]
    with open(log, "ab") as output, open(os.devnull, "rb") as nothing:
        return start_process(command, environment, (nothing.fileno(), output.fileno(), output.fileno()), keeper)


def start_process(
    command: list[str], environment: Mapping[str, str], streams: tuple[int, int, int], keeper: Keeper | None
) -> Process:
    """Start a program in a session of its own: signals for the agent's group do not reach it. Raises OSError."""
    if keeper is not None and not keeper.lost:
        return keeper.spawn(command, environment, *streams)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        command, env=dict(environment), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


def threads_per_rank(colocated_ranks: int) -> int:
    """Of each rank: its share of the cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, colocated_ranks))


def with_project_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, for a process that is to find the project's packages."""
    return dict(environment, PYTHONPATH=python_path(environment.get("PYTHONPATH")))


_EXIT_SECONDS = 1.0
_LONGEST_RECORD = 8 * 1024 * 1024
_LONGEST_NAME = 200
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_KILLED_SECONDS = 10.0
_StartProcess = Callable[[str, Path, Mapping[str, str]], Process]


class Worker:
    """One rank's process, its log, heartbeat and result, all in `folder`."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        folder: Path,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        start: _StartProcess,
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
        self.session = RankSession(self.process.pid, {os.getpid(), *parents})

    @property
    def beat(self) -> HeartbeatReading:
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
            "cascade": is_peer_loss_error(message),
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

    def all_succeeded(self) -> bool:
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
        return find_open_device(pid)

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
            kill_leftovers([worker.session for worker in ended], self._keeper, spare=spare, spare_trees=living)


def find_open_device(pid: int) -> str:
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
        OMP_NUM_THREADS=str(threads_per_rank(colocated)),
        PYTHONUNBUFFERED="1",
    )
    environment.setdefault(BUFFER_VARIABLE, BUFFER_RECORDS)
    if address == "127.0.0.1":
        # Otherwise gloo resolves the host name, which may not resolve, or resolve to an interface that is down.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment

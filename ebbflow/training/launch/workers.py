"""Start the rank processes of one node, read their results, and end them.

Ranks get torchrun's environment variables, but torchrun does not start them. torchrun's own agent
imports torch before it starts a process. It replaces a killed rank several times more slowly
(docs/benchmarks.md, Injected faults), and waits up to 1,801 s for a frozen rank.

Each node has a standby process, which has imported torch and the engine and forks a rank on
request. Without a standby, each rank is a new interpreter. The keeper (`ebbflow.core.keeper`) is
an ancestor of all processes that the ranks start, so that all of them can be found and killed. If
there is no keeper, only processes in a rank's session are found.
"""

import contextlib
import itertools
import json
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ebbflow.core.json_values import JsonObject
from ebbflow.core.keeper import Keeper, RemoteChild, kill_until_none
from ebbflow.core.process import (
    MessageReader,
    OwnProgram,
    ProcessStat,
    all_processes,
    descendants,
    own_program_line,
    process_stat,
    process_state,
    signal_name,
)
from ebbflow.core.program import python_path
from ebbflow.training import errors
from ebbflow.training.errors import bounded_text, error_class
from ebbflow.training.launch.evidence import WorkerFailure, is_peer_loss_error, recorder_variables
from ebbflow.training.launch.heartbeat import Heartbeat, HeartbeatReading
from ebbflow.training.launch.messages import SPEC_VARIABLE, RankResult, WorkerSpec

_LEFT_BEHIND_SECONDS = 3.0

_FORK_DEADLINE_SECONDS = 10.0
_END_DEADLINE_SECONDS = 10.0
STANDBY_VARIABLE = "EBBFLOW_STANDBY_OF"
THREADS_VARIABLE = "OMP_NUM_THREADS"

Process = subprocess.Popen[bytes] | RemoteChild

_RESULT = TypeAdapter(RankResult)
_EXIT_SECONDS = 1.0
_LONGEST_RECORD = 8 * 1024 * 1024
_LONGEST_NAME = 200
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_KILLED_SECONDS = 10.0
# Settings of torch's allocator on GPUs. All releases read the first; torch 2.9 and later also read
# the second.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Standby:
    """Handle for a node's standby process, which forks ranks.

    Raises OSError if it cannot be started.

    Without a keeper, the standby is a child of this process and dies when the thread that created
    it ends. Create it in the main thread.
    """

    def __init__(self, log: Path, *, colocated_ranks: int, keeper: Keeper | None = None) -> None:
        environment = dict(os.environ, PYTHONPATH=python_path(os.environ), PYTHONUNBUFFERED="1")
        # Read by libraries when they load
        environment.setdefault(THREADS_VARIABLE, threads_per_rank(colocated_ranks))
        environment[STANDBY_VARIABLE] = str(os.getpid() if keeper is None else keeper.pid)
        its_input, self._requests = os.pipe()
        self._answers, its_output = os.pipe()
        try:
            with open(log, "wb") as errors:
                command = own_program_line(OwnProgram.RANK, "--standby")
                self._process = start_process(
                    command, environment, (its_input, its_output, errors.fileno()), keeper
                )
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
        self.ready = False  # whether it has finished its imports, so that it can fork
        self.lost = False  # whether it has ended, and with it all ranks that it forked

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_settled(self) -> bool:
        """Whether the standby is ready or lost, so that waiting for it is over."""
        self._receive()
        return self.ready or self.lost

    def fork(self, name: str, log: Path, environment: Mapping[str, str]) -> RemoteChild | None:
        """Ask the standby to fork a rank with this process name.

        Return None if it does not answer within 10 s.
        """
        self._number += 1
        request = {
            "start": self._number,
            "environment": dict(environment),
            "log": str(log),
            "name": name,
        }
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
        if pid is None or self.lost:
            return None
        return RemoteChild(pid, self)

    def ended(self, pid: int) -> int | None:
        self._receive()
        return self._ended.get(pid, -signal.SIGKILL if self.lost else None)

    def close(self) -> None:
        self._lose()
        if self._open:
            self._open = False
            os.close(self._requests)
            os.close(self._answers)

    def abandon(self, pid: int) -> None:
        """Stop tracking a rank in uninterruptible sleep (state D), so that `close` does not wait
        for it.
        """
        self._living.discard(pid)

    def _ask(self, request: bytes, limit: float) -> bool:
        """Write a request to the pipe before `limit`.

        Return False on failure, for example if the standby is frozen.
        """
        pipe = self._requests
        unsent = memoryview(request)
        while unsent and time.monotonic() < limit:
            select.select([], [pipe], [], max(0.0, limit - time.monotonic()))
            try:
                unsent = unsent[os.write(pipe, unsent) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return not unsent

    def _lose(self) -> None:
        """Kill the standby, then wait up to 10 s until the kernel has killed the ranks that it
        forked.
        """
        self.lost = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_DEADLINE_SECONDS)
        limit = time.monotonic() + _END_DEADLINE_SECONDS
        while (
            any(process_state(pid) not in ("", "Z") for pid in self._living)
            and time.monotonic() < limit
        ):
            time.sleep(0.005)
        self._living.clear()

    def _receive(self) -> None:
        if not self.lost and not self._messages.read(self._note):
            self._lose()

    def _note(self, message: dict[str, int]) -> None:
        if "ready" in message:
            self.ready = True
        elif "started" in message:
            self._started[message["started"]] = message["pid"]
            self._living.add(message["pid"])
            self._ended.pop(message["pid"], None)  # the status of an earlier process with this pid
        else:
            self._living.discard(message["ended"])
            self._ended[message["ended"]] = message["status"]


class Worker:
    """The process of one rank, with its log, heartbeat and result files in `folder`."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        folder: Path,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        start: Callable[[str, Path, Mapping[str, str]], Process],
        parents: Collection[int] = (),
    ) -> None:
        self.rank = rank
        self.log_path = folder / f"rank-{rank}.log"
        self._result_path = folder / f"rank-{rank}.result.json"
        self._error_path = folder / f"rank-{rank}.error.json"
        heartbeat_path = folder / f"rank-{rank}.heartbeat"
        spec_path = folder / f"rank-{rank}.spec.json"
        self._heartbeat = Heartbeat.create(heartbeat_path)
        own = replace(spec, heartbeat_path=str(heartbeat_path), result_path=str(self._result_path))
        spec_path.write_text(own.to_json())
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "TORCHELASTIC_ERROR_FILE": str(self._error_path),
        }
        self.log_path.write_bytes(b"")
        self.process = start(
            f"rank {rank}", self.log_path, {**environment, **ranks, SPEC_VARIABLE: str(spec_path)}
        )
        stat = process_stat(self.process.pid)
        # If the rank has ended already, its pid may belong to another process.
        if stat is not None and stat.parent in {os.getpid(), *parents}:
            self._leader = stat
        else:
            self._leader = None

    @property
    def beat(self) -> HeartbeatReading:
        return self._heartbeat.read()

    def leftovers(self, living: Sequence[ProcessStat]) -> list[ProcessStat]:
        """Return the processes in `living` that belong to the rank's session (setsid(2)), except
        the rank itself.
        """
        rank = self._leader
        if rank is None:
            return []
        # The kernel does not reuse a pid while a session with that id has members. If another
        # process has this pid, the session is empty.
        now = process_stat(rank.pid)
        if now is not None and now.started_ticks != rank.started_ticks:
            return []
        members = [stat for stat in living if stat.session == rank.pid and stat.pid != rank.pid]
        return [member for member in members if member.started_ticks >= rank.started_ticks]

    def result(self) -> RankResult | None:
        """Return the result that the rank has written; None if there is none, or no valid one."""
        try:
            return _RESULT.validate_python(_read_object(self._result_path))
        except ValidationError:
            return None

    def failure(self) -> WorkerFailure | None:
        """Return why the process ended without a result; None if it is still running or has written
        a result.
        """
        code = self.process.poll()
        if code is None or self.result() is not None:
            return None
        place = {"rank": self.rank, "step": self.beat.step, "phase": self.beat.phase}
        if code < 0:
            name = signal_name(-code)
            return WorkerFailure(
                **place, message=f"killed by {name}", killed_by=name, timestamp=time.time()
            )
        return WorkerFailure(**place, **self._error(code))

    def _error(self, code: int) -> dict[str, Any]:
        """Return fields of a `WorkerFailure` from the rank's error file, which has the format of
        torch's @record.
        """
        record = _read_object(self._error_path).get("message")
        if isinstance(record, dict):
            text = record.get("message")
        else:
            text = record
        if not isinstance(text, str):
            return {
                "message": f"exited with code {code} and no error record",
                "timestamp": time.time(),
            }
        if isinstance(record, dict):
            extra = record.get("extraInfo")
        else:
            extra = None
        if not isinstance(extra, dict):
            extra = {}
        # A program that uses @record itself has redacted nothing
        message = bounded_text(errors.redact_secrets(text))
        module, _, name = str(extra.get("class") or "").rpartition(".")
        name = bounded_text(name or message.partition(":")[0], _LONGEST_NAME)
        if module and module != errors.__name__ and error_class(name) is not errors.GangError:
            name = f"{module}.{name}"  # a user's exception with the name of one of ours
        ended_at = _unix_time(extra.get("timestamp"))
        return {
            "message": message,
            "cascade": is_peer_loss_error(message),
            "error": name,
            "timestamp": ended_at,
        }


def start_process(
    command: list[str],
    environment: Mapping[str, str],
    streams: tuple[int, int, int],
    keeper: Keeper | None,
) -> Process:
    """Start a program in its own session, so that a signal to the agent's process group does not
    reach it.
    """
    if keeper is not None and not keeper.lost:
        return keeper.spawn(command, environment, *streams)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def threads_per_rank(colocated_ranks: int) -> str:
    """Return the number of CPU threads for each of the ranks that share this machine.

    It is the value of `THREADS_VARIABLE`, unless the user has set that variable.
    """
    return str(max(1, len(os.sched_getaffinity(0)) // max(1, colocated_ranks)))


def make_environment(
    rendezvous: tuple[str, int], world_size: int, local_world_size: int, colocated: int
) -> dict[str, str]:
    """Return the environment variables of a node's ranks: torchrun's, beside the user's own."""
    address, port = rendezvous
    environment = dict(
        os.environ,
        PYTHONPATH=python_path(os.environ),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
        PYTHONUNBUFFERED="1",
    )
    environment.setdefault(THREADS_VARIABLE, threads_per_rank(colocated))
    for variable, value in recorder_variables(version("torch")).items():
        environment.setdefault(variable, value)
    if not any(variable in environment for variable in _ALLOCATOR_VARIABLES):
        # Less fragmentation; no effect on a CPU
        environment[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    if address == "127.0.0.1":
        # Otherwise gloo resolves the host name, which may fail or lead to an interface that is
        # down.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


class WorkerGroup:
    """The rank processes of a node, which the constructor starts; `rendezvous` is torch's main
    address and port.
    """

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
        environment = make_environment(rendezvous, world_size, len(ranks), spec.colocated_ranks)
        # The node's number, by which Lightning finds ranks
        environment["GROUP_RANK"] = str(ranks.start // len(ranks))

        def start(name: str, log: Path, environment: Mapping[str, str]) -> Process:
            if standby and standby.ready and not standby.lost:
                forked = standby.fork(name, log, environment)
            else:
                forked = None
            if forked is not None:
                return forked
            command = own_program_line(OwnProgram.RANK)
            with open(log, "ab") as output, open(os.devnull, "rb") as nothing:
                return start_process(
                    command,
                    environment,
                    (nothing.fileno(), output.fileno(), output.fileno()),
                    keeper,
                )

        self.workers: list[Worker] = []
        self._standby = standby
        self._keeper = keeper
        parents = {parent.pid for parent in (standby, keeper) if parent is not None}
        try:
            for local_rank, rank in enumerate(ranks):
                self.workers.append(
                    Worker(rank, local_rank, folder, spec, environment, start, parents)
                )
        except BaseException:  # a full disk or process table: end the ranks that have started
            self.end(ranks)
            raise

    def all_exited(self) -> bool:
        return all(worker.process.poll() is not None for worker in self.workers)

    def results(self) -> dict[int, RankResult]:
        """Return the results of the ranks that have written one."""
        results = {worker.rank: worker.result() for worker in self.workers}
        return {rank: result for rank, result in results.items() if result is not None}

    def end(
        self,
        culprits: Sequence[int] = (),
        *,
        grace_seconds: float = _EXIT_SECONDS,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> dict[int, str]:
        """Kill the ranks in `culprits`, then end all other ranks and all processes that ranks have
        started.

        Ranks that wait for a culprit in a collective get an error. They then write their last
        events and exit within the grace period. These ranks cannot save a checkpoint, because
        saving is a collective operation too.

        Returns:
            The ranks that are still alive 10 s after SIGKILL, in uninterruptible sleep (state D).
            The result maps each of these ranks to the path of a GPU device file that the rank has
            open, or to "" if it has none open.
        """
        guilty = [worker for worker in self.workers if worker.rank in culprits]
        for worker in guilty:
            worker.process.kill()
        # A child process has copies of its rank's sockets: other ranks see a closed connection only
        # if both have ended.
        self._kill_leftovers(guilty)
        self._await_exits(time.monotonic() + grace_seconds, meanwhile)
        for worker in self.workers:
            worker.process.kill()
        self._await_exits(time.monotonic() + _KILLED_SECONDS, meanwhile)
        self._kill_leftovers(self.workers)
        stuck = [worker for worker in self.workers if worker.process.poll() is None]
        for worker in stuck:
            if self._standby is not None:
                self._standby.abandon(worker.process.pid)
        return {worker.rank: find_open_device(worker.process.pid) for worker in stuck}

    def _await_exits(self, limit: float, meanwhile: Callable[[], object]) -> None:
        while not self.all_exited() and time.monotonic() < limit:
            meanwhile()
            time.sleep(0.01)

    def _kill_leftovers(self, ended: Sequence[Worker]) -> None:
        """Kill all descendants of the keeper.

        If there is no keeper, kill the processes in the `ended` ranks' sessions.

        Ranks that are not in `ended`, and their descendants, are not killed.
        """
        keeper = self._keeper
        if self._standby is None:
            spare = ()
        else:
            spare = (self._standby.pid,)
        others = [worker.process for worker in self.workers if worker not in ended]
        trees = [process.pid for process in others if process.poll() is None]

        def find() -> list[ProcessStat]:
            if keeper is None or keeper.lost:
                below = []
            else:
                below = descendants(keeper.pid, spare, trees)
            if below:
                living = []
            else:
                living = list(all_processes())
            leftovers = [worker.leftovers(living) for worker in ended]
            return below or list(itertools.chain.from_iterable(leftovers))

        if ended:
            spared = [process_stat(pid) for pid in (*spare, *trees)]
            groups = {stat.group for stat in spared if stat is not None}
            kill_until_none(find, _LEFT_BEHIND_SECONDS, spare_groups=groups)


def find_open_device(pid: int) -> str:
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith(_DEVICES):
                    return target
    return ""


def _read_object(path: Path) -> JsonObject:
    """Return the JSON object in a rank's file; {} if the file has other content, which user code
    may have written.
    """
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_LONGEST_RECORD))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    return {}


def _unix_time(text: object) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        seconds = float(text)  # type: ignore[arg-type]
        if math.isfinite(seconds):
            return seconds
    return time.time()

"""The watch over the ranks of a node.

Not verified on a GPU; the tests put another library in its place.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.process import process_state
from ebbflow.training.errors import bounded_text
from ebbflow.training.launch.evidence import (
    PROVEN,
    SLOW,
    Dump,
    WorkerFailure,
    parse_records,
    parse_traceback,
    read_crash_stack,
)
from ebbflow.training.launch.heartbeat import STORE_PHASE, HangLimits, HeartbeatReading, PhaseThresholds, records_path

_CLOCK_SECONDS = 2.0  # the clock of the kernel's log may differ so much from that of processes
_LOG_RECORDS = 100_000


class MemoryKills:
    """Whether the kernel has killed for want of memory since this was made, in the cgroup of a process or at all.

    A container sees its own cgroup at the root of its mount; the paths of /proc/PID/cgroup are tried first.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._before: dict[Path, int] = {}
        self.follow()

    def follow(self) -> None:
        """From time to time: a process can be moved to another cgroup."""
        for file in _counter_files(self._pid):
            self._before.setdefault(file, _kills(file))

    def told(self) -> str:
        """What the kernel's log says of the end of this process; "" when it says nothing, or may not be read.

        In a container its numbers are another namespace's, so that it is silent there, and the counters must do.
        """
        for seconds, text in _kernel_log():
            if seconds >= self._since - _CLOCK_SECONDS and f"Killed process {self._pid} (" in text:
                return text
        return ""

    def happened(self) -> bool:
        return bool(self.told()) or any(_kills(file) > before for file, before in self._before.items())


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM, without mapped files; 0 when it is gone.

    The pages of libraries and data that are mapped are shared by all ranks, and dropped before anybody is killed. What
    a forked rank still shares of the standby's own memory is counted: only the kernel's look at each page
    (smaps_rollup), which takes tens of milliseconds, could tell it apart.
    """
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(1024 * int(line[1]) for line in lines if line and line[0] in ("RssAnon:", "RssShmem:"))
    except (OSError, ValueError, IndexError):
        return 0


def node_sample(pids: Iterable[int], folder: Path) -> dict[str, int]:
    """One look at the node, for its heartbeat: some tenths of a millisecond per process, and none is started."""
    sample = {"resident_bytes": sum(map(resident_bytes, pids))}
    if (available := _available_bytes()) is not None:
        sample["memory_available_bytes"] = available
    for name, path in (("disk_free_bytes", folder), ("shared_memory_free_bytes", Path("/dev/shm"))):
        try:
            sample[name] = shutil.disk_usage(path).free
        except OSError:
            continue
    return sample


def cpu_seconds(pid: int) -> float | None:
    """Of all its threads since it started (proc(5), fields 14 and 15 of stat); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _kernel_log() -> Iterable[tuple[float, str]]:
    """(seconds since boot, text) of each record of /dev/kmsg: "priority,number,microseconds,flags;text"."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        for _ in range(_LOG_RECORDS):
            try:
                prefix, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
                yield int(prefix.split(",")[2]) / 1e6, text.partition("\n")[0]
            except BrokenPipeError:  # overwritten while it was read: the next record is there
                continue
            except (OSError, ValueError, IndexError):
                return
    finally:
        os.close(log)


def _available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _counter_files(pid: int) -> Iterable[Path]:
    """Each file that counts memory kills of this process's cgroup, of versions 1 and 2; without any, the kernel's."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    candidates = [root / "memory.events", root / "memory" / "memory.oom_control"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            candidates.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            candidates.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    found = [file for file in dict.fromkeys(candidates) if file.exists()]
    return found or [Path("/proc/vmstat")]


def _kills(file: Path) -> int:
    try:
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0


_FRESH_SECONDS = 5.0


class GpuCounters:
    """Asked by a thread of its own: a driver in trouble may never answer, and the agent must not wait for it.

    One for all of an agent's life. With one for each generation, each would leave a thread at a driver that hangs.
    """

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._last: tuple[float, dict[str, int]] = (-_FRESH_SECONDS, {})
        self._thread: threading.Thread | None = None
        self._closed = False

    def sample(self) -> dict[str, int]:
        """What was found when it was last asked for: gpus, gpu_memory_used_bytes (of all), gpu_memory_free_bytes (of
        the fullest), gpu_busy_percent (of the idlest, as the driver averages it) and gpu_celsius (of the hottest).

        {} at first, where there are none, and where nothing has answered for 5 s. Returns at once.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="gpu counters", daemon=True)
            self._thread.start()
        self._wanted.set()
        at, found = self._last
        return found if time.monotonic() - at < _FRESH_SECONDS else {}

    def close(self) -> None:
        """Its thread ends with the question that it is at."""
        self._closed = True
        self._wanted.set()

    def _ask(self) -> None:
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            devices = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        except Exception:  # no binding, no driver, a device that is lost: of no concern to a job
            return
        while devices:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            self._last = (time.monotonic(), _counters(library, devices))


def _counters(library: Any, devices: list[Any]) -> dict[str, int]:
    """What a device does not tell is left out."""
    found = {"gpus": len(devices)}
    if memory := _answers(library.nvmlDeviceGetMemoryInfo, devices):
        found["gpu_memory_used_bytes"] = sum(int(one.used) for one in memory)
        found["gpu_memory_free_bytes"] = min(int(one.free) for one in memory)
    if busy := _answers(library.nvmlDeviceGetUtilizationRates, devices):
        found["gpu_busy_percent"] = min(int(one.gpu) for one in busy)
    if heat := _answers(library.nvmlDeviceGetTemperature, devices, library.NVML_TEMPERATURE_GPU):
        found["gpu_celsius"] = max(map(int, heat))
    return found


def _answers(question: Any, devices: list[Any], *more: Any) -> list[Any]:
    answers = []
    for device in devices:
        try:
            answers.append(question(device, *more))
        except Exception:  # not supported by this device, or not allowed
            continue
    return answers


_LONGEST_PLACE = 500
_STOPPED_SECONDS = 1.0  # a rank that is stopped for so long is not merely being looked at
_STATE_SECONDS = 0.25  # between two looks at the kernel's word
_LONGEST_TURN_SECONDS = 1.0  # of the agent's loop; the rest of a longer one (a frozen container) is nobody's silence
_DUMP_FRESH_SECONDS = 5.0  # a dump is shown as where a rank stands
_SUSPICION_SECONDS = 30.0  # between two dumps of what is only remarkable


class WatchedWorker(Protocol):
    """What is watched: a rank's process and its heartbeat; files beside its log are named alike."""

    rank: int
    log_path: Path
    process: Any

    @property
    def beat(self) -> HeartbeatReading: ...
    def result(self) -> dict | None: ...
    def failure(self) -> WorkerFailure | None: ...


class RankWatch:
    """Reports each rank once: as ended, stopped, or without progress for longer than its phase may take.

    Stacks and flight recorders of all ranks of the node are in files before a rank that still lives is reported; with
    it come witnesses, the other ranks as they stood then. deadlines: see `Deadlines`. folder: for the dumps. gpus: the
    agent's, which outlives this watch; None: nobody asks for them.
    """

    def __init__(
        self,
        workers: Sequence[WatchedWorker],
        deadlines: HangLimits,
        folder: Path,
        *,
        node: int = 0,
        gpus: GpuCounters | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._ranks = [_Rank(worker, deadlines, node) for worker in workers]
        self._folder = folder
        self._pool = ThreadPoolExecutor(max_workers=len(self._ranks), thread_name_prefix="dump")
        self._gpus = gpus
        self._dump: Dump | None = None
        self._dumps = 0
        self._told: Dump | None = None  # the dump whose witnesses were handed out
        self._wanted = False
        self._suspected_at = -_SUSPICION_SECONDS
        self._looked = now()
        self._absent_seconds = self._patient_seconds = 0.0

    def look(self, *, patient: bool = False) -> list[WorkerFailure]:
        """What is new. Microseconds per rank while all goes well. patient: a rank somewhere waits for the store, and
        all others for that rank: this time is no silence of theirs, also when it is over."""
        now = self._now()
        if now - self._looked > _LONGEST_TURN_SECONDS:
            self._absent_seconds += now - self._looked - _LONGEST_TURN_SECONDS
        elif patient:
            self._patient_seconds += now - self._looked
        self._looked = now
        found = [failure for rank in self._ranks if (failure := rank.ended())]
        if found:
            found += [witness for rank in self._ranks if (witness := rank.gone())]
        living = [rank for rank in self._ranks if rank.living]
        for rank in living:
            rank.look(now, self._absent_seconds, self._patient_seconds)
        due = [rank for rank in living if not rank.reported and (rank.stopped or rank.hung)]
        remarkable = any(rank.remarkable for rank in living) and now - self._suspected_at >= _SUSPICION_SECONDS
        if due or remarkable or self._wanted:
            found += self._dumped(living, due, remarkable, now)
        return found

    def request_witnesses(self) -> None:
        """Somebody on another node failed: one of the next looks tells where all ranks of this node stand."""
        self._wanted = True

    def sample(self) -> dict[str, int]:
        """Memory, disk and GPUs of the node, for its heartbeat."""
        for rank in self._ranks:
            rank.sample()
        node = node_sample([rank.pid for rank in self._ranks if rank.living], self._folder)
        return node if self._gpus is None else node | self._gpus.sample()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _dumped(self, living: list[_Rank], due: list[_Rank], remarkable: bool, now: float) -> list[WorkerFailure]:
        """Start a dump, or wait for it; when it is there, all that it shows."""
        if self._dump is None or (self._dump.done and now - self._dump.at > _DUMP_FRESH_SECONDS):
            self._dumps += 1
            heartbeats = {rank.number: (rank.pid, rank.heartbeat) for rank in living}
            self._dump = Dump(self._pool, self._folder / f"dump-{self._dumps}", heartbeats, now)
        if not self._dump.done:
            return []
        dump, found = self._dump, [rank.failed(self._dump, now) for rank in due]
        if remarkable:
            self._suspected_at = now
        if self._told is not dump or self._wanted:
            self._told, self._wanted = dump, False
            found += [rank.witness(dump) for rank in living if rank not in due]
            found += [witness for rank in self._ranks if (witness := rank.gone())]
        return found


class _Rank:
    """One rank: what was seen of it and what was reported."""

    def __init__(self, worker: WatchedWorker, deadlines: HangLimits, node: int) -> None:
        self._worker = worker
        self._node = node
        self._limits = PhaseThresholds(deadlines)
        self._kills = MemoryKills(worker.process.pid)
        self._state_at = 0.0
        self._stopped_since: float | None = None
        self._resident = 0
        self._beat = worker.beat
        self._silent = self._absent_before = self._patient_before = self._absent_at_look = 0.0
        self.reported = False
        self.stopped = self.hung = self.remarkable = False

    @property
    def number(self) -> int:
        return self._worker.rank

    @property
    def pid(self) -> int:
        return self._worker.process.pid

    @property
    def heartbeat(self) -> Path:
        return self._worker.log_path.with_suffix(".heartbeat")

    @property
    def living(self) -> bool:
        return self._worker.process.poll() is None

    def look(self, now: float, absent: float, patient: float) -> None:
        """Seconds since the start. absent: in which nobody looked; patient: in which some rank waited for the store."""
        beat = self._worker.beat
        if absent != self._absent_at_look:  # while nobody looked, a stopped rank may have been stopped with its agent
            self._absent_at_look, self._stopped_since = absent, None
        if beat.t_mono != self._beat.t_mono:
            self._absent_before, self._patient_before = absent, patient
        self._beat = beat
        self._limits.observe(beat, now)
        self._silent = now - beat.t_mono - (absent - self._absent_before)
        excused = 0.0 if beat.phase == STORE_PHASE else patient - self._patient_before
        self.hung = self._silent - excused > self._limits.limit(beat)
        self.remarkable = self._silent > self._limits.suspicion_threshold(beat)
        if now - self._state_at >= _STATE_SECONDS:
            self._state_at = now
            if process_state(self.pid) != "T":  # "t" is a debugger's doing, and in its hands
                self._stopped_since = None
            elif self._stopped_since is None:
                self._stopped_since = now
        self.stopped = self._stopped_since is not None and now - self._stopped_since > _STOPPED_SECONDS

    def sample(self) -> None:
        if self.living:
            self._resident = resident_bytes(self.pid)
            self._kills.follow()

    def ended(self) -> WorkerFailure | None:
        """The end of its process, once, if it is not one that was to come."""
        if self.reported or (failure := self._worker.failure()) is None:
            return None
        self.reported = True
        beat = self._worker.beat
        memory_kill = failure.killed_by == "SIGKILL" and self._kills.happened()
        last = read_crash_stack(self._worker.log_path) if failure.killed_by else None
        # torch aborts a rank whose collective breaks in one of its threads; the cause is to be found elsewhere then.
        broken_call = failure.killed_by == "SIGABRT" and last is not None and last.waiting
        where = last.where if last else self._raised_at()
        message = failure.message
        if memory_kill:
            size = f", {self._resident / 2**30:.2f} GiB resident when last seen" if self._resident else ""
            told = self._kills.told()
            message += f" by the kernel for want of memory{size}{f' ({told})' if told else ''}"
        if last:
            message += f" in {where}{f': {last.reason}' if last.reason else ''}"
        return replace(
            failure,
            node=self._node,
            message=message,
            memory_kill=memory_kill,
            cascade=failure.cascade or broken_call,
            step=beat.step,
            phase=beat.phase,
            where=where,
            waiting=last.waiting if last else False,
            calls=self._last_calls(),
        )

    def gone(self) -> WorkerFailure | None:
        """As a witness: that it left as one does when all is done."""
        result = None if self.living else self._worker.result()
        if result is None:
            return None
        message = f"left after step {result.get('step')}: {result.get('outcome')}"
        return replace(self._told(message), left=True, witness=True, step=int(result.get("step", 0)))

    def failed(self, dump: Dump, now: float) -> WorkerFailure:
        """As stopped or hung, with where it stands."""
        self.reported = True
        seen, beat = dump.standing(self.number), self._beat
        place = f", {seen.where}" if seen.where else ""
        limit = "" if self.stopped else f" (limit {self._limits.limit(beat):.3g} s)"
        text = f"no progress for {self._silent:.1f} s{limit} at step {beat.step} in {beat.phase}{place}"
        if process_state(self.pid) == "D":
            text += ", in the kernel's hands (state D: a disk or a network file system that does not answer)"
        return replace(
            self.witness(dump),
            message=text + (", stopped by a signal" if self.stopped else ""),
            witness=False,
            hung=True,
            stopped=self.stopped,
            certainty=PROVEN if self.stopped else SLOW,
        )

    def witness(self, dump: Dump) -> WorkerFailure:
        seen = dump.standing(self.number)
        found = self._told(f"at step {self._beat.step} in {self._beat.phase}{f', {seen.where}' if seen.where else ''}")
        return replace(found, witness=True, where=seen.where, waiting=seen.waiting, calls=seen.calls, dump=seen.path)

    def _told(self, message: str) -> WorkerFailure:
        return WorkerFailure(
            rank=self.number,
            node=self._node,
            message=message,
            step=self._beat.step,
            phase=self._beat.phase,
            timestamp=time.time() - self._silent,
        )

    def _raised_at(self) -> str:
        """Where its exception came from, by the record that torch's @record wrote."""
        try:
            record = json.loads(self._worker.log_path.with_suffix(".error.json").read_text())["message"]
            return bounded_text(parse_traceback(record["extraInfo"]["py_callstack"]), _LONGEST_PLACE)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return ""

    def _last_calls(self) -> list[list]:
        try:
            return parse_records(records_path(self.heartbeat).read_bytes())
        except OSError:
            return []

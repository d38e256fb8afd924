"""Supervision of a node's ranks: heartbeats, process states and out-of-memory kills."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ebbflow.core.errors import Outcome
from ebbflow.core.process import (
    available_bytes,
    children,
    process_stat,
    process_state,
    read_system_file,
)
from ebbflow.training.errors import bounded_text
from ebbflow.training.launch import evidence
from ebbflow.training.launch.gpus import GpuMonitor, kernel_records
from ebbflow.training.launch.heartbeat import RECORDS, STORE_PHASES, HangLimits, PhaseThresholds
from ebbflow.training.launch.workers import Worker

_CLOCK_SECONDS = 2.0  # difference between the clock of the kernel's log and CLOCK_BOOTTIME
_LOG_RECORDS = 100_000

_LONGEST_PLACE = 500
_STOPPED_SECONDS = 1.0  # in state T before a rank counts as stopped; tracers stop it for less
_STATE_SECONDS = 0.25  # between two reads of a process's state
# Of the agent's loop; the excess of a longer turn is not counted as silence
_LONGEST_TURN_SECONDS = 1.0
_DUMP_FRESH_SECONDS = 5.0  # age up to which a dump shows a rank's position
_SUSPICION_SECONDS = 30.0  # between two dumps of ranks that are only suspiciously slow
_CPU_SECONDS = 1.0  # between two reads of the CPU time that a rank without progress has used
# A working rank and its loader workers use at least this many ticks of 10 ms in `_CPU_SECONDS`. Its
# background threads use less.
_BUSY_TICKS = 2


class MemoryKills:
    """Detector of out-of-memory kills, which reads the counters of the process's cgroups and the
    kernel log.

    `system` is the folder that contains /proc, /sys and /dev.
    """

    def __init__(self, pid: int, *, system: Path = Path("/")) -> None:
        self._pid = pid
        self._system = system
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._before: dict[Path, int] = {}
        self.follow()

    def follow(self) -> None:
        """Record the initial counters of cgroups that the process has newly entered.

        Call this regularly.
        """
        for file in _counter_files(self._pid, self._system):
            self._before.setdefault(file, _kills(file))

    def kernel_message(self) -> str:
        """Return the kernel log's line about the kill; "" if there is no such line or the log
        cannot be read.
        """
        for seconds, text in _kernel_log(self._system / "dev" / "kmsg"):
            if seconds >= self._since - _CLOCK_SECONDS and f"Killed process {self._pid} (" in text:
                return text
        return ""

    def happened(self) -> bool:
        return bool(self.kernel_message()) or any(
            _kills(file) > before for file, before in self._before.items()
        )


class RankWatch:
    """Supervisor of a node's ranks, which reports each rank once if the rank died, is stopped
    (SIGSTOP) or hangs.

    Before it reports a stopped or hung rank, it dumps stacks and flight recorders of all ranks to
    files in `folder`. It then also reports the position of each rank that has not failed: a
    `WorkerFailure` with `witness` set.

    `system` is the folder that contains /proc, /sys and /dev.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        limits: HangLimits,
        folder: Path,
        *,
        node: int = 0,
        gpus: GpuMonitor | None = None,
        now: Callable[[], float] = time.monotonic,
        system: Path = Path("/"),
    ) -> None:
        self._ranks = [_Rank(worker, limits, node, system) for worker in workers]
        self._folder = folder
        self._gpus = gpus
        self._now = now
        self._pool = ThreadPoolExecutor(max_workers=len(self._ranks), thread_name_prefix="dump")
        self._dump: evidence.Dump | None = None
        self._reported_dump: evidence.Dump | None = None
        self._dumps = 0
        self._witnesses_wanted = False
        self._suspected_at = -_SUSPICION_SECONDS
        self._checked_at = now()
        self._absent_seconds = self._store_wait_seconds = 0.0

    def check(self, *, store_wait: bool = False) -> list[evidence.WorkerFailure]:
        """Return new failures and position reports (see the class).

        Without news, a call takes microseconds per rank.

        `store_wait` is True if a rank of the gang waits for the store. All other ranks then wait
        for that rank, and this does not count as a hang.
        """
        now = self._now()
        if now - self._checked_at > _LONGEST_TURN_SECONDS:
            self._absent_seconds += now - self._checked_at - _LONGEST_TURN_SECONDS
        elif store_wait:
            self._store_wait_seconds += now - self._checked_at
        self._checked_at = now
        reports = _known(rank.exit_failure() for rank in self._ranks)
        if reports:
            reports += _known(rank.exit_witness() for rank in self._ranks)
        living = [rank for rank in self._ranks if rank.living]
        for rank in living:
            rank.check(now, self._absent_seconds, self._store_wait_seconds)
        due = [rank for rank in living if not rank.reported and (rank.stopped or rank.hung)]
        suspicious = (
            any(rank.suspicious for rank in living)
            and now - self._suspected_at >= _SUSPICION_SECONDS
        )
        if due or suspicious or self._witnesses_wanted:
            reports += self._report_dump(living, due, suspicious, now)
        return reports

    def request_witnesses(self) -> None:
        self._witnesses_wanted = True

    def sample(self) -> dict[str, int]:
        for rank in self._ranks:
            rank.sample()
        node = node_sample([rank.pid for rank in self._ranks if rank.living], self._folder)
        if self._gpus is None:
            return node
        return node | self._gpus.sample()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _report_dump(
        self, living: list[_Rank], due: list[_Rank], suspicious: bool, now: float
    ) -> list[evidence.WorkerFailure]:
        """Start a dump of stacks and flight recorders of all living ranks, unless one is running or
        at most 5 s old.

        A dump that is older than the last heartbeat of a rank in `due` does not count. Once the
        dump is done, return the failures of the ranks in `due`. Also return the positions of all
        other ranks, but only once per dump, or if the coordinator has requested them.
        """
        fresh_seconds = min([_DUMP_FRESH_SECONDS, *(rank.silent_seconds for rank in due)])
        if self._dump is None or (self._dump.done and now - self._dump.at > fresh_seconds):
            self._dumps += 1
            heartbeats = {rank.number: (rank.pid, rank.heartbeat) for rank in living}
            self._dump = evidence.Dump(
                self._pool, self._folder / f"dump-{self._dumps}", heartbeats, now
            )
        if not self._dump.done:
            return []
        dump = self._dump
        reports = [rank.failure(self._dump) for rank in due]
        if suspicious:
            self._suspected_at = now
        if self._reported_dump is not dump or self._witnesses_wanted:
            self._reported_dump = dump
            self._witnesses_wanted = False
            reports += [rank.witness(dump) for rank in living if rank not in due]
            reports += _known(rank.exit_witness() for rank in self._ranks)
        return reports


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory in bytes, except for mapped files; 0 if the process has
    ended.

    The kernel can drop mapped files.
    """
    lines = (line.split() for line in read_system_file(f"/proc/{pid}/status").splitlines())
    return sum(
        1024 * int(words[1]) for words in lines if words[:1] in (["RssAnon:"], ["RssShmem:"])
    )


def node_sample(pids: Iterable[int], folder: Path) -> dict[str, int]:
    sample = {"resident_bytes": sum(map(resident_bytes, pids))}
    available = available_bytes()
    if available is not None:
        sample["memory_available_bytes"] = available
    for name, path in (("disk_free_bytes", folder), ("shared_memory_free_bytes", Path("/dev/shm"))):
        with contextlib.suppress(OSError):
            sample[name] = shutil.disk_usage(path).free
    return sample


def _kernel_log(path: Path) -> Iterable[tuple[float, str]]:
    """Yield (seconds since boot, text) of each record in the kernel log, /dev/kmsg."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        yield from itertools.islice(kernel_records(log), _LOG_RECORDS)
    finally:
        os.close(log)


def _counter_files(pid: int, system: Path) -> Iterable[Path]:
    """Return the files that count out-of-memory kills.

    These are files of the process's cgroups or, if there are none, the file of the whole machine.
    """
    root = system / "sys" / "fs" / "cgroup"
    candidates = [root / "memory.events", root / "memory" / "memory.oom_control"]
    for line in read_system_file(system / "proc" / str(pid) / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            candidates.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            candidates.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    found = [file for file in dict.fromkeys(candidates) if file.exists()]
    return found or [system / "proc" / "vmstat"]


def _kills(file: Path) -> int:
    fields = (line.split() for line in read_system_file(file).splitlines())
    return next((int(words[1]) for words in fields if words[:1] == ["oom_kill"]), 0)


def _known(
    reports: Iterable[evidence.WorkerFailure | None],
) -> list[evidence.WorkerFailure]:
    return [report for report in reports if report is not None]


class _Rank:
    def __init__(self, worker: Worker, limits: HangLimits, node: int, system: Path) -> None:
        self._worker = worker
        self._node = node
        self._thresholds = PhaseThresholds(limits)
        self._kills = MemoryKills(worker.process.pid, system=system)
        self._state_at = 0.0
        self._stopped_since: float | None = None
        self._resident = 0
        self._beat = worker.beat
        self.silent_seconds = self._absent_before = self._store_wait_before = (
            self._absent_at_check
        ) = 0.0
        self.reported = False
        self._cpu_at = self._busy_at = self._idle_seconds = 0.0
        self._cpu_ticks = 0
        self.stopped = self.hung = self.suspicious = False

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

    def check(self, now: float, absent: float, store_wait: float) -> None:
        """Update whether the rank is stopped, hung or suspicious.

        Time during which this node's agent was suspended does not count. A wait for the store is
        not a hang.
        """
        beat = self._worker.beat
        # The rank may have been stopped together with the agent
        if absent != self._absent_at_check:
            self._absent_at_check = absent
            self._stopped_since = None
        if beat.t_mono != self._beat.t_mono:
            self._absent_before = absent
            self._store_wait_before = store_wait
        self._beat = beat
        self._thresholds.observe(beat, now)
        self.silent_seconds = now - beat.t_mono - (absent - self._absent_before)
        if beat.phase in STORE_PHASES:
            excused = 0.0
        else:
            excused = store_wait - self._store_wait_before
        self.hung = self.silent_seconds - excused > self._thresholds.hang_threshold(beat)
        self.suspicious = self.silent_seconds > self._thresholds.suspicion_threshold(beat)
        self._check_cpu(now)
        if now - self._state_at >= _STATE_SECONDS:
            self._state_at = now
            if self._stopped_since is None:
                since = now
            else:
                since = self._stopped_since
            if process_state(self.pid) == "T":
                self._stopped_since = since
            else:
                self._stopped_since = None  # also in state "t": stopped by a debugger
        self.stopped = (
            self._stopped_since is not None and now - self._stopped_since > _STOPPED_SECONDS
        )

    def _check_cpu(self, now: float) -> None:
        """Update since when the rank and its child processes have used no CPU time."""
        if self.silent_seconds < _CPU_SECONDS:
            self._cpu_at = self._busy_at = now
        elif now - self._cpu_at >= _CPU_SECONDS:
            read = [process_stat(pid) for pid in (self.pid, *children(self.pid))]
            stats = [stat for stat in read if stat is not None]
            ticks = sum(stat.cpu_ticks for stat in stats)
            if abs(ticks - self._cpu_ticks) >= _BUSY_TICKS or any(
                stat.state in "RD" for stat in stats
            ):
                self._busy_at = now
            self._cpu_at = now
            self._cpu_ticks = ticks
        self._idle_seconds = min(self.silent_seconds, now - self._busy_at)

    def sample(self) -> None:
        if self.living:
            self._resident = resident_bytes(self.pid)
            self._kills.follow()

    def exit_failure(self) -> evidence.WorkerFailure | None:
        """Return the failure of a process that has ended without a result; None if there is no new
        failure.
        """
        if self.reported:
            return None
        failure = self._worker.failure()
        if failure is None:
            return None
        self.reported = True
        beat = self._worker.beat
        memory_kill = failure.killed_by == "SIGKILL" and self._kills.happened()
        if failure.killed_by:
            crash = evidence.read_crash_stack(self._worker.log_path)
        else:
            crash = None
        # torch aborts a rank when a collective breaks in one of its threads: another rank is the
        # cause.
        broken_call = failure.killed_by == "SIGABRT" and crash is not None and crash.waiting
        if crash:
            where = crash.where
        else:
            where = self._read_error_location()
        message = failure.message
        if memory_kill:
            if self._resident:
                size = f", {self._resident / 2**30:.2f} GiB resident when last measured"
            else:
                size = ""
            kernel = self._kills.kernel_message()
            message += f" by the kernel: out of memory{size}{f' ({kernel})' if kernel else ''}"
        if crash:
            message += f" in {where}{f': {crash.reason}' if crash.reason else ''}"
        calls: list[list] = []
        with contextlib.suppress(OSError):
            calls = evidence.parse_records(self.heartbeat.with_suffix(RECORDS).read_bytes())
        return replace(
            failure,
            node=self._node,
            message=message,
            memory_kill=memory_kill,
            cascade=failure.cascade or broken_call,
            step=beat.step,
            phase=beat.phase,
            where=where,
            waiting=crash.waiting if crash else False,
            calls=calls,
        )

    def exit_witness(self) -> evidence.WorkerFailure | None:
        """Return a report of the rank's last position if the rank has finished with a result, else
        None.
        """
        if self.living:
            result = None
        else:
            result = self._worker.result()
        if result is None:
            return None
        message = f"left after step {result.step}: {result.outcome}"
        return replace(
            self._record(message),
            left=True,
            completed=result.outcome is Outcome.COMPLETED,
            witness=True,
            step=result.step,
        )

    def failure(self, dump: evidence.Dump) -> evidence.WorkerFailure:
        self.reported = True
        seen = self.witness(dump)
        if self.stopped:
            limit = ""
        else:
            limit = f" (limit {self._thresholds.hang_threshold(self._beat):.3g} s)"
        text = f"no progress for {self.silent_seconds:.1f} s{limit} {seen.message}"
        if process_state(self.pid) == "D":
            text += (
                ", in uninterruptible sleep (state D: a disk or network file system does not "
                "answer)"
            )
        if self.stopped:
            text += ", stopped by a signal"
        if self.stopped:
            certainty = evidence.PROVEN
        else:
            certainty = evidence.SLOW
        return replace(
            seen, message=text, witness=False, hung=True, stopped=self.stopped, certainty=certainty
        )

    def witness(self, dump: evidence.Dump) -> evidence.WorkerFailure:
        seen = dump.position(self.number)
        beat = self._beat
        if seen["where"]:
            place = f", {seen['where']}"
        else:
            place = ""
        where = f"at step {beat.step} in {beat.phase}{place}"
        return replace(self._record(where), witness=True, idle_seconds=self._idle_seconds, **seen)

    def _record(self, message: str) -> evidence.WorkerFailure:
        return evidence.WorkerFailure(
            rank=self.number,
            node=self._node,
            message=message,
            step=self._beat.step,
            phase=self._beat.phase,
            timestamp=time.time() - self.silent_seconds,
        )

    def _read_error_location(self) -> str:
        """Return the code location of the rank's exception, from the file of torch's @record; ""
        without a file.
        """
        try:
            record = json.loads(self._worker.log_path.with_suffix(".error.json").read_text())[
                "message"
            ]
            return bounded_text(
                evidence.parse_traceback(record["extraInfo"]["py_callstack"]), _LONGEST_PLACE
            )
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return ""

"""The watch over all ranks of a node: what its agent asks every few hundredths of a second."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.process import process_state
from ebbflow.training.errors import bounded_text
from ebbflow.training.launch.watch.dump import PROVEN, SLOW, Dump, WorkerFailure
from ebbflow.training.launch.watch.evidence import MemoryKills, node_sample, resident_bytes
from ebbflow.training.launch.watch.gpu import GpuCounters
from ebbflow.training.launch.watch.heartbeat import Beat, records_path
from ebbflow.training.launch.watch.limits import STORE_PHASE, Deadlines, PhaseLimits
from ebbflow.training.launch.watch.recorder import parse_records
from ebbflow.training.launch.watch.stacks import last_words, parse_traceback

_LONGEST_PLACE = 500
_STOPPED_SECONDS = 1.0  # a rank that is stopped for so long is not merely being looked at
_STATE_SECONDS = 0.25  # between two looks at the kernel's word
_LONGEST_TURN_SECONDS = 1.0  # of the agent's loop; the rest of a longer one (a frozen container) is nobody's silence
_FRESH_SECONDS = 5.0  # a dump is shown as where a rank stands
_SUSPICION_SECONDS = 30.0  # between two dumps of what is only remarkable


class Worker(Protocol):
    """What is watched: a rank's process and its heartbeat; files beside its log are named alike."""

    rank: int
    log_path: Path
    process: Any

    @property
    def beat(self) -> Beat: ...
    def result(self) -> dict | None: ...
    def failure(self) -> WorkerFailure | None: ...


class Watch:
    """Reports each rank once: as ended, stopped, or without progress for longer than its phase may take.

    Stacks and flight recorders of all ranks of the node are in files before a rank that still lives is reported; with
    it come witnesses, the other ranks as they stood then. deadlines: see `Deadlines`. folder: for the dumps. gpus: the
    agent's, which outlives this watch; None: nobody asks for them.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        deadlines: Deadlines,
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

    def want_witnesses(self) -> None:
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
        if self._dump is None or (self._dump.done and now - self._dump.at > _FRESH_SECONDS):
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

    def __init__(self, worker: Worker, deadlines: Deadlines, node: int) -> None:
        self._worker = worker
        self._node = node
        self._limits = PhaseLimits(deadlines)
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
        self.remarkable = self._silent > self._limits.ordinary(beat)
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
        last = last_words(self._worker.log_path) if failure.killed_by else None
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

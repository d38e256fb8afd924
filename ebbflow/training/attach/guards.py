"""Guards, injected faults and the promise of an attached job.

The promise says whether a resume is bit-exact.

A script's optimizer has taken a step before the job sees its loss, so a bad step cannot be skipped:
the job returns to a commit. Losses are checked at syncs (steps at which all ranks agree whether to
save), before a save. Therefore no commit holds weights after a bad loss.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import PROMISE
from ebbflow.core.json_values import JsonObject
from ebbflow.training.attach.script_state import ScriptWatch
from ebbflow.training.attach.standalone import record_exception
from ebbflow.training.attach.state import BatchSource
from ebbflow.training.compat import PrefixStore
from ebbflow.training.engine.guards.guards import Action, Guards, make_guards
from ebbflow.training.errors import AttachError
from ebbflow.training.gang import Gang, at_end_of_backward, time_waits
from ebbflow.training.launch.messages import PROBE_VARIABLE, WorkerSpec
from ebbflow.training.limits import Position
from ebbflow.training.reporter import Reporter
from ebbflow.training.session import JobSession
from ebbflow.training.step_sync import StepSync, find_slowest
from ebbflow.training.weights.load import weights_sha256

# In a step beyond the last one of another rank, which may be about to end by a break
_WATCH_SECONDS = 1.0
_LAST_REQUEST_SECONDS = 10.0
_UNEQUAL_SECONDS = 4.0
_ALL_END = timedelta(seconds=3)  # for all ranks to learn that they end; each looks every second
EXACT = "bit for bit"
CLOSE = "within tolerance"
NOT_EXACT = "not exact"
NOT_EXAMINED = "not yet examined"


class ScriptGuards:
    """Guards for a script: they judge its losses, time its ranks, and record how exactly it
    resumes.

    It also runs the probe of `ebbflow examine`.
    """

    def __init__(self, session: JobSession) -> None:
        self._session = session
        self._promised: JsonObject = {}
        path = os.environ.get(PROBE_VARIABLE)
        self._probe = Probe(path) if path else None
        self._timed = False
        self._own_seconds = 0.0
        self._slowest: JsonObject = {}
        # Samples before it are skipped after a rewind
        self.first_sample = session.guards.overrides.first_sample

    def judge(self, sync: StepSync, synced_step: int, samples: int) -> str:
        """Judge the losses since the sync at `synced_step`; return why the job must stop, else "".

        Collective.

        Raises Rewind or TooManyRewinds if the job must go back to a commit of `synced_step` or
        earlier. `samples` counts the samples read so far.
        """
        if not sync.non_finite and all(row.loss_sum == 0.0 for row in sync.rows):
            return ""  # no loss was logged
        batch_size = self._session.guards.config.training.batch_size
        judgement = self._session.judge(Position(synced_step, samples - batch_size), sync)
        if judgement.action is Action.STOP:
            return judgement.reason
        return ""

    def time_model(self, model: nn.Module) -> None:
        """Measure this rank's own time from now on, which excludes its waits for other ranks."""
        on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())
        if self._session.gang.alone or on_device:
            return  # the host of a GPU does not wait
        self._timed = True
        clock = self._session.reporter.clock
        time_waits(clock.exclude)

        def mark(module: nn.Module, _: object, output: object) -> None:
            if not module.training:
                return
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    at_end_of_backward(leaf, clock.end_own)

        model.register_forward_hook(mark)

    def end_pace(self) -> JsonObject:
        """Return the fields of a step's event about the rank's own time."""
        if not self._timed:
            return {}
        own_seconds = self._session.reporter.clock.take_own()
        self._own_seconds += own_seconds
        return {"own_seconds": own_seconds, **self._slowest}

    def take_own(self) -> float:
        """Return the rank's own seconds since the last call: without its waits for other ranks."""
        own_seconds = self._own_seconds
        self._own_seconds = 0.0
        return own_seconds

    def record_pace(self, step: int, sync: StepSync) -> None:
        """On rank 0, find the slowest rank since the last sync.

        The events of the steps until the next sync name it.
        """
        if self._timed and self._session.gang.rank == 0:
            slowest = find_slowest(sync.own_seconds)
            self._slowest = {
                "slowest_rank": slowest.rank,
                "slowest_ratio": slowest.ratio,
                "slowest_seconds": slowest.lost_seconds,
            }
            usd_per_second = self._session.limits.usd_per_second
            self._session.guards.record_pace(step, sync, usd_per_second)

    def probe(self, step: int, model: nn.Module, **facts: Any) -> None:
        """Measure the step if `ebbflow examine` asked for it (`Probe.end_step`)."""
        if self._probe is not None:
            self._probe.end_step(step, model, **facts)

    def promise(self, step: int, promise: JsonObject) -> None:
        """On rank 0, record how exactly this job resumes (`describe_promise`).

        Do nothing if an equal promise is already recorded.
        """
        if self._session.gang.rank == 0 and promise != self._promised:
            self._promised = promise
            self._session.reporter.emit(PROMISE, step=step, **promise)


class Probe:
    """Measurement of a script's second step.

    `ebbflow examine` requests it by setting EBBFLOW_PROBE to a path.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._counter = FlopCounterMode(display=False)

    def end_step(
        self, step: int, model: nn.Module, *, samples: int, steps: int, divided: bool, loader: Any
    ) -> None:
        """Begin to count operations after step 1.

        After step 2, write the results to the probe's file and exit.
        """
        if step == 1:
            self._counter.__enter__()
            return
        reads_a_share = isinstance(getattr(loader, "sampler", None), DistributedSampler)
        measured = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "flops": float(self._counter.get_total_flops()),
            "samples": samples / step,
            "steps": steps,
            "divided": divided or reads_a_share,
        }
        self._path.write_text(json.dumps(measured))
        os._exit(0)


class LoopWatch:
    """Thread that ends this rank if another rank takes no further steps while this one does.

    Otherwise their next collective would hang.

    Each rank that leaves its loop records this in the process group's store. The thread reads the
    store every second. The rank that left first is at fault. But if most ranks have left, the rank
    that still takes steps is at fault.

    The thread must end before the interpreter does (`close`). The interpreter ends the threads that
    are left when they ask for its lock, and in torch's store this aborts the process.

    Args:
        step_begun: returns the number of the step in the loop, or 0 outside it.
    """

    def __init__(self, gang: Gang, generation: str, step_begun: Callable[[], int]) -> None:
        self._rank = gang.rank
        self._size = gang.world_size
        self._step_begun = step_begun
        self._store = None
        self._left_at = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # A store that cannot be cloned
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            if not gang.alone:
                store: Any = dist.distributed_c10d._get_default_store()
                self._store = PrefixStore(f"ebbflow/{generation}", store.clone())
                self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
                self._thread.start()

    def leave(self, step: int) -> None:
        self._left_at = time.time()
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                # The first one counts
                self._store.compare_set("left", "", json.dumps([self._rank, step]))
                self._store.add("leavers", 1)

    def close(self) -> None:
        """End the thread, which may first have to finish a request to the process group's store."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_REQUEST_SECONDS)

    def _watch(self) -> None:
        store = self._store
        since = 0.0
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            while store is not None and not self._closing.wait(_WATCH_SECONDS):
                if store.check(["verdict"]):
                    self._end_process(*json.loads(store.get("verdict")))
                rank = 0
                left = sys.maxsize
                if store.check(["left"]):
                    rank, left = json.loads(store.get("left"))
                step = self._step_begun()
                if step <= left:
                    since = 0.0
                elif not since:
                    since = time.monotonic()
                if since and time.monotonic() - since > _UNEQUAL_SECONDS:
                    leavers = store.add("leavers", 0)
                    text = (
                        f"rank {rank} left its loop after step {left}, and rank {self._rank} is "
                        f"in step {step}; "
                    )
                    text += (
                        "fix: equally many steps on all ranks, such as by DistributedSampler or "
                        "drop_last=True"
                    )
                    if 2 * leavers > self._size:
                        odd = self._rank
                    else:
                        odd = rank
                    # Of several verdicts, the first counts
                    store.compare_set("verdict", "", json.dumps([text, odd]))
                    self._end_process(*json.loads(store.get("verdict")))

    def _end_process(self, text: str, odd: int) -> None:
        """End this process at the same time as all ranks end theirs.

        If one rank ended earlier, the others would report closed connections.

        The error of the rank at fault has the time at which its steps became unequal, and so is the
        first failure.
        """
        if odd == self._rank:
            at = self._left_at or time.time() - _UNEQUAL_SECONDS
        else:
            at = time.time()
        error = AttachError(text)
        record_exception(error, one_line=True, at=at)
        if self._store is not None:
            # Another rank is late, or the process with the store has ended
            with contextlib.suppress(RuntimeError):
                self._store.set(f"informed {self._rank}", "")
                self._store.wait([f"informed {rank}" for rank in range(self._size)], _ALL_END)
        os._exit(error.outcome.exit_code)


def make_script_guards(
    spec: WorkerSpec, config: RunConfig, gang: Gang, reporter: Reporter
) -> Guards:
    """Return the guards of an attached job, which go back to a commit instead of skipping a step."""
    changed: JsonObject = {"memory_growth": "off"}
    if config.guards.non_finite == "skip":
        changed["non_finite"] = "rewind"
    if config.guards.spike == "skip":
        changed["spike"] = "rewind"
    return make_guards(
        spec, config.changed("guards", **changed), gang, copies=1, emit=reporter.emit
    )


def script_sha256(model: nn.Module) -> str:
    """Hash a script's weights as `weights_sha256` does, but without the prefix that DDP adds to
    names.
    """
    model = getattr(model, "module", model)
    if isinstance(model, nn.ModuleDict):  # several models, each of which may be wrapped by DDP
        parts = {name: getattr(part, "module", part) for name, part in model.items()}
        model = nn.ModuleDict(parts)
    return weights_sha256(model)


def describe_resize(before: int, now: int) -> str:
    return f"a commit of {before} ranks was resumed on {now}, whose sums differ"


def describe_promise(
    model: nn.Module,
    *,
    has_optimizer: bool,
    source: BatchSource | None,
    same_data: str,
    resized: str,
    stray: str,
    watch: ScriptWatch,
) -> JsonObject:
    """Return how exactly the job resumes: level, same_data and reasons, as data of the event
    `promise`.

    Args:
        same_data: how a resumed run reads the same data; "" if it may read other data. Ignored if
            there is a `source`.
        resized: how the number of ranks has changed in this job; "" if it has not.
        stray: the place of the script that draws batches whose position is not saved; "" if there
            is none.
        watch: the looks at the script's variables.
    """
    lost = []
    close = []
    if source is not None:
        same_data = source.same_data
        if not same_data:
            kind = type(source.loader).__name__
            lost.append(
                f"{kind} has no sampler and no state_dict: its batches are read again, and may "
                "be others"
            )
    elif not same_data:
        lost.append("samples of an epoch are read again after a resume")
    if stray:
        same_data = ""
        lost.append(f"{stray} draws batches whose position is not saved")
    lost += watch.describe()
    if not has_optimizer:
        lost.append("attach was given no optimizer, so that its state starts anew")
    if resized:
        close.append(resized)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device != "cpu" and not torch.are_deterministic_algorithms_enabled():
        close.append(
            f"{device} kernels may sum in another order; fix: "
            "torch.use_deterministic_algorithms(True)"
        )
    if lost:
        level = NOT_EXACT
    elif not watch.is_examined:
        level = NOT_EXAMINED
    elif close:
        level = CLOSE
    else:
        level = EXACT
    return {"level": level, "same_data": same_data, "reasons": lost + close}

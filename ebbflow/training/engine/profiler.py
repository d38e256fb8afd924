"""Profile some steps of each rank: a trace for Perfetto, and tables by kind of kernel and by
collective.

Also keep snapshots of a GPU's memory: of a chosen step, and when it runs out.

Kernels are those of the GPU. Without a GPU, the operators of the CPU and the collectives of gloo
are counted instead.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.core.errors import StoreError
from ebbflow.core.events import NOTICE, PROFILE
from ebbflow.core.layout import generation_name, job_prefix
from ebbflow.core.store import Store
from ebbflow.training.engine.guards.overrides import Overrides
from ebbflow.training.launch.heartbeat import PROFILE_PHASE

if TYPE_CHECKING:
    from torch.profiler import profile

    from ebbflow.core.config.schema import RunConfig
    from ebbflow.training.gang import Gang
    from ebbflow.training.launch.messages import WorkerSpec
    from ebbflow.training.reporter import Reporter

_SNAPSHOT_ENTRIES = 100_000  # allocations and releases of a step, if guards.memory_history is 0
_NO_GPU = "these ranks use no GPU, and torch records CUDA's memory alone"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# The first pattern that a name contains decides the class of a kernel or operator.
_CLASSES = {
    "communication": r"^nccl|^gloo:|c10d|fsdp::",
    "attention": r"flash|fmha|attention|sdpa",
    "matrix products": r"gemm|cutlass|xmma|aten::(add|badd)?b?mm\b|aten::linear|convolution|cudnn.*conv",
    "optimizer": r"adam|foreach|multi_tensor|muon",
    "norms": r"norm",
    "softmax and loss": r"softmax|nll_loss|cross_entropy",
    "copies": r"memcpy|memset|copy_|aten::(cat|stack|clone|fill_|zero_)|embedding|index",
    "elementwise": r"elementwise|triton|aten::(add|mul|sub|div|gelu|silu|sum|sqrt|where)",
}
_OTHER = "other"
# Bytes of an element, as NCCL's records or C++ name its type. The float8 types, which are not named
# here, have one.
_ITEM_BYTES = {"float": 4, "double": 8, "bfloat16": 2, "half": 2, "int": 4, "long": 8, "longint": 8}
_COLLECTIVES = (
    "allreduce",
    "allgather",
    "reducescatter",
    "alltoall",
    "broadcast",
    "reduce",
    "send",
    "recv",
)

Span = Mapping[str, Any]


class StepProfiler:
    """Profiler of one rank.

    It records the configured steps, and reports them after the last one.

    Args:
        never_comes: whether no start of the job can take a step.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        config: RunConfig,
        gang: Gang,
        reporter: Reporter,
        *,
        never_comes: Callable[[int], bool],
    ) -> None:
        training = config.training
        store = _open_profiles(spec)
        self._first = training.profile_from or 1
        self._last = self._first + training.profile_steps - 1
        self._store = store
        self._never_comes = never_comes
        self._reporter = reporter
        self._rank = gang.rank
        self._on_gpu = False
        if config.parallel.mode == "hsdp":
            self._ranks = None  # gloo does not record its group
        else:
            self._ranks = gang.world_size
        self._profile: profile | None = None
        self._steps: list[int] = []
        self._reached = 0
        reporter.on_close(self.close)  # if training ends before the last step

    def reach(self, step: int) -> None:
        """Start the profile at its first step, and end it after its last.

        Call this before each step.
        """
        self._reached = step
        if step > self._last:
            self._end()
        elif step >= self._first:
            if self._profile is None:
                import torch  # a script may have none
                from torch.profiler import ProfilerActivity, profile

                self._on_gpu = torch.cuda.is_initialized()
                activities = [
                    ProfilerActivity.CPU,
                    *([ProfilerActivity.CUDA] if self._on_gpu else []),
                ]
                self._profile = profile(activities=activities, record_shapes=not self._on_gpu)
                over = self._reporter.enter_temporarily(PROFILE_PHASE)
                self._profile.start()
                over()
            self._steps.append(step)

    def close(self) -> None:
        """End the profile. After an error, drop it: its GPU may not answer."""
        if not issubclass(sys.exc_info()[0] or SystemExit, SystemExit):
            self._profile = None
        self._end()
        is_missed = self._reached < self._first and self._never_comes(self._first)
        if is_missed and self._rank == 0:
            fix = (
                f"training reached step {self._reached} only, so nothing was profiled; fix: an "
                "earlier step"
            )
            self._reporter.emit(NOTICE, message=f"training.profile_from {self._first}: {fix}")

    def _end(self) -> None:
        if self._profile is None:
            return
        over = self._reporter.enter_temporarily(PROFILE_PHASE)
        try:
            self._write(self._profile)
        except Exception as error:  # such as a full disk; a profile must not end the job
            self._reporter.emit(
                NOTICE, message=f"the profile is lost: {type(error).__name__}: {error}"
            )
        finally:
            self._profile = None
            over()

    def _write(self, found: profile) -> None:
        first = self._steps[0]
        last = self._steps[-1]
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        found.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"rank-{self._rank}-steps-{first}-{last}.json.gz")
            found.export_chrome_trace(str(path))
            content = path.read_bytes()
        spans = json.loads(gzip.decompress(content))["traceEvents"]
        tables = summarize_trace(spans, self._ranks)
        trace = f"{self._store.uri}/{path.name}"
        try:
            self._store.put(path.name, content)
        except StoreError as error:
            trace = f"lost: {error}"
        lines = {
            "profile": f"steps {first} to {last} of each rank: {trace}",
            **format_lines(tables, last - first + 1),
        }
        self._reporter.emit(
            PROFILE, step=last, first=first, last=last, trace=trace, lines=lines, **tables
        )


class StepMemory:
    """Snapshot of a GPU's memory after one step, with the step's allocations and their stacks.

    Args:
        never_comes: whether no start of the job can take a step.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        step: int,
        config: RunConfig,
        gang: Gang,
        reporter: Reporter,
        *,
        never_comes: Callable[[int], bool],
    ) -> None:
        self._step = step
        self._entries = config.guards.memory_history or _SNAPSHOT_ENTRIES
        self._recorded_anyway = _records_after_out_of_memory(spec, config)
        self._spec = spec
        self._rank = gang.rank
        self._reporter = reporter
        self._never_comes = never_comes
        self._records = False
        self._has_told = False  # of the snapshot, or why there is none
        self._reached = 0
        reporter.on_close(self.close)  # if training ends with this step, or before it

    def reach(self, step: int) -> None:
        """Begin to record GPU memory if `step` is the chosen step, or end a recording that runs.

        Call this before each step.
        """
        is_first = self._reached == 0
        self._reached = step
        if self._records:
            self._end()
        elif step == self._step:
            self._begin()
        elif is_first and step > self._step:
            self._stop()  # a script that attached after its start has begun to record

    def close(self) -> None:
        if self._records:
            self._end()
        elif not self._has_told and self._rank == 0:
            reason = self._find_reason()
            if reason:
                self._explain(reason)

    def _begin(self) -> None:
        import torch  # a script may have none

        self._records = True
        torch.cuda._lazy_call(self._record)  # a script uses its GPU only after its start

    def _record(self) -> None:
        import torch

        if self._records:
            torch.cuda.memory._record_memory_history(max_entries=self._entries, stacks="python")

    def _end(self) -> None:
        import torch

        self._records = False
        if not torch.cuda.is_initialized():
            if self._rank == 0:
                self._explain(_NO_GPU)
            return
        self._has_told = True
        told = _keep_snapshot(self._spec, self._rank, self._step, self._reporter)
        self._stop()
        message = f"rank {self._rank}, step {self._step}: memory snapshot; {told}"
        print(message, flush=True)
        self._reporter.emit(NOTICE, step=self._step, message=message)

    def _stop(self) -> None:
        import torch

        if torch.cuda.is_initialized() and not self._recorded_anyway:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _find_reason(self) -> str:
        """Return why the job has no snapshot of the step.

        Return "" if another start of the job has made the snapshot or can still make it.
        """
        import torch

        if self._reached < self._step:
            if not self._never_comes(self._step):
                return ""
            return f"training reached step {self._reached} only; fix: an earlier step"
        if not torch.cuda.is_initialized():
            return _NO_GPU
        if _has_snapshot(self._spec, self._step):
            return ""
        return "this start began after it; fix: a later step"

    def _explain(self, why: str) -> None:
        self._has_told = True
        message = f"training.memory_snapshot_step {self._step}: no snapshot, because {why}"
        print(message, flush=True)
        self._reporter.emit(NOTICE, message=message)


def make_step_watches(
    spec: WorkerSpec,
    config: RunConfig,
    gang: Gang,
    reporter: Reporter,
    *,
    is_over: Callable[[], bool] | None = None,
) -> list[Callable[[int], None]]:
    """Return functions that profile the configured steps and record the memory of one step.

    Call each of them with the step's number before the step.

    Args:
        is_over: whether a script has taken its last step; None: `training.max_steps` is the last.
    """
    watches = _open_watches(spec, config, gang, reporter, is_over=is_over)
    return [watch.reach for watch in watches]


@contextmanager
def profile_script(spec: WorkerSpec, is_attached: Callable[[], bool]) -> Iterator[None]:
    """Profile the configured steps of a script, and record the memory of one step, within this
    context.

    If the script attaches, do nothing more, because its job does both. In a script that does not
    attach, a step ends when the optimizer that stepped first has stepped. The memory of its first
    step is recorded from the start of the script.

    Args:
        is_attached: whether the script has attached.
    """
    training = spec.config.training
    if training.profile_from is None and training.memory_snapshot_step is None:
        yield
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ebbflow.core.event_log import EventLog
    from ebbflow.core.events import Origin
    from ebbflow.training.gang import Gang
    from ebbflow.training.reporter import Clock, Reporter

    gang = Gang(
        rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
    )
    origin = Origin(
        job=spec.job,
        run=spec.run,
        attempt=spec.attempt,
        generation=spec.generation,
        node=spec.node,
        rank=gang.rank,
    )
    counted: list[Any] = []  # the optimizer that stepped first, once for each step

    def count(optimizer: Any, *_: Any) -> None:
        if not is_attached() and optimizer in (counted or [optimizer]):
            counted.append(optimizer)
            for watch in watches:
                watch.reach(len(counted) + 1)

    def has_ended() -> bool:  # after an error, the script may start again
        error = sys.exc_info()[1]
        return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))

    with EventLog(Store.open(spec.store_uri).sub(job_prefix(spec.job)), origin) as log:
        # The agent already gets this rank's heartbeats, and the time of a script that does not
        # attach is not booked.
        reporter = Reporter(Clock(lambda *_, **__: None), log.emit)
        watches = _open_watches(spec, spec.config, gang, reporter, is_over=has_ended)
        for watch in watches:
            if isinstance(watch, StepMemory):  # a profile would lack the GPU, which is not used yet
                watch.reach(1)
        hook = register_optimizer_step_post_hook(count)
        try:
            yield
        finally:
            hook.remove()
            if not is_attached():
                reporter.close()


def record_memory(
    spec: WorkerSpec, config: RunConfig, gang: Gang, reporter: Reporter
) -> Callable[[int], None]:
    """Return a function that stores a snapshot of the GPU's memory after an out-of-memory error.

    The function gets the number of the step. The snapshot can be opened in pytorch.org/memory_viz.

    After the job's first out-of-memory error, the next starts also record the newest
    `guards.memory_history` allocations with their Python stacks, which the snapshot then has. Before
    it nothing is recorded, since each allocation would cost a walk over its stack.
    """
    entries = config.guards.memory_history
    if gang.device.type != "cuda" or not entries:
        return lambda _step: None
    import torch

    if _records_after_out_of_memory(spec, config):
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")
        reporter.on_close(lambda: torch.cuda.memory._record_memory_history(enabled=None))

    def keep_snapshot(step: int) -> None:
        told = _keep_snapshot(spec, gang.rank, step, reporter)
        message = f"rank {gang.rank}, step {step}: out of memory; {told}"
        print(message, flush=True)
        reporter.emit(NOTICE, step=step, message=message)

    return keep_snapshot


def summarize_trace(events: Iterable[Span], ranks: int | None) -> dict[str, Any]:
    """Return a summary of a trace: seconds per kernel class, a row per kind of collective, and
    overlap.

    The overlap is the share of the collectives' time in which other kernels run too.

    A row has the bytes of the whole buffers, and the bus bandwidth as nccl-tests defines it: it is
    comparable with the speed of a link, whatever the number of ranks. While a rank waits for others
    in a collective, its time counts.

    Args:
        events: the events of a Chrome trace; times in microseconds.
        ranks: size of the groups whose size the trace lacks; None if it is unknown.
    """
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) >= 0]
    kernels = [span for span in spans if span.get("cat") in _ON_GPU]
    collectives = [span for span in spans if span["name"].startswith("gloo:")]
    if not collectives:
        collectives = [kernel for kernel in kernels if _is_nccl(kernel)]
    classes: dict[str, float] = defaultdict(float)
    work = kernels or [span for span in spans if span.get("cat") == "cpu_op"]
    for span, seconds in _own_seconds(work):
        classes[_class_of(span["name"])] += seconds
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for collective in collectives:
        name, size, group, count = _describe_collective(collective, ranks)
        facts = {
            "name": name,
            "group": group,
            "ranks": count,
            "calls": 0,
            "bytes": 0.0,
            "seconds": 0.0,
        }
        row = rows.setdefault((name, group, count), facts)
        row["calls"] += 1
        row["bytes"] += size
        row["seconds"] += collective["dur"] / 1e6
    for row in rows.values():
        share = _bus_share(row["name"], row["ranks"])
        if share and row["seconds"]:
            row["bus_bytes_per_second"] = row["bytes"] * share / row["seconds"]
        else:
            row["bus_bytes_per_second"] = None
    others = [span for span in work if _class_of(span["name"]) != "communication"]
    whole = sum(end - start for start, end in _merge(collectives))
    either = sum(end - start for start, end in _merge([*collectives, *others]))
    both = whole + sum(end - start for start, end in _merge(others)) - either
    return {
        "classes": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "collectives": sorted(rows.values(), key=lambda row: -row["seconds"]),
        "overlap_share": both / whole if whole else None,
    }


def format_lines(tables: Mapping[str, Any], steps: int) -> dict[str, str]:
    """Format a report line for each kind of kernel and each collective, with means per step."""
    whole = sum(tables["classes"].values())
    lines = {
        f"· {name}": f"{1000 * seconds / steps:,.2f} ms per step, {100 * seconds / whole:.1f} %"
        for name, seconds in tables["classes"].items()
        if whole
    }
    for row in tables["collectives"]:
        speed = row["bus_bytes_per_second"]
        if speed:
            told = f", {speed / 1e9:.2f} GB/s on the bus"
        else:
            told = ""
        size = row["bytes"] / steps / 1e6
        time = 1000 * row["seconds"] / steps
        name = f"· {row['name']}, {row['ranks'] or 'some'} ranks"
        lines[f"{name} ({row['group']})"] = f"{size:,.2f} MB in {time:,.2f} ms per step{told}"
    share = tables["overlap_share"]
    if share is not None:
        lines["· overlapped"] = f"{100 * share:.1f} % of the collectives' time"
    return lines


def _open_watches(
    spec: WorkerSpec,
    config: RunConfig,
    gang: Gang,
    reporter: Reporter,
    *,
    is_over: Callable[[], bool] | None,
) -> list[StepProfiler | StepMemory]:
    training = config.training

    def never_comes(step: int) -> bool:
        if is_over is None:
            return step > training.max_steps
        return is_over()

    watches: list[StepProfiler | StepMemory] = []
    if training.profile_from is not None:
        watches.append(StepProfiler(spec, config, gang, reporter, never_comes=never_comes))
    step = training.memory_snapshot_step
    if step is not None:
        watches.append(StepMemory(spec, step, config, gang, reporter, never_comes=never_comes))
    return watches


def _open_profiles(spec: WorkerSpec) -> Store:
    generation = generation_name(spec.generation, spec.generation_id)
    return Store.open(spec.store_uri).sub(f"{job_prefix(spec.job)}/profiles/{generation}")


def _records_after_out_of_memory(spec: WorkerSpec, config: RunConfig) -> bool:
    """Return whether all steps' allocations are recorded because the job has run out of memory
    before.
    """
    split = Overrides.from_json(spec.overrides).gradient_accumulation_steps is not None
    return split and bool(config.guards.memory_history)


def _has_snapshot(spec: WorkerSpec, step: int) -> bool:
    """Return whether a start of the job has kept a snapshot of the step; True if this is unknown."""
    store = Store.open(spec.store_uri).sub(f"{job_prefix(spec.job)}/profiles")
    try:
        return any(kept.key.endswith(_snapshot_suffix(step)) for kept in store.list())
    except StoreError:
        return True


def _snapshot_suffix(step: int) -> str:
    return f"-memory-step-{step}.pickle"


def _keep_snapshot(spec: WorkerSpec, rank: int, step: int, reporter: Reporter) -> str:
    """Store a snapshot of the GPU's memory, and return a text that says how to open it.

    If it cannot be stored, the text says why.
    """
    import torch

    store = _open_profiles(spec)
    over = reporter.enter_temporarily("store")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"rank-{rank}{_snapshot_suffix(step)}")
            torch.cuda.memory._dump_snapshot(str(path))
            store.put(path.name, path.read_bytes())
        return f"open {store.uri}/{path.name} in pytorch.org/memory_viz"
    except Exception as error:  # such as a full disk; the job goes on all the same
        return f"the snapshot is lost: {type(error).__name__}: {error}"
    finally:
        over()


def _is_nccl(span: Span) -> bool:
    return span["name"].startswith("nccl")


def _class_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, pattern in _CLASSES.items() if re.search(pattern, lower)), _OTHER)


def _own_seconds(spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """Yield each span with its seconds, minus the seconds of the spans nested in it.

    Spans are nested only within the same thread or stream.
    """
    seconds_of: dict[int, float] = {}
    stack: list[Span] = []
    ordered = sorted(
        spans, key=lambda span: (str(span["pid"]), str(span["tid"]), span["ts"], -span["dur"])
    )
    for span in ordered:
        seconds_of[id(span)] = span["dur"] / 1e6
        while stack and not _is_inside(span, stack[-1]):
            stack.pop()
        if stack:
            seconds_of[id(stack[-1])] -= span["dur"] / 1e6
        stack.append(span)
    for span in ordered:
        yield span, seconds_of[id(span)]


def _is_inside(inner: Span, outer: Span) -> bool:
    same = (inner["pid"], inner["tid"]) == (outer["pid"], outer["tid"])
    return same and inner["ts"] < outer["ts"] + outer["dur"]


def _describe_collective(span: Span, ranks: int | None) -> tuple[str, float, str, int | None]:
    """Return a collective's name, the bytes of its whole buffer, its group's name and its number of
    ranks.
    """
    facts = span.get("args", {})
    plain = str(facts.get("Collective name", span["name"])).lower().replace("_", "")
    name = next((kind for kind in _COLLECTIVES if kind in plain), plain)
    if not _is_nccl(span):
        kind, sizes = (facts.get(key) or [None] for key in ("Input type", "Input Dims"))
        elements = math.prod(sizes[0] or [0]) * (ranks or 1 if name == "allgather" else 1)
        return name, elements * _item_bytes(kind[0]), "gloo", ranks
    elements = max(float(facts.get(f"{way} msg nelems", 0)) for way in ("In", "Out"))
    group = str(facts.get("Process Group Description") or facts.get("Process Group Name") or "")
    return name, elements * _item_bytes(facts.get("dtype")), group, facts.get("Group size", ranks)


def _item_bytes(kind: str | None) -> int:
    plain = str(kind).lower().rpartition("::")[2].replace(" ", "")
    return _ITEM_BYTES.get(plain, 1)


def _bus_share(name: str, ranks: int | None) -> float | None:
    """Return how many bytes a link carries per byte of a collective's buffer; None if unknown.

    The formulas are those of nccl-tests (PERFORMANCE.md).
    """
    if not ranks:
        return None
    shares = {
        "allreduce": 2 * (ranks - 1) / ranks,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
        "recv": 1.0,
    }
    return shares.get(name, (ranks - 1) / ranks)


def _merge(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the intervals, as start and end in seconds, in which at least one span is open."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(
        (span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6) for span in spans
    ):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged

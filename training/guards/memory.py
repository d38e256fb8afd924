"""Guards of memory: detection of steady growth, and the micro-batch that fits.

A rank that runs out of memory must not continue alone: its peers wait for it in the next collective, and a sharded
model is left half gathered. So it orders more micro-batches for the next start and ends. The batch, its samples and
their order do not change; the gradient is the same sum in other parts.
"""

from __future__ import annotations

import gc
import statistics
from collections import deque
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from ebbflow.infra.config.schema import RunConfig
from ebbflow.training.errors import BatchCannotBeSplit
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Batch, Workload

_SAMPLE_SECONDS = 1.0
_SAMPLES = 60
_SAMPLES_PER_LOOK = 10  # all pairs of 60 samples take about a millisecond
HORIZON_SECONDS = 300.0
_GIB = 2**30


class MemoryGrowthMonitor:
    """Samples this process's memory once a second, and warns if its growth reaches the limit within the horizon.

    The slope is the Theil–Sen estimator, the median over all pairs of samples: a single jump, such as a first save or
    evaluation, changes it little. Three quarters of the pairs must rise as well, since memory that goes up and down is
    no leak. And the limit must be reached in less time than was observed, so that start-up growth is not taken for a
    leak.

    Args:
        held: returns the bytes of this process.
        left: returns the bytes that this process and `sharers` like it may still allocate.
    """

    def __init__(
        self, what: str, *, held: Callable[[], float], left: Callable[[], float], sharers: int, now: Callable[[], float]
    ) -> None:
        self._what = what
        self._held, self._left, self._sharers, self._now = held, left, sharers, now
        self._next = 0.0
        self._first: float | None = None
        self._count = 0
        self._taken: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def look(self, needed_seconds: float) -> str:
        """Return the reason for new processes, or "".

        Args:
            needed_seconds: until the job is done; a limit reached after that does no harm.
        """
        now = self._now()
        if now < self._next:
            return ""
        self._next = now + _SAMPLE_SECONDS
        self._first = now if self._first is None else self._first
        self._taken.append((now, self._held()))
        self._count += 1
        if len(self._taken) < _SAMPLES or self._count % _SAMPLES_PER_LOOK:
            return ""
        slope = _slope(self._taken)
        if slope <= 0:
            return ""
        left = self._left()
        seconds = left / (slope * self._sharers)
        if seconds > min(HORIZON_SECONDS, needed_seconds, now - self._first):
            return ""
        per_second = f"{slope * self._sharers / 2**20:.1f} MiB/s"
        return f"{self._what} grows by {per_second} and {left / _GIB:.2f} GiB are left: full in {seconds:.0f} s"


def _slope(taken: deque[tuple[float, float]]) -> float:
    """Return bytes per second; 0 if fewer than three quarters of the pairs rise."""
    slopes = [(b - a) / max(t - s, 1e-9) for (s, a), (t, b) in combinations(taken, 2)]
    if statistics.quantiles(slopes, n=4)[0] <= 0:
        return 0.0
    return statistics.median(slopes)


def resident_bytes() -> float:
    """Return this process's resident bytes without mapped files; 0 without /proc.

    The kernel drops mapped files when memory gets short, so data read through a map would look like a leak (proc(5),
    /proc/pid/status).
    """
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    except OSError:
        return 0.0
    return sum(1024.0 * int(line[1]) for line in lines if line and line[0] in ("RssAnon:", "RssShmem:"))


def host_bytes_left() -> float:
    """Return the bytes that this machine or container can still allocate; infinite if unknown."""
    left = [_meminfo_available(), *(_cgroup_left(*names) for names in _CGROUP_FILES)]
    return min(left)


# Limit, use, and the lines of memory.stat with the page cache, which is dropped before anybody is killed: of cgroup v2,
# then v1. Data that was read more than once is in its active part.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", ("inactive_file", "active_file")),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def _meminfo_available() -> float:
    try:
        text = Path("/proc/meminfo").read_text()
        return float(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return float("inf")


def _cgroup_left(limit: str, use: str, droppable: tuple[str, ...]) -> float:
    """Return the bytes left in this container's control group, which is mounted as the root inside the container."""
    try:
        stat = Path(use).with_name("memory.stat").read_text()
        fields = dict(line.split() for line in stat.splitlines())
        dropped = sum(float(fields.get(name, 0)) for name in droppable)
        return float(Path(limit).read_text()) - float(Path(use).read_text()) + dropped
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")


# What AdamW keeps of each parameter. Before its first step the room for it is still to be found.
_OPTIMIZER_COPIES = 2
_HOST_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, of a device or of the host within a limit.

    The kernel's OOM killer raises no exception; the agent detects it.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _HOST_SIGNS)


def more_micro_batches(config: RunConfig, world_size: int, accumulation: int, *, factor: int = 2) -> int:
    """Return a larger number of micro-batches that divides a rank's samples evenly.

    It is at least `factor` times `accumulation`.

    Raises:
        BatchCannotBeSplit: if each micro-batch is one sample already, or the next start would refuse more than one
            (`ebbflow.training.parallel_limits`); with the arithmetic.
    """
    ddp = config.ddp
    if config.parallel.mode == "ddp" and ddp.static_graph and ddp.gradient_compression != "none":
        raise BatchCannotBeSplit(
            f"ddp.static_graph reduces gradients after each micro-batch, and ddp.gradient_compression "
            f"{ddp.gradient_compression} would compress what was compressed before, so that there can be only one; "
            "fix: set ddp.static_graph to false"
        )
    batch = config.training.batch_size
    samples = -(-batch // world_size)  # of the rank that has most
    if accumulation >= samples:
        raise BatchCannotBeSplit(
            f"training.batch_size {batch} / {world_size} ranks = {samples} samples per rank, in {accumulation} "
            "micro-batches of one sample each, which is the least there can be; fix: parallel.recompute full, "
            "parallel.mode fsdp2, fsdp.use_mixed_precision, a shorter model.sequence_length, or more memory"
        )
    even = (parts for parts in range(max(factor * accumulation, accumulation + 1), samples + 1) if samples % parts == 0)
    return next(even, samples)


def fitting_accumulation(
    config: RunConfig, gang: Gang, fits: Callable[[int], bool], *, tell: Callable[[str], None] = lambda text: None
) -> int:
    """Return the fewest micro-batches, from the configured number on, whose largest fits on all ranks. Collective.

    Args:
        fits: tries one micro-batch of a step split into that many, on this rank alone.

    Raises:
        BatchCannotBeSplit: if not even one sample fits.
    """
    accumulation = config.training.gradient_accumulation_steps
    while True:
        own = torch.tensor([float(fits(accumulation))], dtype=torch.float64, device=gang.device)
        short = [rank for rank, fitted in enumerate(gang.gather(own).flatten().tolist()) if not fitted]
        if not short:
            return accumulation
        ranks = ", ".join(map(str, short[:5]))
        tell(f"a step in {accumulation} micro-batches does not fit into the memory of rank {ranks}")
        accumulation = more_micro_batches(config, gang.world_size, accumulation, factor=1)


def try_micro_batch(workload: Workload, module: nn.Module, batch: Batch, parts: int, *, has_state: bool) -> bool:
    """Return whether forward and backward of the heaviest of `parts` micro-batches fit beside gradients and optimizer.

    The bare module is called, so that no other rank waits for this one. Gradients and buffers are restored afterwards.

    Args:
        has_state: whether the optimizer has allocated its state already; if not, AdamW's is added.
    """
    part = max(batch.split(parts), key=lambda one: one.weight)
    buffers = [buffer.clone() for buffer in module.buffers()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ballast: list[torch.Tensor] = []
    try:
        if not has_state:
            ballast += [torch.empty_like(parameter) for parameter in trained for _ in range(_OPTIMIZER_COPIES)]
        workload.loss(module, part).sum.backward()
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold the activations
        return False
    finally:
        ballast.clear()
        module.zero_grad(set_to_none=True)
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

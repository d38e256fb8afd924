"""Guards of memory: detection of steady growth, and the search for a number of micro-batches that
avoids OOM.

A rank that runs out of memory must not continue alone, because the other ranks wait for it in the
next collective, and a sharded model may be only partly gathered. So the rank records that the next
start needs more micro-batches, and exits. The next start computes the same gradient from more and
smaller micro-batches.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable
from itertools import combinations

import torch
from torch import nn

from ebbflow.core.config.device_settings import choose_loss_chunk
from ebbflow.core.config.schema import RunConfig
from ebbflow.training.errors import BatchCannotBeSplit
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Batch, Workload

_SAMPLE_SECONDS = 1.0
_SAMPLES = 60
_SAMPLES_PER_LOOK = 10  # all pairs of 60 samples take about a millisecond
HORIZON_SECONDS = 300.0
_GIB = 2**30
# The number of AdamW's moments per parameter, which it allocates in its first step.
_OPTIMIZER_COPIES = 2
# Parts of the messages of other errors, from the host's allocator, CUDA, NCCL and libraries that
# allocate themselves.
_MEMORY_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
)
# Contexts, NCCL and cuBLAS may have this share of a GPU outside of torch's allocator, and at least
# these bytes.
_OWN_SHARE = 0.1
_OWN_BYTES = 2 * _GIB


class MemoryGrowthMonitor:
    """Monitor that samples memory once per second and, after a minute, predicts when it will be
    full.

    It warns if the predicted time until memory is full is shorter than each of three times:
    `HORIZON_SECONDS`, the remaining training time, and the time since the first sample. The last
    condition excludes growth at the start. The growth rate is the Theil-Sen estimator, the median
    slope over all pairs of samples, which a single jump changes little. At least three quarters of
    the pairs must rise, because memory that rises and falls is not a leak.

    `held` returns the bytes that this process uses. `left` returns the bytes that can still be
    allocated. `sharers` processes share these bytes, and all of them are assumed to grow at the
    same rate.
    """

    def __init__(
        self,
        what: str,
        *,
        held: Callable[[], float],
        left: Callable[[], float],
        sharers: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._held = held
        self._left = left
        self._sharers = sharers
        self._now = now
        self._next = 0.0
        self._first: float | None = None
        self._count = 0
        self._taken: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def look(self, needed_seconds: float) -> str:
        """Take a sample if one is due. Return a warning if memory will be full soon, else "".

        `needed_seconds` is the remaining training time.
        """
        now = self._now()
        if now < self._next:
            return ""
        self._next = now + _SAMPLE_SECONDS
        if self._first is None:
            self._first = now
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
        return (
            f"{self._what} grows by {per_second} and {left / _GIB:.2f} GiB are left: full in "
            f"{seconds:.0f} s"
        )


class GpuPeaks:
    """Peaks of the memory of a rank's GPU. Reading them does not wait for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = (0, 0)

    def take(self) -> dict[str, int] | None:
        """Return the peaks in bytes; None if no peak has grown by more than 1 % since the last
        result.
        """
        peaks = (
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
        )
        if all(new <= 1.01 * old for new, old in zip(peaks, self._known, strict=True)):
            return None
        self._known = peaks
        return {"allocated_bytes": peaks[0], "reserved_bytes": peaks[1]}


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error).lower() for sign in _MEMORY_SIGNS
    )


def memory_of_other_processes(device: torch.device) -> str:
    """Describe how much of the GPU's memory other processes use; "" if this is little or there is
    no GPU.
    """
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    other = total - free - torch.cuda.memory_reserved(device)
    if other > max(_OWN_SHARE * total, _OWN_BYTES):
        return f"{other / _GIB:.1f} of {total / _GIB:.1f} GiB"
    return ""


def more_micro_batches(
    config: RunConfig, world_size: int, accumulation: int, *, factor: int = 2
) -> int:
    """Return the next number of micro-batches, at least `factor` × `accumulation`, that divides the
    samples evenly.

    Raises BatchCannotBeSplit if each micro-batch has only one sample, or other options require a
    single micro-batch.
    """
    ddp = config.ddp
    if config.parallel.mode == "ddp" and ddp.static_graph and ddp.gradient_compression != "none":
        raise BatchCannotBeSplit(
            "ddp.static_graph reduces gradients after each micro-batch, and "
            f"ddp.gradient_compression {ddp.gradient_compression} would compress what was "
            "compressed before, so that there can be only one; fix: set ddp.static_graph to false"
        )
    batch = config.training.batch_size
    world_size = world_size // config.parallel.tensor_size
    samples = -(-batch // world_size)  # on the rank with the most samples
    if accumulation >= samples:
        raise BatchCannotBeSplit(
            f"training.batch_size {batch} / {world_size} ranks = {samples} samples per rank, in "
            f"{accumulation} micro-batches of one sample each, which is the least there can be; "
            f"fix: {_name_memory_keys(config)}a shorter model.sequence_length, or more memory"
        )
    even = (
        parts
        for parts in range(max(factor * accumulation, accumulation + 1), samples)
        if samples % parts == 0
    )
    return next(even, samples)


def fitting_accumulation(
    config: RunConfig,
    gang: Gang,
    fits: Callable[[int], bool],
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Return the smallest number of micro-batches for which memory suffices on all ranks.

    The result is at least the configured number. All ranks must call this function together.
    """
    accumulation = config.training.gradient_accumulation_steps
    while True:
        short = [
            rank
            for rank, (fitted,) in enumerate(gang.gather_numbers([fits(accumulation)]))
            if not fitted
        ]
        if not short:
            return accumulation
        ranks = ", ".join(map(str, short[:5]))
        tell(f"a step in {accumulation} micro-batches does not fit into the memory of rank {ranks}")
        accumulation = more_micro_batches(config, gang.world_size, accumulation, factor=1)


def try_micro_batch(
    workload: Workload, module: nn.Module, batch: Batch, parts: int, *, has_state: bool
) -> bool:
    """Return whether memory suffices for forward and backward on the largest of `parts`
    micro-batches.

    This calls the module without its DDP wrapper, so that no other rank waits, and afterwards
    clears the gradients and restores the buffers. If `has_state` is False, it first allocates as
    much memory as the state of AdamW needs.
    """
    part = max(batch.split(parts), key=lambda micro_batch: micro_batch.weight)
    buffers = [buffer.clone() for buffer in module.buffers()]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ballast: list[torch.Tensor] = []
    try:
        if not has_state:
            ballast += [
                torch.empty_like(parameter)
                for parameter in trained
                for _ in range(_OPTIMIZER_COPIES)
            ]
        workload.loss(module, part).sum.backward()
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # its frames hold the activations
        return False
    finally:
        ballast.clear()
        module.zero_grad()
        for buffer, before in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _name_memory_keys(config: RunConfig) -> str:
    """Return the configuration keys, with values, that would save GPU memory, each followed by a
    comma.
    """
    keys = []
    if config.user_code is None and config.training.loss_chunk is None:
        keys.append(f"training.loss_chunk_tokens {choose_loss_chunk(config.model.vocab_size)}")
    if config.parallel.recompute != "full":
        keys.append("parallel.recompute full")
    if config.parallel.mode == "ddp":
        keys.append("parallel.mode fsdp2")
    if not config.fsdp.mixes_precision:
        keys.append("fsdp.use_mixed_precision true")
    if not config.fsdp.cpu_offload and config.parallel.mode != "ddp":
        keys.append("fsdp.cpu_offload true")
    return "".join(f"{key}, " for key in keys)


def _slope(taken: deque[tuple[float, float]]) -> float:
    """Return the growth in bytes per second; 0 if memory rises in fewer than three quarters of the
    pairs of samples.
    """
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(taken, 2)]
    if statistics.quantiles(slopes, n=4)[0] <= 0:
        return 0.0
    return statistics.median(slopes)

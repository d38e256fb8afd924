"""`evaluate` tried before anything is paid for: on a rank it first runs long after the start."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import distributed, nn

from training.errors import WorkloadError
from training.workload import Workload, as_numbers
from training.workloads.door import users_code

# A workload is tried within EXAMINE_SECONDS. What the ranks do together on GPUs may take longer alone on a CPU, and
# that must not refuse a job.
LONGEST_SECONDS = 20.0


class _Enough(BaseException):
    """No Exception, which the user's code might catch."""


def try_evaluate(name: str, workload: Workload, model: nn.Module, *, seconds: float = LONGEST_SECONDS) -> str:
    """Call `evaluate` once, as a gang of one rank does, and say what was done.

    model: in evaluation mode. seconds: then it is left, undecided. Raises WorkloadError for what it raises, and for
    metrics that are not finite numbers by name.
    """
    if distributed.is_initialized():  # a collective of its own would wait for ranks that are not here
        return "evaluate not tried, because the ranks of the gang are not all here"
    torch.manual_seed(0)
    try:
        with users_code(f"{name}.evaluate"), torch.no_grad(), _at_most(seconds):
            metrics = as_numbers(workload.evaluate(model))
    except _Enough:
        return f"evaluate not tried to its end, because it takes longer than {seconds:g} s here"
    bad = {key: value for key, value in metrics.items() if not math.isfinite(value)}
    if bad:
        found = ", ".join(f"{key} = {value}" for key, value in bad.items())
        raise WorkloadError(f"{name}.evaluate: {found}; fix: finite numbers, at the initial weights too")
    return f"evaluate gives {', '.join(metrics) or 'no metrics'}"


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises _Enough inside once the time is over; in a thread, where no signal arrives, there is no limit."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Enough

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)

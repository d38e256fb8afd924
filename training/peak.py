"""The measured peak: how fast this rank multiplies matrices, so that MFU compares with this machine, not a brochure."""

from __future__ import annotations

import time

import torch

_SECONDS = 0.2
_SIZE = {"cpu": 1024, "cuda": 4096}


def measure_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations per second of a square matrix product with this rank's threads: the best round.

    About 0.2 s. Ranks that share a machine should measure together, as they will work together.
    """
    size = _SIZE.get(device.type, 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(left, right)
    best, end = float("inf"), time.monotonic() + _SECONDS
    while time.monotonic() < end:
        start = time.monotonic()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - start)
    return 2.0 * size**3 / best

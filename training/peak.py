"""The measured peak: how fast this rank multiplies matrices, so that MFU compares with this machine, not a brochure."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import torch

_SECONDS = 0.2
_SIZE = {"cpu": 1024, "cuda": 4096}


def peak_flops_per_second(device: torch.device, dtype: torch.dtype, kept: Path | None = None) -> float:
    """As measured now, or as an earlier rank of the same place left it in `kept`: a restart need not measure again."""
    known = {"dtype": str(dtype), "device": str(device)}
    if kept is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(kept.read_text())
            if {key: record[key] for key in known} == known:
                return float(record["flops_per_second"])
    measured = measure_flops_per_second(device, dtype)
    if kept is not None:
        with contextlib.suppress(OSError):
            kept.write_text(json.dumps({**known, "flops_per_second": measured}))
    return measured


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

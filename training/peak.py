"""The measured peak: how fast this rank multiplies matrices, so that MFU compares with this machine, not a brochure."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import torch

_SECONDS = 0.2
_AGAIN_SECONDS = 0.05  # of a restart, which has a measurement already
_SIZE = {"cpu": 1024, "cuda": 4096}


def peak_flops_per_second(device: torch.device, dtype: torch.dtype, kept: Path | None = None) -> float:
    """The best of all measurements in this place: a busy machine measures too little, and none measures too much.

    kept: the file with the best measurement of earlier ranks of this place, so that a restart measures briefly.
    """
    known = {"dtype": str(dtype), "device": str(device)}
    best = _kept_flops_per_second(kept, known)
    measured = measure_flops_per_second(device, dtype, _AGAIN_SECONDS if best else _SECONDS)
    if kept is not None and measured > best:
        with contextlib.suppress(OSError):
            kept.write_text(json.dumps({**known, "flops_per_second": measured}))
    return max(best, measured)


def _kept_flops_per_second(kept: Path | None, known: dict[str, str]) -> float:
    """0 where there is no earlier measurement of the same device and type."""
    if kept is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(kept.read_text())
            if {key: record[key] for key in known} == known:
                return float(record["flops_per_second"])
    return 0.0


def measure_flops_per_second(device: torch.device, dtype: torch.dtype, seconds: float = _SECONDS) -> float:
    """Floating point operations per second of a square matrix product with this rank's threads: the best round.

    Ranks that share a machine should measure together, as they will work together.
    """
    size = _SIZE.get(device.type, 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(left, right)
    best, end = float("inf"), time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - start)
    return 2.0 * size**3 / best

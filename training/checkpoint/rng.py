"""The random states of a rank as named byte tensors: torch, CUDA, Python and NumPy (where it is loaded)."""

from __future__ import annotations

import hashlib
import json
import random
import sys

import torch
from torch import Tensor

_PREFIX = "rng"


def capture_rng(rank: int) -> dict[str, Tensor]:
    """``rng.<rank>.<source>`` → uint8 tensor."""
    states = {"torch": torch.get_rng_state(), "python": _to_bytes(random.getstate())}
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = _to_bytes([name, keys.tolist(), position, has_gauss, gauss])
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {rng_name(rank, source): state for source, state in states.items()}


def rng_name(rank: int, source: str = "") -> str:
    return f"{_PREFIX}.{rank}.{source}"


def restore_rng(rank: int, states: dict[str, Tensor]) -> None:
    """Put back what `capture_rng` took, from whatever sources this process has too."""
    for source in ("torch", "python", "numpy", "cuda"):
        state = states.get(rng_name(rank, source))
        if state is None:
            continue
        if source == "torch":
            torch.set_rng_state(state)
        elif source == "python":
            version, numbers, gauss = json.loads(state.numpy().tobytes())
            random.setstate((version, tuple(numbers), gauss))
        elif source == "numpy" and "numpy" in sys.modules:
            name, keys, position, has_gauss, gauss = json.loads(state.numpy().tobytes())
            numpy = sys.modules["numpy"]
            numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
        elif source == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


def reseed_rng(commit: str, rank: int) -> None:
    """A seed from the commit's hash and the rank: repeatable, and different on every rank."""
    seed = int.from_bytes(hashlib.sha256(f"{commit}:{rank}".encode()).digest()[:8], "little") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _to_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)

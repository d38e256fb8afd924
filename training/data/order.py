"""The order of the data: a pure function of (seed, global sample index), so that its whole state is one integer.

Sample i belongs to epoch i // n and takes window permutation(seed, epoch)(i % n) of the n windows of the text. The
permutation is a keyed Feistel network over the next power of four, with cycle walking down to n (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3): no table of n entries, any index in constant
time, each epoch another order that visits every window exactly once. It shuffles; it is no encryption.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_BLOCK = 4096
_U64 = np.uint64


class SampleOrder:
    """Windows of `windows` non-overlapping pieces of text, in an order that `seed` fixes."""

    def __init__(self, windows: int, seed: int) -> None:
        if windows < 1:
            raise ValueError(f"an order needs at least one window, not {windows}")
        self.windows = windows
        self._seed = _U64(seed % 2**64)
        self._half_bits = _U64(max(1, (max(windows - 1, 1).bit_length() + 1) // 2))
        self._half_mask = _U64((1 << int(self._half_bits)) - 1)
        self._remembered: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def window(self, first: int, count: int) -> np.ndarray:
        """Window numbers, int64 [count], of the global sample indices first … first + count − 1."""
        parts = []
        while count > 0:
            number, start = divmod(first, _BLOCK)
            parts.append(self._block(number)[start : start + count])
            first, count = first + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _block(self, number: int) -> np.ndarray:
        """One block of the order. The last one is remembered: numpy's calls cost more than the numbers they make."""
        if self._remembered[0] != number:
            self._remembered = (number, self._compute(number * _BLOCK, _BLOCK))
        return self._remembered[1]

    def _compute(self, first: int, count: int) -> np.ndarray:
        samples = np.arange(first, first + count, dtype=np.uint64)
        epochs, positions = np.divmod(samples, _U64(self.windows))
        keys = _mix(_mix(np.full(count, self._seed, dtype=np.uint64)) ^ epochs)
        values = self._permute(positions, keys)
        outside = values >= self.windows
        while outside.any():  # cycle walking: fewer than four rounds on average, since the domain is < 4·n
            values[outside] = self._permute(values[outside], keys[outside])
            outside = values >= self.windows
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._half_mask
        for number in range(_ROUNDS):
            mixed = _mix(right ^ _mix(keys + _U64(number)))
            left, right = right, left ^ (mixed & self._half_mask)
        return (left << self._half_bits) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014): 64 bits to 64 bits, each depending on all."""
    values = values + _U64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))

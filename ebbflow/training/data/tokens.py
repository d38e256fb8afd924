"""Store token shards, and define the order in which samples are drawn from them.

The text is divided into n windows of equal length. Sample i belongs to epoch i // n and is the
window permutation(seed, epoch)(i % n). The permutation is a keyed Feistel network over the next
power of four, with cycle walking down to n (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002, methods 2 and 3). It needs no table, takes constant time per index, and
visits every window exactly once per epoch, in a different order in each epoch. It shuffles; it does
not encrypt.

<store>/tokens/<fingerprint>/train.bin  held_out.bin    unsigned little-endian integers of 1, 2 or 4 bytes
                             tokens.json                written last: if it exists, the shards are complete
"""

import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.layout import tokens_prefix
from ebbflow.core.store import Store
from ebbflow.training.data.stream import TokenStream
from ebbflow.training.data.tokenizer import dtype_of
from ebbflow.training.errors import DataError

_ROUNDS = 6
_BLOCK = 4096
_U64 = np.uint64
FORMAT_VERSION = 2
DESCRIPTION = "tokens.json"
SHARDS = {"train": "train.bin", "held_out": "held_out.bin"}
_CHUNK_TOKENS = 2**24
_READ_BYTES = 2**24
_LOOK_SECONDS = 1.0
_FREE_SHARE = 0.8  # of a volume's free space, for downloaded shards


class SampleOrder:
    """A pseudo-random order of a text's `windows` non-overlapping windows, determined by `seed`."""

    def __init__(self, windows: int, seed: int) -> None:
        if windows < 1:
            raise ValueError(f"an order needs at least one window, not {windows}")
        self.windows = windows
        self._seed = _U64(seed % 2**64)
        self._half_bits = _U64(((windows - 1).bit_length() + 1) // 2)
        self._half_mask = _U64((1 << int(self._half_bits)) - 1)
        # Blocks of 4,096 samples are computed together, because NumPy calls are costly.
        self._block = functools.lru_cache(maxsize=1)(
            lambda number: self._compute(number * _BLOCK, _BLOCK)
        )

    def window(self, first: int, count: int) -> np.ndarray:
        """Return the window numbers of `count` samples, starting at sample `first`, as int64 of
        shape [count].
        """
        parts = []
        while count > 0:
            number, start = divmod(first, _BLOCK)
            parts.append(self._block(number)[start : start + count])
            first = first + len(parts[-1])
            count = count - len(parts[-1])
        if parts:
            return np.concatenate(parts)
        return np.empty(0, dtype=np.int64)

    def _compute(self, first: int, count: int) -> np.ndarray:
        samples = np.arange(first, first + count, dtype=np.uint64)
        epochs, positions = np.divmod(samples, _U64(self.windows))
        keys = _mix(_mix(np.full(count, self._seed, dtype=np.uint64)) ^ epochs)
        values = self._permute(positions, keys)
        outside = values >= self.windows
        # Cycle walking: fewer than four rounds on average, since the domain is < 4·n
        while outside.any():
            values[outside] = self._permute(values[outside], keys[outside])
            outside = values >= self.windows
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left = values >> self._half_bits
        right = values & self._half_mask
        for number in range(_ROUNDS):
            mixed = _mix(right ^ _mix(keys + _U64(number)))
            next_right = left ^ (mixed & self._half_mask)
            left = right
            right = next_right
        return (left << self._half_bits) | right


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The description of a set of token shards."""

    fingerprint: str  # hash of everything that determines the tokens
    vocab_size: int
    train_tokens: int
    held_out_tokens: int
    # entropy per token of the train text, in nats. It is the loss of a model that knows only token
    # frequencies
    unigram_entropy_nats: float
    files: int  # number of source files, train and held out
    bytes: int  # bytes of the source files
    # Bytes of the held-out files, which make a loss per token comparable between tokenizers
    held_out_bytes: int
    shard_sha256: dict[str, str]  # SHA-256 by shard, "train" and "held_out"
    weight_unit: str = "tokens"  # the unit of a batch's weight, for reports

    @property
    def tokens_per_byte(self) -> float:
        return (self.train_tokens + self.held_out_tokens) / max(1, self.bytes)

    def to_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class TokenArrays:
    """The training and held-out shards as unsigned integers of shape [tokens], or as `TokenStream`."""

    train: np.ndarray
    held_out: np.ndarray
    about: Tokens


def downloads_folder() -> Path:
    """Return the user's own folder for downloaded shards, in the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"ebbflow-tokens-{os.getuid()}"


def open_tokens(
    store: Store,
    fingerprint: str,
    *,
    cache: Path | None = None,
    window: int = 0,
    cache_gib: float | None = None,
    alive: Callable[[], object] = lambda: None,
) -> TokenArrays:
    """Open shards as memory-mapped arrays: in place in a local store, otherwise downloaded once
    into `cache`.

    A download is verified by SHA-256, and becomes visible only when it is complete. With `window`,
    the tokens of a sample, a shard that is too large becomes a `TokenStream`. Raises DataError if
    the shards are missing, incomplete or changed.

    Args:
        cache: folder of downloads; default: `downloads_folder()`.
        cache_gib: as `data.cache_gib`.
        alive: as in `download_shard`.
    """
    shards = store.sub(tokens_prefix(fingerprint))
    about = read_description(shards)
    if about is None:
        raise DataError(
            f"{shards.uri} holds no complete token shards; fix: prepare them again with the same "
            "data"
        )
    dtype = dtype_of(about.vocab_size)
    cache = cache or downloads_folder()
    if cache_gib is None:
        room = math.inf
    else:
        room = cache_gib * 2**30
    arrays = dict[str, Any]()
    tokens = {"held_out": about.held_out_tokens, "train": about.train_tokens}  # the small one first
    for name, count in tokens.items():
        key = SHARDS[name]
        sha256 = about.shard_sha256[name]
        size = count * dtype.itemsize
        path = shards.local_path(key)
        if path is None and window and not (cache / f"{sha256}.bin").is_file():
            cache.mkdir(parents=True, exist_ok=True)
            fits = int(min(room, _FREE_SHARE * shutil.disk_usage(cache).free))
            if size > fits:
                kept = cache / f"{sha256}-{window}.rows"
                arrays[name] = TokenStream(
                    shards, key, size=count, dtype=dtype, window=window, kept=kept, kept_bytes=fits
                )
                continue
        path = path or download_shard(shards, key, sha256, size, cache, alive)
        room -= size
        if not path.is_file() or path.stat().st_size != size:
            raise DataError(
                f"{path} is not the {size} bytes that {DESCRIPTION} promises; "
                f"fix: delete {shards.uri} and prepare the tokens again"
            )
        # A plain array over the mapped file: indexing a np.memmap costs as much as copying a batch.
        arrays[name] = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    return TokenArrays(**arrays, about=about)


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each token occurs, as an int64 array of shape [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    # Bincount widens its input to eight bytes per token
    for start in range(0, tokens.size, _CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab_size)
    return counts


def entropy_nats(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0


def read_description(shards: Store) -> Tokens | None:
    """Return the description of token shards, or None if they are incomplete.

    Raises DataError if it is invalid.
    """
    try:
        return Tokens(**json.loads(shards.get(DESCRIPTION)))
    except ObjectNotFound:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{shards.uri}/{DESCRIPTION} is damaged: {error}; fix: delete it and prepare again"
        ) from error


def download_shard(
    shards: Store,
    key: str,
    sha256: str,
    size: int,
    cache: Path,
    alive: Callable[[], object] = lambda: None,
) -> Path:
    """Download a shard into a file of `cache` that is named after its SHA-256.

    One rank of each machine downloads, and the machine's other ranks wait. If the downloading rank
    dies, another rank downloads. `alive` is called after each 16 MiB, and every second of a wait.
    """
    path = cache / f"{sha256}.bin"
    if path.is_file():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with (
        open(cache / f"{sha256}.lock", "w") as lock,
        tempfile.TemporaryDirectory(dir=cache) as folder,
    ):
        while not _lock(lock):
            alive()
            time.sleep(_LOOK_SECONDS)
        if path.is_file():
            return path
        digest = hashlib.sha256()
        with open(Path(folder, "part"), "wb") as file:
            for start in range(0, size, _READ_BYTES):
                part = shards.get_range(key, start, min(_READ_BYTES, size - start))
                digest.update(part)
                file.write(part)
                alive()
        if digest.hexdigest() != sha256:
            raise DataError(
                f"{shards.uri}/{key} has sha256 {digest.hexdigest()}, not the {sha256} of "
                f"{DESCRIPTION}; fix: delete it and prepare the tokens again"
            )
        os.replace(file.name, path)
    return path


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014) to 64-bit integers."""
    values = values + _U64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def _lock(file: IO[str]) -> bool:
    """Try to lock a file, and return whether this process has the lock.

    Closing the file or ending the process releases it.

    Where files cannot be locked, as on some network file systems, each process goes on: all write
    the same bytes.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True

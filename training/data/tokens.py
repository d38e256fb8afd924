"""Token shards: text as numbers, built once, found again by what is in it.

<store>/tokens/<fingerprint>/train.bin  held_out.bin    unsigned little-endian integers of 1, 2 or 4 bytes
                             tokens.json                written last: where it is, the shards are complete
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ebbflow.infra.errors import ObjectNotFound
from ebbflow.infra.layout import tokens_prefix
from ebbflow.infra.store import Store
from ebbflow.training.data.tokenizer import dtype_of
from ebbflow.training.errors import DataError

FORMAT_VERSION = 2
DESCRIPTION = "tokens.json"
SHARDS = {"train": "train.bin", "held_out": "held_out.bin"}
_CHUNK_TOKENS = 2**24
_READ_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What is known of a set of shards. bytes: of the source files; files: their number, both sides together.

    unigram_entropy_nats: of the train text, per token: the loss of a model that knows token frequencies only.
    held_out_bytes: of the held-out files, which make a loss per token comparable between tokenizers.
    """

    fingerprint: str
    vocab_size: int
    train_tokens: int
    held_out_tokens: int
    unigram_entropy_nats: float
    files: int
    bytes: int
    held_out_bytes: int
    shard_sha256: dict[str, str]
    weight_unit: str = "tokens"

    def to_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class TokenArrays:
    """Memory-mapped shards, unsigned [tokens], and their description."""

    train: np.ndarray
    held_out: np.ndarray
    about: Tokens


def open_tokens(store: Store, fingerprint: str, *, cache: Path | None = None) -> TokenArrays:
    """The shards as memory-mapped arrays: in place on a local store, else downloaded once into `cache`.

    A download is verified by sha256 and becomes visible whole or not at all. Raises DataError when the shards are
    missing, incomplete or changed.
    """
    shards = store.sub(tokens_prefix(fingerprint))
    about = describe(shards)
    if about is None:
        raise DataError(f"{shards.uri} holds no complete token shards; fix: prepare them again with the same data")
    dtype = dtype_of(about.vocab_size)
    sizes = {"train": about.train_tokens * dtype.itemsize, "held_out": about.held_out_tokens * dtype.itemsize}
    cache = cache or Path(tempfile.gettempdir()) / f"ebbflow-tokens-{os.getuid()}"
    arrays = {}
    for name, key in SHARDS.items():
        path = shards.local_path(key) or _downloaded(shards, key, about.shard_sha256[name], sizes[name], cache)
        if not path.is_file() or path.stat().st_size != sizes[name]:
            raise DataError(
                f"{path} is not the {sizes[name]} bytes that {DESCRIPTION} promises; "
                f"fix: delete {shards.uri} and prepare the tokens again"
            )
        # As plain arrays over the mapped file: each indexing of a np.memmap costs as much as the copy of a batch.
        arrays[name] = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    return TokenArrays(arrays["train"], arrays["held_out"], about)


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each token occurs, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, tokens.size, _CHUNK_TOKENS):  # bincount widens its input to eight bytes per token
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab_size)
    return counts


def entropy_nats(counts: np.ndarray) -> float:
    """Entropy of frequencies, in nats."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def describe(shards: Store) -> Tokens | None:
    """The description of complete shards, None where there are none. Raises DataError for a damaged one."""
    try:
        return Tokens(**json.loads(shards.get(DESCRIPTION)))
    except ObjectNotFound:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{shards.uri}/{DESCRIPTION} is damaged: {error}; fix: delete it and prepare again") from error


def _downloaded(shards: Store, key: str, sha256: str, size: int, cache: Path) -> Path:
    """Named by content, so that a file with this name is the right one; two ranks may race and write the same."""
    path = cache / f"{sha256}.bin"
    if path.is_file():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=cache)
    try:
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "wb") as file:
            for start in range(0, size, _READ_BYTES):
                part = shards.get_range(key, start, min(_READ_BYTES, size - start))
                digest.update(part)
                file.write(part)
        if digest.hexdigest() != sha256:
            raise DataError(
                f"{shards.uri}/{key} has sha256 {digest.hexdigest()}, not the {sha256} of {DESCRIPTION}; "
                "fix: delete it and prepare the tokens again"
            )
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path

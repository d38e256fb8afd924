"""Token shards: text as bytes, built once, found again by what is in it.

<store>/tokens/<fingerprint>/train.bin  held_out.bin    one unsigned byte per token
                             tokens.json                written last: where it is, the shards are complete
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from infra.config.schema import DataConfig
from infra.errors import ObjectNotFound
from infra.layout import tokens_prefix
from infra.store import Store
from training.data.files import SourceFile, find_files, split_files
from training.errors import DataError

FORMAT_VERSION = 1
_CHUNK_TOKENS = 2**24
_DESCRIPTION = "tokens.json"
_SHARDS = {"train": "train.bin", "held_out": "held_out.bin"}
# Between two files, so that a window which spans them does not read as one text. Byte 0 is in no text file.
_SEPARATOR = b"\x00"


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What is known of a set of shards. bytes: of the source files; files: their number, both sides together.

    unigram_entropy_nats: of the train text, per token: the loss of a model that knows byte frequencies only.
    """

    fingerprint: str
    train_tokens: int
    held_out_tokens: int
    unigram_entropy_nats: float
    files: int
    bytes: int
    shard_sha256: dict[str, str]

    def to_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class TokenArrays:
    """Memory-mapped shards, uint8 [tokens], and their description."""

    train: np.ndarray
    held_out: np.ndarray
    about: Tokens


def prepare_tokens(data: DataConfig, store: Store, *, project_root: Path) -> Tokens:
    """Build the shards of `data` in `store` unless they are there already. Raises DataError, StoreError.

    The fingerprint covers format, tokenizer, split rule, and each file's name and content, and nothing of this
    machine: the same text has the same fingerprint everywhere.
    """
    files = find_files(data, project_root=project_root)
    contents = {file.name: _read(file) for file in files}
    fingerprint = _fingerprint(data, contents)
    shards = store.sub(tokens_prefix(fingerprint))
    if (known := _describe(shards)) is not None:
        return known
    train, held_out = split_files(files, data.held_out_fraction)
    texts = {name: _join(side, contents) for name, side in (("train", train), ("held_out", held_out))}
    for name, key in _SHARDS.items():
        shards.put(key, texts[name])
    tokens = Tokens(
        fingerprint=fingerprint,
        train_tokens=len(texts["train"]),
        held_out_tokens=len(texts["held_out"]),
        unigram_entropy_nats=unigram_entropy_nats(np.frombuffer(texts["train"], dtype=np.uint8)),
        files=len(files),
        bytes=sum(len(content) for content in contents.values()),
        shard_sha256={name: hashlib.sha256(text).hexdigest() for name, text in texts.items()},
    )
    shards.put(_DESCRIPTION, json.dumps(tokens.to_json(), indent=1).encode())
    return tokens


def open_tokens(store: Store, fingerprint: str, *, cache: Path | None = None) -> TokenArrays:
    """The shards as memory-mapped arrays: in place on a local store, else downloaded once into `cache`.

    A download is verified by sha256 and becomes visible whole or not at all. Raises DataError when the shards are
    missing, incomplete or changed.
    """
    shards = store.sub(tokens_prefix(fingerprint))
    about = _describe(shards)
    if about is None:
        raise DataError(f"{shards.uri} holds no complete token shards; fix: prepare them again with the same data")
    sizes = {"train": about.train_tokens, "held_out": about.held_out_tokens}
    cache = cache or Path(tempfile.gettempdir()) / f"ebbflow-tokens-{os.getuid()}"
    arrays = {}
    for name, key in _SHARDS.items():
        path = shards.local_path(key) or _downloaded(shards, key, about.shard_sha256[name], cache)
        if not path.is_file() or path.stat().st_size != sizes[name]:
            raise DataError(
                f"{path} is not the {sizes[name]} bytes that {_DESCRIPTION} promises; "
                f"fix: delete {shards.uri} and prepare the tokens again"
            )
        arrays[name] = np.memmap(path, dtype=np.uint8, mode="r")
    return TokenArrays(arrays["train"], arrays["held_out"], about)


def unigram_entropy_nats(tokens: np.ndarray) -> float:
    """Entropy of the token frequencies, in nats per token."""
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, tokens.size, _CHUNK_TOKENS):  # bincount widens its input to eight bytes per token
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=256)
    shares = counts[counts > 0] / tokens.size
    return float(-(shares * np.log(shares)).sum()) + 0.0 if tokens.size else math.nan


def _read(file: SourceFile) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}; fix: its permissions, or data.path") from error


def _fingerprint(data: DataConfig, contents: dict[str, bytes]) -> str:
    described = {
        "format": FORMAT_VERSION,
        "tokenizer": data.tokenizer,
        "split": f"sha256(name) < {data.held_out_fraction!r}",
        "files": [[name, hashlib.sha256(content).hexdigest()] for name, content in contents.items()],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _join(side: list[SourceFile], contents: dict[str, bytes]) -> bytes:
    return _SEPARATOR.join(contents[file.name] for file in side)


def _describe(shards: Store) -> Tokens | None:
    try:
        return Tokens(**json.loads(shards.get(_DESCRIPTION)))
    except ObjectNotFound:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{shards.uri}/{_DESCRIPTION} is damaged: {error}; fix: delete it and prepare again") from error


def _downloaded(shards: Store, key: str, sha256: str, cache: Path) -> Path:
    """Named by content, so that a file with this name is the right one; two ranks may race and write the same."""
    path = cache / f"{sha256}.bin"
    if path.is_file():
        return path
    content = shards.get(key)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(
            f"{shards.uri}/{key} has sha256 {found}, not the {sha256} of {_DESCRIPTION}; "
            "fix: delete it and prepare the tokens again"
        )
    cache.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=cache)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, path)
    return path

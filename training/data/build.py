"""Builds token shards, file by file: nothing larger than a piece of a file is held in memory."""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ebbflow.infra.config.schema import DataConfig
from ebbflow.infra.layout import tokens_prefix
from ebbflow.infra.store import Store
from ebbflow.training.data.files import SourceFile, TextJudge, find_files, open_source, split_files, split_rule
from ebbflow.training.data.tokenizer import Tokenizer, encoded, open_tokenizer, pieces
from ebbflow.training.data.tokens import (
    DESCRIPTION,
    FORMAT_VERSION,
    SHARDS,
    Tokens,
    count_tokens,
    describe,
    entropy_nats,
)
from ebbflow.training.errors import DataError


@dataclass(frozen=True)
class _Hashed:
    """A file with what was in it when it was read first."""

    file: SourceFile
    sha256: str
    size: int


@dataclass(frozen=True)
class _Shard:
    tokens: int
    sha256: str
    entropy_nats: float


def prepare_tokens(data: DataConfig, store: Store, *, project_root: Path) -> Tokens:
    """Build the shards of `data` in `store` unless they are there already. Raises DataError, StoreError.

    The fingerprint covers format, tokenizer, split rule, and each file's name and content, and nothing of this
    machine: the same text has the same fingerprint everywhere.
    """
    tokenizer = open_tokenizer(data, project_root=project_root)
    files = find_files(data, project_root=project_root)
    train, held_out = split_files(files, data.held_out_fraction)
    sides = {"train": [_hash(file) for file in train], "held_out": [_hash(file) for file in held_out]}
    hashed = sorted([*sides["train"], *sides["held_out"]], key=lambda one: (one.file.name, one.file.start))
    fingerprint = _fingerprint(split_rule(files, data.held_out_fraction), tokenizer, hashed)
    shards = store.sub(tokens_prefix(fingerprint))
    if (known := describe(shards)) is not None:
        return known
    built = {name: _build(side, tokenizer, shards, SHARDS[name]) for name, side in sides.items()}
    tokens = Tokens(
        fingerprint=fingerprint,
        vocab_size=tokenizer.vocab_size,
        train_tokens=built["train"].tokens,
        held_out_tokens=built["held_out"].tokens,
        unigram_entropy_nats=built["train"].entropy_nats,
        files=len(files),
        bytes=sum(one.size for one in hashed),
        held_out_bytes=sum(one.size for one in sides["held_out"]),
        shard_sha256={name: shard.sha256 for name, shard in built.items()},
    )
    shards.put(DESCRIPTION, json.dumps(tokens.to_json(), indent=1).encode())
    return tokens


def _hash(file: SourceFile) -> _Hashed:
    """Read the whole part once. Raises DataError when it is not text."""
    digest, size, judge = hashlib.sha256(), 0, TextJudge(file)
    for piece in _pieces_of(file):
        judge.look(piece)
        digest.update(piece)
        size += len(piece)
    judge.decide()
    return _Hashed(file, digest.hexdigest(), size)


def _fingerprint(split: str, tokenizer: Tokenizer, hashed: list[_Hashed]) -> str:
    described = {
        "format": FORMAT_VERSION,
        "tokenizer": tokenizer.identity,
        "split": split,
        "files": [[one.file.name, one.sha256] for one in hashed],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _build(side: list[_Hashed], tokenizer: Tokenizer, shards: Store, key: str) -> _Shard:
    """One shard, by way of a temporary file, since its size is known only at its end."""
    counts, digest = np.zeros(tokenizer.vocab_size, dtype=np.int64), hashlib.sha256()
    with tempfile.TemporaryFile() as file:
        for tokens in encoded((_unchanged(one) for one in side), tokenizer):
            counts += count_tokens(tokens, tokenizer.vocab_size)
            content = tokens.tobytes()
            digest.update(content)
            file.write(content)
        file.flush()
        if counts.any():
            # Not closed here: a put that failed may still hold the map, and closing it would hide the store's error.
            shards.put(key, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        else:
            shards.put(key, b"")
    return _Shard(int(counts.sum()), digest.hexdigest(), entropy_nats(counts))


def _unchanged(one: _Hashed) -> Iterator[bytes]:
    """The pieces again. Raises DataError at the end of a file that is not what was hashed."""
    digest = hashlib.sha256()
    for piece in _pieces_of(one.file):
        digest.update(piece)
        yield piece
    if digest.hexdigest() != one.sha256:
        raise DataError(f"{one.file.path} changed while it was read; fix: start again once nobody writes to it")


def _pieces_of(file: SourceFile) -> Iterator[bytes]:
    with open_source(file) as stream:
        yield from pieces(stream, limit=None if file.end is None else file.end - file.start)

"""Reads every byte of a commit and says all that is wrong with it. Torch-free."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from ebbflow.infra.errors import ObjectNotFound
from ebbflow.infra.layout import data_key, data_prefix, index_key, index_prefix, parse_commit_key
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.checksum import sha256_text
from ebbflow.training.checkpoint.manifest import Manifest, RankIndex
from ebbflow.training.checkpoint.reader import VerifiedReader, read_manifest
from ebbflow.training.checkpoint.settled import fetched
from ebbflow.training.errors import CheckpointError, CorruptCommit


def verify_commit(store: Store, key: str) -> list[str]:
    """What is wrong, one line per object; empty when all of it is sound.

    Compared are: the manifest with its key, each index with the manifest's hash of it, each data object's size and
    chunks with their sums, and the objects that lie there with those that should. Raises StoreError when the store
    cannot be read, which says nothing of the commit.
    """
    try:
        manifest = read_manifest(store, key)
    except CheckpointError as error:
        return [str(error)]
    inside = [f"{key}: {problem}" for problem in manifest.problems()]
    return [*inside, *_index_problems(store, manifest), *_data_problems(store, manifest)]


def uncommitted_saves(store: Store) -> Iterator[tuple[int, str]]:
    """(step, index prefix) of saves that all ranks finished and no manifest names.

    A manifest that is lost looks the same as a save that is just being committed or deleted, or whose processes were
    all killed between its last index and its manifest; only a person can tell, so it is said.
    """
    ranks: dict[tuple[str, str], set[str]] = defaultdict(set)
    for meta in store.list("index"):  # before the commits, so that one that comes meanwhile is seen
        parts = meta.key.split("/")
        if len(parts) == 4:
            ranks[parts[1], parts[2]].add(meta.key)
    committed = set()
    for meta in store.list("commits"):
        with contextlib.suppress(ValueError):  # not a key of ours
            step, generation, _ = parse_commit_key(meta.key)
            committed.add((generation, step))
    for (generation, text), keys in ranks.items():
        number = generation.split("-")[0]
        if not (number.isdigit() and text.isdigit()) or (int(number), int(text)) in committed:
            continue
        step = int(text)
        with contextlib.suppress(CorruptCommit, ObjectNotFound):
            first = fetched(store, index_key(generation, step, 0), RankIndex.from_bytes)
            if all(index_key(generation, step, rank) in keys for rank in range(first.save.world_size)):
                yield step, index_prefix(generation, step)


def _index_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    save = manifest.save
    expected = [index_key(save.generation, save.step, rank) for rank in range(save.world_size)]
    for key, stated in zip(expected, manifest.indexes, strict=False):
        try:
            if (actual := sha256_text(store.get(key))) != stated:
                yield f"{key}: SHA-256 {actual}, the manifest says {stated}"
        except ObjectNotFound:
            yield f"{key}: there is no such object"
    yield from _extra(store, index_prefix(save.generation, save.step), expected)


def _data_problems(store: Store, manifest: Manifest) -> Iterator[str]:
    save = manifest.save
    whole = []
    for rank, data in enumerate(manifest.data):
        if data.key != data_key(save.generation, save.step, rank):
            yield f"{data.key}: is not the place of rank {rank} of this commit"
        meta = store.head(data.key)
        if meta is None or meta.size != data.size:
            yield f"{data.key}: {f'{meta.size} bytes' if meta else 'no such object'}, {data.size} bytes were saved"
            continue
        whole.append(data)
    for problem in VerifiedReader(store, whole).problems():
        yield str(problem)
    yield from _extra(store, data_prefix(save.generation, save.step), [data.key for data in manifest.data])


def _extra(store: Store, prefix: str, expected: list[str]) -> Iterator[str]:
    for meta in store.list(prefix):
        if meta.key not in expected:
            yield f"{meta.key}: is no part of this commit"

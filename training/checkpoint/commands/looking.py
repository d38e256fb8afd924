"""list, show, verify: what is there, what counts, what is sound."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from ebbflow.infra.errors import InfraError
from ebbflow.infra.layout import data_prefix, pin_key, signature_key, verified_key
from ebbflow.infra.signing_key import NAME_VARIABLE
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.checksum import crc_text, seal, sha256_text, unseal
from ebbflow.training.checkpoint.commands.selecting import add_commit, add_uri, find
from ebbflow.training.checkpoint.lineage import Traced, trace_lineage
from ebbflow.training.checkpoint.manifest import VERSION, Manifest
from ebbflow.training.checkpoint.reader import read_manifest
from ebbflow.training.checkpoint.signing import Signer, signer, use_signing_key
from ebbflow.training.checkpoint.verify import uncommitted_saves, verify_commit
from ebbflow.training.errors import CheckpointError, CorruptCommit, RefusedCommit


def add_commands(commands: Any) -> None:
    listing = commands.add_parser("list", help="what is there, and what counts")
    add_uri(listing)
    listing.set_defaults(run=_list)
    show = commands.add_parser("show", help="one commit: what is in it, where it can be loaded, what it carries")
    add_uri(show)
    add_commit(show, default="default: the newest that counts")
    show.set_defaults(run=_show)
    verify = commands.add_parser("verify", help="read and check every byte")
    add_uri(verify)
    add_commit(verify, default="default: all")
    verify.set_defaults(run=_verify)
    sign = commands.add_parser("sign", help="verify commits that count and are not signed, and sign them")
    add_uri(sign, as_json=False)
    add_commit(sign, default="default: all")
    sign.set_defaults(run=_sign)


def _list(store: Store, options: argparse.Namespace) -> int:
    rows = [_row(store, traced) for traced in trace_lineage(store)]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"{store.uri}: no commits")
    for row in rows:
        standing = "counts" if row["reachable"] else f"does not count: {row['reason']}"
        size = "unknown size" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
        ranks = "? ranks" if row["world_size"] is None else f"of {row['world_size']} ranks, loads at {row['loads_at']}"
        pinned = "  pinned" if row["pinned"] else ""
        place = f"step {row['step']:>8}  generation {row['generation']:>4}"
        print(f"{place}  {ranks}  {size}  {row['age_seconds']:.0f} s old  {row['state']}{pinned}  {standing}")
    return 0


def _row(store: Store, traced: Traced) -> dict[str, Any]:
    """state: verified (every byte was read, and when), whole (manifest and sizes are right), or torn."""
    ref, reason = traced.ref, traced.unreachable_because
    row: dict[str, Any] = {
        "step": ref.step,
        "generation": ref.generation,
        "key": ref.key,
        "age_seconds": max(0.0, time.time() - traced.modified),
        "bytes": None,
        "world_size": None,
        "loads_at": None,
        "pinned": store.head(pin_key(ref.sha256)) is not None,
        "state": "torn",
        "verified_at": None,
    }
    try:
        manifest = read_manifest(store, ref.key)
        row |= {"bytes": manifest.size, "world_size": manifest.save.world_size, "loads_at": "any number"}
        row |= _state(store, manifest, ref.sha256)
    except CheckpointError as error:
        reason = reason or str(error)
    return {**row, "reachable": reason is None, "reason": reason}


def _state(store: Store, manifest: Manifest, sha256: str) -> dict[str, Any]:
    sizes = {meta.key: meta.size for meta in store.list(data_prefix(manifest.save.generation, manifest.save.step))}
    if any(sizes.get(data.key) != data.size for data in manifest.data):
        return {"state": "torn"}
    key = verified_key(sha256)
    if store.head(key) is None:
        return {"state": "whole"}
    try:
        return {"state": "verified", "verified_at": unseal(store.get(key), key)["t_wall"]}
    except CorruptCommit:
        return {"state": "whole"}


def _show(store: Store, options: argparse.Namespace) -> int:
    traced = find(store, options.commit)
    manifest = read_manifest(store, traced.ref.key)
    kinds = Counter[str]()
    for name, entry in manifest.tensors.items():
        kinds[name.split(".", 1)[0]] += sum(piece.length for piece in entry.pieces)
    ranks = manifest.save.world_size
    random = any(name.startswith("rng.") for name in manifest.tensors)
    about = {
        **_row(store, traced),
        "job": manifest.save.job,
        "tensors": len(manifest.tensors),
        "bytes_by_kind": dict(kinds),
        "loads_at": "any number of ranks, in any mode",  # the pieces of every tensor are boxes with a place
        "random_states_at": ranks if random else None,
        "parent": manifest.common.get("parent"),
        "extra": manifest.common.get("extra"),
    }
    if options.json:
        print(json.dumps(about, indent=2))
        return 0
    for name, value in about.items():
        print(f"{name:>18}  {value if not isinstance(value, dict | list) else json.dumps(value)}")
    exact = f"bit for bit, random states too, at {ranks}" if random else "it has no random states"
    print(f"{'':>18}  ({exact})")
    return 0


def _verify(store: Store, options: argparse.Namespace) -> int:
    rows, signed = [], {meta.key for meta in store.list("signatures")}
    for traced in [find(store, options.commit)] if options.commit else trace_lineage(store):
        problems = verify_commit(store, traced.ref.key)
        has_signature = signature_key(traced.ref.sha256) in signed
        standing = _signature_standing(store, traced.ref.key) if has_signature else "unsigned"
        row = {"step": traced.ref.step, "key": traced.ref.key, "sound": not problems, "problems": problems}
        rows.append({**row, "signature": standing})
        _mark(store, traced, sound=not problems)
        if not options.json:
            print(
                f"step {traced.ref.step:>8}  {'sound' if not problems else 'BAD'}  {standing}  {traced.ref.key}",
                flush=True,
            )
            for problem in problems:
                print(f"    {problem}")
    uncommitted = [] if options.commit else [_uncommitted(*found) for found in uncommitted_saves(store)]
    if options.json:
        print(json.dumps(rows + uncommitted, indent=2))
    if not rows:
        print(f"{store.uri}: skipped, because there are no commits", file=sys.stderr)
    for row in [] if options.json else uncommitted:
        print(f"step {row['step']:>8}  no commit  {row['key']}\n    {row['problems'][0]}")
    return 0 if rows and all(row["sound"] for row in rows) else 1


def _signature_standing(store: Store, key: str) -> str:
    signs = signer()
    if signs is None:
        return "signed (not checked: no --signing-key-env)"
    try:
        signs.check(store, key)
    except RefusedCommit:
        return "wrongly signed"
    return "signed"


def _sign(store: Store, options: argparse.Namespace) -> int:
    """Sign commits that were saved without a signature, after every byte of them was read and found sound."""
    name = os.environ.get(NAME_VARIABLE)
    if name is None:
        raise CheckpointError("sign: which key? name its variable with --signing-key-env")
    signs, bad = Signer(name), 0
    use_signing_key(None)  # what is not signed yet is read here
    signed = {meta.key for meta in store.list("signatures")}
    wanted = [find(store, options.commit)] if options.commit else trace_lineage(store)
    for ref in [one.ref for one in wanted if one.unreachable_because is None]:
        if signature_key(ref.sha256) in signed:
            print(f"step {ref.step:>8}  has a signature, left as it is  {ref.key}")
            continue
        problems = verify_commit(store, ref.key)
        bad += bool(problems)
        if not problems:
            signs.sign(store, ref.key, _sha256_of_data(store, read_manifest(store, ref.key)))
        print(f"step {ref.step:>8}  {'BAD, not ' if problems else ''}signed  {ref.key}", flush=True)
    return int(bad > 0)


def _sha256_of_data(store: Store, manifest: Manifest) -> dict[str, list[str]]:
    """SHA-256 of each chunk by data object, of bytes whose CRC was compared in the same memory."""
    found: dict[str, list[str]] = {}
    for data in manifest.data:
        rows = found[data.key] = []
        for number, crc in enumerate(data.chunks):
            start = number * data.chunk_bytes
            raw = store.get_range(data.key, start, min(data.chunk_bytes, data.size - start))
            if crc_text(raw) != crc:
                raise CorruptCommit(f"{data.key}: chunk {number} has changed since it was verified")
            rows.append(sha256_text(raw))
    return found


def _uncommitted(step: int, prefix: str) -> dict[str, Any]:
    """A row beside those of the commits. sound: None, since it is none."""
    problem = (
        "all ranks have saved, and no manifest names it: it is being committed or deleted now, or that was cut off, or "
        "its manifest is lost"
    )
    return {"step": step, "key": prefix, "sound": None, "problems": [problem]}


def _mark(store: Store, traced: Traced, *, sound: bool) -> None:
    """What was read, for `list`; who may read but not write does without."""
    key = verified_key(traced.ref.sha256)
    try:
        if sound:
            store.put(key, seal({"version": VERSION, "key": traced.ref.key, "t_wall": time.time()}))
        else:
            store.delete(key)
    except InfraError as error:
        print(f"note: {key} was not written: {error}", file=sys.stderr)

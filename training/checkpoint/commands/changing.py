"""pin, unpin, prune: what stays and what goes."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ebbflow.infra.layout import pin_key, tombstone_key
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.checksum import seal
from ebbflow.training.checkpoint.commands.selecting import add_uri, find
from ebbflow.training.checkpoint.manifest import VERSION
from ebbflow.training.checkpoint.retention import Retention, RetentionPolicy
from ebbflow.training.errors import CheckpointError


def add_commands(commands: Any) -> None:
    for name, run, text in (("pin", _pin, "keep a commit whatever the policy says"), ("unpin", _unpin, "no longer")):
        command = commands.add_parser(name, help=text)
        add_uri(command, as_json=False)
        command.add_argument("commit", metavar="COMMIT", help="a step, a key, or the start of its hash")
        command.set_defaults(run=run)
    prune = commands.add_parser("prune", help="delete what need not be kept, and what no commit names")
    add_uri(prune)
    prune.add_argument("--keep-last", type=int, default=3, metavar="K", help="default 3")
    prune.add_argument("--keep-every-steps", type=int, metavar="N", help="also the first at or after each multiple")
    prune.add_argument("--keep-best", type=int, default=0, metavar="N", help="also those of the lowest held_out_loss")
    prune.add_argument("--max-total-gib", type=float, metavar="GIB", help="of all that is kept")
    prune.add_argument("--orphan-hours", type=float, default=24.0, help="age of what no commit names (default 24)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    prune.set_defaults(run=_prune)


def _pin(store: Store, options: argparse.Namespace) -> int:
    """Pin first, look afterwards: who deletes does it the other way round, so that one of both sees the other."""
    ref = find(store, options.commit).ref
    store.put(pin_key(ref.sha256), seal({"version": VERSION, "key": ref.key, "t_wall": time.time()}))
    if store.head(tombstone_key(ref.sha256)) is not None:
        store.delete(pin_key(ref.sha256))
        raise CheckpointError(f"{store.uri}/{ref.key}: is just being deleted and cannot be pinned any more")
    print(f"pinned: step {ref.step}  {ref.key}")
    return 0


def _unpin(store: Store, options: argparse.Namespace) -> int:
    ref = find(store, options.commit).ref
    store.delete(pin_key(ref.sha256))
    print(f"no longer pinned: step {ref.step}  {ref.key}")
    return 0


def _prune(store: Store, options: argparse.Namespace) -> int:
    cap = options.max_total_gib
    try:
        policy = RetentionPolicy(
            keep_last=options.keep_last,
            keep_every_steps=options.keep_every_steps,
            keep_best=options.keep_best,
            max_total_bytes=None if cap is None else int(cap * 2**30),
            orphan_seconds=3600 * options.orphan_hours,
        )
    except ValueError as error:
        raise CheckpointError(f"prune: {error}") from error
    retention = Retention(policy)
    choice = retention.choose(store)
    orphans = retention.orphans(store)
    done = list(choice.delete) if options.dry_run else retention.prune(store)
    document = {
        "dry_run": options.dry_run,
        "kept": [{"step": ref.step, "key": ref.key, "because": why} for ref, why in choice.keep.items()],
        "deleted": [{"step": ref.step, "key": ref.key} for ref in done],
        "orphan_objects": len(orphans),
        "orphan_bytes": sum(meta.size for meta in orphans),
    }
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    for row in document["kept"]:
        print(f"keep    step {row['step']:>8}  {row['key']}  ({row['because']})")
    for row in document["deleted"]:
        print(f"{'would delete' if options.dry_run else 'deleted'}  step {row['step']:>8}  {row['key']}")
    print(f"orphans: {len(orphans)} objects, {document['orphan_bytes'] / 1e6:.1f} MB")
    return 0

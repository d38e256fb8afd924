"""The command `ebbflow checkpoints`, which inspects and changes a job's commits.

Only export and import load torch.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, ObjectNotFound, describe_error
from ebbflow.core.layout import (
    data_prefix,
    known_job,
    pin_key,
    signature_key,
    tombstone_key,
    verified_key,
)
from ebbflow.core.signing_key import NAME_PATTERN, NAME_VARIABLE, signing_key_problem
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.best import BEST, BestRule, find_best
from ebbflow.training.checkpoint.lineage import TracedCommit, trace_lineage
from ebbflow.training.checkpoint.manifest import VERSION, Manifest
from ebbflow.training.checkpoint.reader import find_uncommitted, read_manifest, verify_commit
from ebbflow.training.checkpoint.retention import Retention, RetentionPolicy, metrics_at_step
from ebbflow.training.checkpoint.signing import Signer, signer, use_signing_key
from ebbflow.training.checkpoint.verified_io import crc_text, seal, sha256_text, unseal
from ebbflow.training.errors import CheckpointError, CorruptCommit, RefusedCommit, TrainingError

_BAD_USAGE = 2
# These act on what they read, so they require the key if the job signs; the others report unchecked
# signatures.
_CHECKING = ("export", "pin", "prune", "sign")
_KINDS = ("dcp", "safetensors", "torch")


class CommitRow(TypedDict):
    """A commit as a row of the subcommand `list`.

    None means unknown, because the commit cannot be read.
    """

    step: int
    generation: int
    key: str
    age_seconds: float
    bytes: int | None
    world_size: int | None
    loads_at: str | None
    pinned: bool
    best: bool
    metrics: dict[str, float]
    state: str  # torn, whole or verified
    verified_at: float | None  # Unix time
    reachable: bool
    reason: str | None  # why it is not reachable


def main(argv: list[str]) -> int:
    """Run a subcommand.

    Return its exit code: 0 for success, 1 for an error or a damaged commit, 2 for bad usage.
    """
    options = _parser().parse_args(argv)
    try:
        fresh = options.command == "import"  # only import may create a job
        # Opening would create it
        if not fresh and "://" not in options.uri and not Path(options.uri).is_dir():
            print(
                f"error: {options.uri}: no such folder; hint: it is STORE/jobs/JOB", file=sys.stderr
            )
            return _BAD_USAGE
        store = Store.open(options.uri if fresh else _store_uri(options.uri))
        choose_signing_key(store, options.signing_key_env, must_check=options.command in _CHECKING)
        return options.run(store, options)
    except (TrainingError, InfraError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return 1


def choose_signing_key(store: Store, name: str | None, *, must_check: bool) -> None:
    """Find the environment variable that holds the signing key, and use this key from now on.

    The variable's name is `name`, else the value of EBBFLOW_SIGNING_KEY_ENV, else a value in the
    job's configuration. Without a usable key in the variable, this function raises NoSigningKey.
    There is one exception: if the name comes from the configuration and `must_check` is False,
    signatures are not checked and no error is raised.
    """
    name = name or os.environ.get(NAME_VARIABLE)
    named = _configured_name(store) if name is None else None
    if named:
        if must_check or not signing_key_problem(named):
            name = named
        else:
            name = None
    use_signing_key(name)
    signer()


def find(store: Store, wanted: str | None) -> TracedCommit:
    """Find the commit of a job that `wanted` describes.

    `wanted` is "best", a step, a key, or the first digits (6 or more) of a hash. None means the newest
    reachable commit. A commit is reachable if the job may still be resumed from it. If several
    commits match, only reachable ones count. Raises CheckpointError if no commit or more than one
    is left; the message lists the candidates.
    """
    traced = trace_lineage(store)
    if wanted is None:
        newest = next((commit for commit in traced if commit.unreachable_because is None), None)
        if newest is None:
            raise CheckpointError(
                f"{store.uri}: no commit that counts; hint: `checkpoints list` says why not"
            )
        return newest
    if wanted == BEST:
        return find_best(store, traced)
    matches = [commit for commit in traced if _matches(commit, wanted)]
    if len(matches) > 1:  # of several commits of one step, the reachable one
        reachable = [commit for commit in matches if commit.unreachable_because is None]
        matches = reachable or matches
    if len(matches) != 1:
        keys = "".join(f"\n  {commit.ref.key}" for commit in (matches or traced)[:10])
        raise CheckpointError(
            f"{store.uri}: {wanted!r} is {len(matches)} commits, not one; there are:"
            f"{keys or ' none'}"
        )
    return matches[0]


def _store_uri(uri: str) -> str:
    """Return the URI of the job's folder in the store.

    `uri` is this URI, or the job's local report folder.
    """
    if (Path(uri) / "commits").is_dir():
        known = None
    else:
        known = known_job(Path(uri))
    if known is None:
        return uri
    return known.uri


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ebbflow checkpoints", description="a job's commits")
    commands = parser.add_subparsers(dest="command", required=True)
    by_hand = "a step, a key, the start of its hash, or best"

    def add(
        name: str, run: Callable[..., int], text: str, *, commit: str = "", **more: Any
    ) -> argparse.ArgumentParser:
        """Add a subcommand.

        `commit` describes the default of the option --commit; "" omits that option.
        """
        command = commands.add_parser(name, help=text, **more)
        if name == "import":
            command.add_argument(
                "source", type=Path, metavar="SOURCE", help="file or folder; its kind is recognised"
            )
        places = "STORE/jobs/JOB, s3://bucket/prefix/jobs/JOB, or runs/JOB on this machine"
        command.add_argument("uri", metavar="URI", help=places)
        key = "variable with the signing key; default: as the job is configured"
        command.add_argument("--signing-key-env", metavar="NAME", help=key)
        if commit:
            command.add_argument("--commit", metavar="COMMIT", help=f"{by_hand}; default: {commit}")
        if name in ("list", "show", "verify", "prune"):
            command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
        return command

    add("list", _list, "all commits, and whether they count")
    add(
        "show",
        _show,
        "one commit: its tensors, where it can be loaded, its metadata",
        commit="the newest that counts",
    )
    add("verify", _verify, "read and check every byte", commit="all")
    add("sign", _sign, "verify commits that count and are not signed, and sign them", commit="all")
    pin = add("pin", _pin, "keep a commit whatever the policy says")
    unpin = add("unpin", _unpin, "undo pin")
    for command in (pin, unpin):
        command.add_argument("commit", metavar="COMMIT", help=by_hand)
    prune = add(
        "prune", _prune, "delete what the policy does not keep, and objects that no commit needs"
    )
    prune.add_argument("--keep-last", type=int, default=3, metavar="K", help="default 3")
    prune.add_argument(
        "--keep-every-steps", type=int, metavar="N", help="also the first at or after each multiple"
    )
    prune.add_argument(
        "--keep-best", type=int, default=0, metavar="N", help="also those of the best metric"
    )
    prune.add_argument(
        "--best-metric", default="held_out_loss", metavar="NAME", help="default held_out_loss"
    )
    prune.add_argument(
        "--best-mode", choices=("min", "max"), default="min", help="which value is the best"
    )
    prune.add_argument(
        "--max-total-gib", type=float, metavar="GIB", help="cap on the data of all kept commits"
    )
    prune.add_argument(
        "--orphan-hours", type=float, default=24.0, help="age of objects that no commit needs (24)"
    )
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    text = "a commit as DCP folder, safetensors or one torch file"
    export = add("export", _export, text, commit="the newest that counts")
    export.add_argument(
        "target", type=Path, metavar="TARGET", help="file, or folder for dcp; must not exist"
    )
    export.add_argument(
        "--best",
        dest="commit",
        action="store_const",
        const=BEST,
        help="the commit with the best metric (checkpoint.keep_best), like --commit best",
    )
    export.add_argument(
        "--averaged", action="store_true", help="the average of training.ema, without the optimizer"
    )
    kinds = (
        "default: by the name: .safetensors; .pt, .pth, .bin; else dcp. hugging-face: a folder "
        "for transformers"
    )
    export.add_argument("--kind", choices=(*_KINDS, "hugging-face"), help=kinds)
    text = "a DCP or model folder, safetensors or torch state dict as the first commit of a new job"
    take = add("import", _import, text)
    allow = "run the code that a torch file or DCP folder names: only for files that you trust"
    take.add_argument("--allow-pickle", action="store_true", help=allow)
    for command in (export, take):
        command.add_argument("--weights-only", action="store_true", help="without the optimizer")
    return parser


def _configured_name(store: Store) -> str | None:
    try:
        name = json.loads(store.get("config.json"))["config"]["checkpoint"]["signing_key_env"]
    except (ObjectNotFound, ValueError, KeyError, TypeError):
        return None
    if isinstance(name, str) and NAME_PATTERN.fullmatch(name):
        return name
    return None


def _matches(traced: TracedCommit, wanted: str) -> bool:
    ref = traced.ref
    if wanted.isdigit() and int(wanted) == ref.step:
        return True
    return wanted == ref.key or (len(wanted) >= 6 and ref.sha256.startswith(wanted))


def _list(store: Store, options: argparse.Namespace) -> int:
    rows = [_row(store, traced) for traced in trace_lineage(store)]
    _mark_best(store, rows)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"{store.uri}: no commits")
    for row in rows:
        if row["reachable"]:
            standing = "counts"
        else:
            standing = f"does not count: {row['reason']}"
        if row["bytes"] is None:
            size = "unknown size"
        else:
            size = f"{row['bytes'] / 1e6:.1f} MB"
        if row["world_size"] is None:
            ranks = "? ranks"
        else:
            ranks = f"of {row['world_size']} ranks, loads at {row['loads_at']}"
        marks = "".join(f"  {name}" for name in ("best", "pinned") if row[name])
        metrics = "".join(f"  {name} {value:.4g}" for name, value in row["metrics"].items())
        place = f"step {row['step']:>8}  generation {row['generation']:>4}"
        print(
            f"{place}  {ranks}  {size}  {row['age_seconds']:.0f} s old{metrics}  "
            f"{row['state']}{marks}  {standing}"
        )
    return 0


def _row(store: Store, traced: TracedCommit) -> CommitRow:
    """Describe a commit as a row of the subcommand `list`.

    The state of the commit is "verified" (every byte was read and checked), "whole" (the manifest
    is readable and all object sizes match) or "torn" (anything else).
    """
    ref = traced.ref
    reason = traced.unreachable_because
    row: CommitRow = {
        "step": ref.step,
        "generation": ref.generation,
        "key": ref.key,
        "age_seconds": max(0.0, time.time() - traced.modified),
        "bytes": None,
        "world_size": None,
        "loads_at": None,
        "pinned": store.head(pin_key(ref.sha256)) is not None,
        "best": False,
        "metrics": {},  # of the evaluation at this step
        "state": "torn",
        "verified_at": None,
        "reachable": False,
        "reason": None,
    }
    try:
        manifest = read_manifest(store, ref.key)
        row["bytes"] = manifest.size
        row["world_size"] = manifest.save.world_size
        row["loads_at"] = "any number"
        row["metrics"] = metrics_at_step(manifest.common.get("extra") or {}, ref.step)
        row["state"], row["verified_at"] = _state(store, manifest, ref.sha256)
    except CheckpointError as error:
        reason = reason or str(error)
    row["reachable"] = reason is None
    row["reason"] = reason
    return row


def _mark_best(store: Store, rows: list[CommitRow]) -> None:
    rule = BestRule.of_job(store)
    values = {
        row["key"]: row["metrics"][rule.metric]
        for row in rows
        if row["reachable"] and rule.metric in row["metrics"]
    }
    best = rule.choose(values)
    for row in rows:
        row["best"] = row["key"] == best


def _state(store: Store, manifest: Manifest, sha256: str) -> tuple[str, float | None]:
    """Return a commit's state and the Unix time at which it was verified; None if it was not
    verified.
    """
    sizes = {
        meta.key: meta.size
        for meta in store.list(data_prefix(manifest.save.generation, manifest.save.step))
    }
    if any(sizes.get(data.key) != data.size for data in manifest.data):
        return "torn", None
    key = verified_key(sha256)
    if store.head(key) is None:
        return "whole", None
    try:
        return "verified", unseal(store.get(key), key)["t_wall"]
    except CorruptCommit:
        return "whole", None


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
        # Every piece has its position in the whole tensor
        "loads_at": "any number of ranks, in any mode",
        "random_states_at": ranks if random else None,
        "parent": manifest.common.get("parent"),
        "extra": manifest.common.get("extra"),
    }
    if options.json:
        print(json.dumps(about, indent=2))
        return 0
    for name, value in about.items():
        print(f"{name:>18}  {value if not isinstance(value, dict | list) else json.dumps(value)}")
    if random:
        exact = f"bit for bit, random states too, at {ranks}"
    else:
        exact = "it has no random states"
    print(f"{'':>18}  ({exact})")
    return 0


def _verify(store: Store, options: argparse.Namespace) -> int:
    rows = []
    signed = {meta.key for meta in store.list("signatures")}
    for traced in [find(store, options.commit)] if options.commit else trace_lineage(store):
        problems = verify_commit(store, traced.ref.key)
        has_signature = signature_key(traced.ref.sha256) in signed
        if has_signature:
            standing = _signature_standing(store, traced.ref.key)
        else:
            standing = "unsigned"
        row = {
            "step": traced.ref.step,
            "key": traced.ref.key,
            "sound": not problems,
            "problems": problems,
        }
        rows.append({**row, "signature": standing})
        _record_verification(store, traced, sound=not problems)
        if not options.json:
            if problems:
                verdict = "BAD"
            else:
                verdict = "sound"
            print(f"step {traced.ref.step:>8}  {verdict}  {standing}  {traced.ref.key}", flush=True)
            for problem in problems:
                print(f"    {problem}")
    problem = (
        "all ranks have saved and no manifest names it: it is being committed or deleted, that "
        "was interrupted, or its manifest is lost"
    )
    uncommitted = [
        {"step": step, "key": prefix, "sound": None, "problems": [problem]}
        for step, prefix in ([] if options.commit else find_uncommitted(store))
    ]
    if options.json:
        print(json.dumps(rows + uncommitted, indent=2))
    if not rows:
        print(f"{store.uri}: skipped, because there are no commits", file=sys.stderr)
    for row in [] if options.json else uncommitted:
        print(f"step {row['step']:>8}  no commit  {row['key']}\n    {row['problems'][0]}")
    if rows and all(row["sound"] for row in rows):
        return 0
    return 1


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
    """Sign every reachable commit that has no signature yet. Verify all its bytes first."""
    name = os.environ.get(NAME_VARIABLE)
    if name is None:
        raise CheckpointError("sign: which key? name its variable with --signing-key-env")
    signs = Signer(name)
    bad = 0
    use_signing_key(None)  # otherwise unsigned commits would be refused
    signed = {meta.key for meta in store.list("signatures")}
    if options.commit:
        wanted = [find(store, options.commit)]
    else:
        wanted = trace_lineage(store)
    for ref in [commit.ref for commit in wanted if commit.unreachable_because is None]:
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
    """Return the SHA-256 values of the chunks of each data object, by the object's key.

    Check the CRC of each chunk again, because the chunk may have changed since it was verified.
    """
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


def _record_verification(store: Store, traced: TracedCommit, *, sound: bool) -> None:
    """Record the result of `verify`, so that `list` can show it.

    If the store is not writable, only print a note.
    """
    key = verified_key(traced.ref.sha256)
    try:
        if sound:
            store.put(key, seal({"version": VERSION, "key": traced.ref.key, "t_wall": time.time()}))
        else:
            store.delete(key)
    except InfraError as error:
        print(f"note: {key} was not written: {error}", file=sys.stderr)


def _pin(store: Store, options: argparse.Namespace) -> int:
    """Pin a commit, so that retention never deletes it.

    This function writes the pin, then looks for a tombstone (the record that a deletion has begun).
    A deletion writes the tombstone, then looks for a pin. So of a concurrent pin and deletion, at
    least one sees the other.
    """
    ref = find(store, options.commit).ref
    store.put(
        pin_key(ref.sha256), seal({"version": VERSION, "key": ref.key, "t_wall": time.time()})
    )
    if store.head(tombstone_key(ref.sha256)) is not None:
        store.delete(pin_key(ref.sha256))
        raise CheckpointError(
            f"{store.uri}/{ref.key}: is being deleted and can no longer be pinned"
        )
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
            best_metric=options.best_metric,
            best_mode=options.best_mode,
            max_total_bytes=None if cap is None else int(cap * 2**30),
            orphan_seconds=3600 * options.orphan_hours,
        )
    except ValueError as error:
        raise CheckpointError(f"prune: {error}") from error
    retention = Retention(policy)
    choice = retention.choose_commits(store)
    orphans = retention.orphans(store)
    if options.dry_run:
        done = list(choice.delete)
    else:
        done = retention.prune(store)
    document = {
        "dry_run": options.dry_run,
        "kept": [
            {"step": ref.step, "key": ref.key, "because": why} for ref, why in choice.keep.items()
        ],
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
        print(
            f"{'would delete' if options.dry_run else 'deleted'}  step {row['step']:>8}  "
            f"{row['key']}"
        )
    print(f"orphans: {len(orphans)} objects, {document['orphan_bytes'] / 1e6:.1f} MB")
    return 0


def _export(store: Store, options: argparse.Namespace) -> int:
    from ebbflow.training.checkpoint.file_formats import write_file
    from ebbflow.training.checkpoint.portable_state import read_commit

    ref = find(store, options.commit).ref
    content = read_commit(store, ref.key)
    if options.kind == "hugging-face":
        config = _config_of_job(store)
    else:
        config = None
    if options.averaged:
        content = content.averaged()
    if options.weights_only or config:
        content = content.without_optimizer()
    by_name = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
    kind = options.kind or by_name.get(options.target.suffix, "dcp")
    write_file(content, options.target, kind, config)
    size = sum(tensor.numel() * tensor.element_size() for tensor in content.named().values())
    print(
        f"exported: step {ref.step}, {size / 1e6:.1f} MB, verified, as {kind} to {options.target}"
    )
    return 0


def _config_of_job(store: Store) -> RunConfig:
    try:
        config = RunConfig.model_validate_json(
            json.dumps(json.loads(store.get("config.json"))["config"])
        )
    except (ObjectNotFound, ValueError, KeyError, TypeError) as error:
        cause = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{store.uri}/config.json: cannot be read: {cause}; hint: --kind safetensors"
        ) from error
    if config.user_code is not None:
        raise CheckpointError(
            f"hugging-face is for the built-in model, not {config.user_code}; hint: --kind "
            "safetensors"
        )
    return config


def _import(store: Store, options: argparse.Namespace) -> int:
    from ebbflow.training.checkpoint.file_formats import read_file
    from ebbflow.training.checkpoint.portable_state import commit_portable_state

    content = read_file(
        options.source, weights_only=options.weights_only, allow_pickle=options.allow_pickle
    )
    commit = commit_portable_state(store, content, source=options.source.name)
    what = f"{len(content.weights)} weights, " + (
        "no optimizer" if content.settings is None else "optimizer"
    )
    print(f"imported: {what}, as step {commit.step}: {store.uri}/{commit.key}")
    return 0

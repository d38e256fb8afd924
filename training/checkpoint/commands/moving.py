"""export, import: a commit as a file of another kind, and the other way round."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.commands.selecting import add_commit, add_uri, find

_KINDS = ("dcp", "safetensors", "torch")


def add_commands(commands: Any) -> None:
    export = commands.add_parser("export", help="a commit as DCP folder, safetensors or one torch file")
    add_uri(export, as_json=False)
    export.add_argument("target", type=Path, metavar="TARGET", help="file, or folder for dcp; must not exist")
    export.add_argument("--kind", choices=_KINDS, help="default: by the name: .safetensors; .pt, .pth, .bin; else dcp")
    add_commit(export, default="default: the newest that counts")
    export.add_argument("--weights-only", action="store_true", help="without the optimizer")
    export.set_defaults(run=_export)
    imports = commands.add_parser(
        "import",
        help="a DCP folder, safetensors or torch state dict as the first commit of a new job",
        description="A DCP folder's metadata is a pickle, which can run code: import only what you trust.",
    )
    imports.add_argument("source", type=Path, metavar="SOURCE", help="file or folder; its kind is recognised")
    add_uri(imports, as_json=False)
    imports.add_argument("--weights-only", action="store_true", help="without the optimizer")
    imports.set_defaults(run=_import)


def _export(store: Store, options: argparse.Namespace) -> int:
    from ebbflow.training.checkpoint.formats import read_commit, write_file

    ref = find(store, options.commit).ref
    content = read_commit(store, ref.key)
    content = content.without_optimizer() if options.weights_only else content
    kind = options.kind or _kind_by_name(options.target)
    write_file(content, options.target, kind)
    size = sum(tensor.numel() * tensor.element_size() for tensor in content.named().values())
    print(f"exported: step {ref.step}, {size / 1e6:.1f} MB, verified, as {kind} to {options.target}")
    return 0


def _import(store: Store, options: argparse.Namespace) -> int:
    from ebbflow.training.checkpoint.formats import commit_content, read_file

    content = read_file(options.source, weights_only=options.weights_only)
    commit = commit_content(store, content, source=options.source.name)
    what = f"{len(content.weights)} weights, " + ("no optimizer" if content.settings is None else "optimizer")
    print(f"imported: {what}, as step {commit.step}: {store.uri}/{commit.key}")
    return 0


def _kind_by_name(target: Path) -> str:
    if target.suffix == ".safetensors":
        return "safetensors"
    return "torch" if target.suffix in (".pt", ".pth", ".bin") else "dcp"

"""The house rules that can be checked: who imports whom, how long a file may be, what stays light."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"flows", "training", "cost", "infra"}
ALLOWED = {"infra": set(), "training": {"infra"}, "cost": {"infra"}, "flows": {"training", "cost", "infra"}}
NEVER = {
    "infra": {"torch", "metaflow", "pandas"},
    "training": {"metaflow", "boto3", "pandas"},
    "cost": {"torch", "metaflow"},
    "flows": {"torch", "boto3", "pandas"},
}
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports(path: Path, *, module_level: bool = False) -> set[str]:
    """Top-level names of all packages that a file imports; `module_level`: of those that importing it imports."""
    tree = ast.parse(path.read_text())
    nodes = _executed_at_import(tree) if module_level else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def _executed_at_import(tree: ast.AST) -> list[ast.AST]:
    found, stack = [], list(ast.iter_child_nodes(tree))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        found.append(node)
        stack += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    if path.name == "__main__.py":
        # A composition root may import any room, but only when a command asks for it.
        assert not (imports(path, module_level=True) & ROOMS) - ALLOWED[room] - {room}
        return
    assert not (imports(path) & ROOMS) - ALLOWED[room] - {room}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_never_knows_what_it_must_not_know(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert not imports(path, module_level=True) & NEVER[room]


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: path.name)
def test_no_file_is_longer_than_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


def test_launchers_agents_and_uploaders_start_without_torch() -> None:
    modules = (
        "training.launch, training.rehearse, training.data, training.checkpoint.lineage, training.checkpoint.uploader"
    )
    modules += ", infra.config, infra.preflight, infra.checks, cost.plan, cost.checks, training.checks"
    code = f"import sys, {modules}; print([m for m in ('torch', 'pandas', 'metaflow', 'boto3') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_what_is_installed_holds_the_files_that_are_no_modules() -> None:
    """A pattern of package_data is for the files of its own package, and not of those below it."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    patterns = settings["options.package_data"].items()
    held = {path for package, pattern in patterns for path in ROOT.joinpath(*package.split(".")).glob(pattern)}
    wanted = {path for room in ROOMS for kind in ("*.csv", "*.c", "*.yaml") for path in (ROOT / room).rglob(kind)}
    assert wanted and held == wanted

"""The house rules that can be checked: who imports whom, what is installed, what stays light."""

from __future__ import annotations

import ast
import configparser
import graphlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"flows", "training", "cost", "infra"}
ALLOWED = {
    "infra": set(),
    "training": {"infra"},
    "cost": {"infra"},
    "flows": {"training", "cost", "infra"},
}
NEVER = {
    "infra": {"torch", "metaflow", "pandas"},
    "training": {"metaflow", "boto3", "pandas"},
    "cost": {"torch", "metaflow"},
    "flows": {"torch", "boto3", "pandas"},
}
# Folders of the package itself. They may import the rooms named here, and no room imports them.
OWN = {"workloads": {"training", "infra"}}
PACKAGE = ROOT / "ebbflow"
FILES = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
# Without `templates`, whose files `ebbflow new` copies: each is read alone.
OWN_FILES = sorted(path for folder in OWN for path in (PACKAGE / folder).glob("*.py"))


def imports(path: Path, *, module_level: bool = False) -> set[str]:
    """Rooms and top-level packages that a file imports. module_level: only what importing it
    imports.

    `from ebbflow.core.store import Store` counts as "infra".
    """
    tree = ast.parse(path.read_text())
    if module_level:
        nodes = _executed_at_import(tree)
    else:
        nodes = ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "ebbflow":
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                modules = [node.module]
        else:
            continue
        names |= {module.removeprefix("ebbflow.").split(".")[0] for module in modules}
    return names


def _executed_at_import(tree: ast.AST) -> list[ast.AST]:
    found = []
    stack = list(ast.iter_child_nodes(tree))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            continue
        found.append(node)
        stack += ast.iter_child_nodes(node)
    return found


def test_rooms_import_only_the_rooms_below_them() -> None:
    broken = []
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0]
        # A composition root may import any room, but only when a command asks for it.
        found = imports(path, module_level=path.name == "__main__.py")
        forbidden = (
            (found & (ROOMS | OWN.keys() | {"benchmarks", "tests"})) - ALLOWED[room] - {room}
        )
        broken += [f"{path.relative_to(ROOT)}: {name}" for name in forbidden]
    for path in OWN_FILES:
        forbidden = (
            imports(path)
            & (ROOMS | {"benchmarks", "tests"} | NEVER["training"]) - OWN[path.parent.name]
        )
        broken += [f"{path.relative_to(ROOT)}: {name}" for name in forbidden]
    assert FILES and OWN_FILES and not broken


def test_rooms_never_import_their_forbidden_packages() -> None:
    broken = []
    for path in FILES:
        found = imports(path, module_level=True) & NEVER[path.relative_to(PACKAGE).parts[0]]
        broken += [f"{path.relative_to(ROOT)}: {name}" for name in found]
    assert not broken


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in [*FILES, *OWN_FILES]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_module_imports_itself_through_others() -> None:
    """Only imports that importing a module carries out count: one inside a function waits until
    both are there.
    """
    modules = {_module_name(path): path for path in FILES}
    graph = {name: _imported_modules(path, modules) - {name} for name, path in modules.items()}
    cycles = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycles = error.args[1]
    assert not cycles


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported_modules(path: Path, modules: Mapping[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in _executed_at_import(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inside & modules.keys()) or {node.module}
    return names & modules.keys()


def test_our_code_is_imported_by_its_full_name() -> None:
    """`import infra.events` beside `import ebbflow.core.events` would make two modules with two
    classes `Event`.
    """
    broken = []
    for path in [
        *PACKAGE.rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                if module.partition(".")[0] in ROOMS:
                    broken.append(f"{path.relative_to(ROOT)}: {module}")
    assert not broken


def test_launchers_agents_and_uploaders_start_without_torch() -> None:
    names = "training.launch.agent training.rehearse training.data training.checkpoint.lineage "
    names += (
        "training.checkpoint.uploader infra.config infra.preflight infra.checks cost.plan "
        "cost.checks "
    )
    names += "training.checks"
    modules = ", ".join(f"ebbflow.{name}" for name in names.split())
    code = (
        f"import sys, {modules}; print([m for m in ('torch', 'pandas', 'metaflow', 'boto3') if m "
        "in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_what_is_installed_holds_the_files_that_are_no_modules() -> None:
    """A pattern of package_data is for the files of its own package, and not of those below it."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    patterns = settings["options.package_data"].items()
    held = {
        path.resolve()
        for package, listed in patterns
        for pattern in listed.split(",")
        for path in ROOT.joinpath(*package.split(".")).glob(pattern.strip())
    }
    kinds = ("*.csv", "*.c", "*.yaml", "*.json", "*.js", "*.css", "*.txt", "py.typed")
    assert held == {path for kind in kinds for path in PACKAGE.rglob(kind)}


def test_links_at_the_top_lead_into_the_package() -> None:
    """They keep `python flows/train_flow.py` and documented paths working; nothing is imported
    through them.
    """
    if (ROOT / "flows").is_symlink():  # a clone with core.symlinks=false has small files instead
        names = (*sorted(ROOMS), "configs")
        assert [(ROOT / name).resolve() for name in names] == [PACKAGE / name for name in names]
    assert not [path for path in PACKAGE.rglob("*") if path.is_symlink()]

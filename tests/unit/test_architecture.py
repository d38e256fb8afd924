"""Rules of the house that can be checked: which room imports which, what is installed, what stays
light.
"""

from __future__ import annotations

import ast
import configparser
import functools
import graphlib
import importlib
import itertools
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ebbflow.core.renamed_modules import RENAMED, current_name
from ebbflow.core.store import folder as current_module
from ebbflow.training.errors import WorkloadError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ebbflow"
# Each room with the rooms that it may import.
ROOMS = {
    "core": set(),
    "infra": {"core"},
    "diagnose": {"core", "infra"},
    # The adapters to libraries are part of `training`; `integrations` is their name for users.
    "training": {"core", "infra", "diagnose", "integrations"},
    # `ebbflow new` tries the workload that it has written.
    "workloads": {"core", "infra", "training", "tryout"},
    "integrations": {"core", "training"},
    "tryout": {"core", "infra", "training"},
    "cost": {"core", "infra", "diagnose"},
    "observe": {"core", "infra", "diagnose", "cost"},
    "flows": {
        "core",
        "infra",
        "diagnose",
        "training",
        "workloads",
        "integrations",
        "tryout",
        "cost",
        "observe",
    },
    "configs": set(),
}
# Packages that a room never imports when one of its modules is imported.
FORBIDDEN_PACKAGES = {
    "core": {"torch", "metaflow", "pandas"},
    "infra": {"torch", "metaflow", "pandas"},
    "diagnose": {"torch", "metaflow", "pandas"},
    "training": {"metaflow", "boto3", "pandas"},
    "workloads": {"metaflow", "boto3", "pandas"},
    "integrations": {"metaflow", "boto3", "pandas"},
    "tryout": {"metaflow", "boto3", "pandas"},
    "cost": {"torch", "metaflow"},
    "observe": {"torch", "metaflow"},
    "flows": {"torch", "boto3", "pandas"},
    "configs": set(),
}
LINKS = ("configs", "cost", "flows", "infra", "training")
MOST_FILES = {
    "Sample index → loss": 6,
    "Spot price → report": 10,
    "`checkpoint.interval_steps` → save": 9,
    "Lost node → next attempt": 7,
    "Own script, `attach` → commit": 5,
}


def all_files() -> list[Path]:
    """All files of the package, without the templates, which `ebbflow new` copies to users."""
    templates = PACKAGE / "workloads" / "templates"
    return sorted(path for path in PACKAGE.rglob("*.py") if templates not in path.parents)


def room_of(path: Path) -> str | None:
    """The room of a file, or None for a file beside the rooms: the public face and commands."""
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return None
    return parts[0]


def is_composition_root(path: Path) -> bool:
    """Whether a file starts commands, and so may import any room."""
    return path.name == "__main__.py" or room_of(path) is None


def statements(tree: ast.AST, *, inside_functions: bool) -> Iterator[ast.AST]:
    """Statements that run, without what only a type checker reads."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):  # which holds no import
            continue
        if isinstance(child, ast.If) and is_for_type_checkers(child.test):
            for alternative in child.orelse:
                yield from statements(alternative, inside_functions=inside_functions)
            continue
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and not inside_functions:
            continue
        yield child
        yield from statements(child, inside_functions=inside_functions)


def is_for_type_checkers(condition: ast.expr) -> bool:
    return isinstance(condition, ast.Name) and condition.id == "TYPE_CHECKING"


@functools.cache
def imported_names(path: Path, *, inside_functions: bool) -> frozenset[str]:
    """Dotted names that a file imports: `from a.b import c` gives a.b and a.b.c."""
    names: set[str] = set()
    for node in statements(ast.parse(path.read_text()), inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imported_rooms(path: Path, *, inside_functions: bool) -> set[str]:
    names = imported_names(path, inside_functions=inside_functions)
    ours = {name.split(".")[1] for name in names if name.startswith("ebbflow.")}
    laboratory = {name.split(".")[0] for name in names} & {"benchmarks", "tests"}
    return (ours & ROOMS.keys()) | laboratory


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_folder_of_the_package_is_a_room() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == ROOMS.keys()
    assert FORBIDDEN_PACKAGES.keys() == ROOMS.keys()


def test_rooms_import_only_the_rooms_below_them() -> None:
    broken = []
    for path in all_files():
        room = room_of(path)
        if room is None:
            continue
        allowed = ROOMS[room] | {room}
        if is_composition_root(path):
            allowed |= ROOMS.keys()
        found = imported_rooms(path, inside_functions=True)
        broken += [f"{path.relative_to(ROOT)}: {name}" for name in found - allowed]
    assert not broken


def test_the_order_of_rooms_has_no_cycle() -> None:
    below = {room: rooms - {"integrations"} for room, rooms in ROOMS.items()}
    assert list(graphlib.TopologicalSorter(below).static_order())


def test_rooms_never_import_their_forbidden_packages() -> None:
    broken = []
    for path in all_files():
        room = room_of(path)
        if room is None:
            continue
        names = imported_names(path, inside_functions=False)
        found = {name.split(".")[0] for name in names} & FORBIDDEN_PACKAGES[room]
        broken += [f"{path.relative_to(ROOT)}: {name}" for name in found]
    assert not broken


def test_no_two_public_classes_share_a_name() -> None:
    """Adapters apart: a user imports the name from the module of their library."""
    places: dict[str, list[str]] = {}
    for path in all_files():
        if room_of(path) == "integrations":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count too: they hide a cycle, they do not remove it."""
    modules = {module_name(path): path for path in all_files()}
    graph = {name: imported_modules(path, modules) - {name} for name, path in modules.items()}
    cycle = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
    assert not cycle


def imported_modules(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules of ours that a file imports. `from package import module` counts as the module.

    The package `ebbflow` itself does not count: importing it gives its version, and its other
    names are for users.
    """
    names = imported_names(path, inside_functions=True) & modules.keys()
    packages = {
        name
        for name in names
        if modules[name].name == "__init__.py"
        and any(other.startswith(f"{name}.") for other in names)
    }
    return set(names) - packages - {"ebbflow"}


def test_our_code_is_imported_by_its_full_name() -> None:
    """`import infra.events` beside `import ebbflow.core.events` would make two modules with two
    classes `Event`.
    """
    broken = []
    for folder in (PACKAGE, ROOT / "tests", ROOT / "benchmarks"):
        for path in folder.rglob("*.py"):
            names = imported_names(path, inside_functions=True)
            broken += [
                f"{path.relative_to(ROOT)}: {name}"
                for name in names
                if name.partition(".")[0] in ROOMS
            ]
    assert not broken


def test_launchers_agents_and_uploaders_start_without_torch_and_the_diagnosis_rules() -> None:
    names = [
        "core.config",
        "core.preflight",
        "cost.checks",
        "cost.plan",
        "infra.checks",
        "training.checkpoint.lineage",
        "training.checkpoint.uploader",
        "training.checks",
        "training.data",
        "training.launch.agent",
        "training.rehearse",
    ]
    modules = ", ".join(f"ebbflow.{name}" for name in names)
    code = (
        f"import sys, {modules}; print([m for m in ('torch', 'pandas', 'metaflow', 'boto3') if m "
        "in sys.modules], ebbflow.diagnose.rules.load_rules.cache_info().currsize)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[] 0", done.stdout + done.stderr


def test_the_installed_package_has_its_data_files() -> None:
    """A pattern of package_data is for the files of its own package, and not of those below it."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    held = set()
    for package, patterns in settings["options.package_data"].items():
        folder = ROOT.joinpath(*package.split("."))
        for pattern in patterns.split(","):
            held |= {path.resolve() for path in folder.glob(pattern.strip())}
    kinds = ("*.csv", "*.c", "*.yaml", "*.json", "*.js", "*.css", "*.txt", "py.typed")
    expected = set()
    for kind in kinds:
        expected |= set(PACKAGE.rglob(kind))
    assert held == expected


def test_links_at_the_top_lead_into_the_package() -> None:
    """They keep `python flows/train_flow.py` and documented paths working; nothing is imported
    through them.
    """
    if (ROOT / "flows").is_symlink():  # a clone with core.symlinks=false has small files instead
        assert [(ROOT / name).resolve() for name in LINKS] == [PACKAGE / name for name in LINKS]
    assert not [path for path in PACKAGE.rglob("*") if path.is_symlink()]


def test_a_module_under_its_old_name_is_the_same_module_with_a_warning() -> None:
    name = "ebbflow.infra.store.folder"
    with pytest.warns(FutureWarning, match="ebbflow.infra.store is now ebbflow.core.store; fix: "):
        old = importlib.import_module(name)
    assert old is current_module
    assert old.__name__ == old.__spec__.name == "ebbflow.core.store.folder"


@pytest.mark.parametrize("name", ["ebbflow.infra.nothing", "ebbflow.infra.store.nothing"])
def test_a_name_that_never_existed_has_no_module(name: str) -> None:
    with warnings.catch_warnings(), pytest.raises(ModuleNotFoundError):
        warnings.simplefilter("ignore")
        importlib.import_module(name)


def test_old_names_are_no_modules_of_today() -> None:
    modules = {module_name(path) for path in all_files()}
    assert RENAMED.keys().isdisjoint(modules)


@pytest.mark.parametrize("name", RENAMED)
def test_every_old_name_leads_to_a_module(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(name)
        except (ModuleNotFoundError, WorkloadError) as error:
            # A library that this module needs
            assert ("ebbflow." not in str(error) and "No module named" in str(error)) or (
                "is not installed" in str(error)
            ), error
            return
    assert module.__name__ == current_name(name)


def test_a_program_under_its_old_name_says_its_new_one() -> None:
    command = [sys.executable, "-m", "ebbflow.doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ebbflow.doctor is now ebbflow.tryout.doctor; fix: python -m " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_names_each_room_with_what_it_may_import() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for room in ROOMS.keys() - {"configs"}:
        assert re.search(rf"^\| `(?:ebbflow/)?{room}/` \|", page, re.MULTILINE), room


def walks() -> dict[str, list[tuple[Path, str]]]:
    """The walks of docs/architecture.md: files, each with the text of its line, by title."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("### Walks")[2].partition("\n## ")[0]
    found: dict[str, list[tuple[Path, str]]] = {}
    title = ""
    for line in section.splitlines():
        item = re.match(r"\d+\. `(?:ebbflow/)?([\w/]+\.py)`: (.*)", line)
        if item:
            found.setdefault(title, []).append((PACKAGE / item[1], item[2]))
        elif "→" in line and line.endswith(":"):
            title = line.rstrip(":")
    return found


WALKS = walks()


def imports_through_packages(path: Path) -> set[str]:
    """Modules that a file imports, also those that a package passes on."""
    modules = {module_name(path): path for path in all_files()}
    names = set(imported_names(path, inside_functions=True))
    for name in names & modules.keys():
        if modules[name].name == "__init__.py":
            tree = ast.parse(modules[name].read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = names | {node.module}
    return names


def test_the_walks_are_as_short_as_they_should_be() -> None:
    assert {
        title: len(files) <= MOST_FILES[title] for title, files in WALKS.items()
    } == dict.fromkeys(MOST_FILES, True)


@pytest.mark.parametrize("title", WALKS)
def test_neighbours_of_a_walk_are_joined(title: str) -> None:
    files = WALKS[title]
    for (before, _), (after, text) in itertools.pairwise(files):
        assert before.is_file() and after.is_file(), (before, after)
        named = re.search(r"\((?:event|variable): `(\w+)` → `(\w+)`\)", text)
        if named:
            assert re.search(rf"\b{named[1]}\b", before.read_text()), before
            assert re.search(rf"\b{named[2]}\b", after.read_text()), after
            continue
        forwards = module_name(after) in imports_through_packages(before)
        backwards = module_name(before) in imports_through_packages(after)
        assert forwards or backwards, f"{before} and {after} import neither the other"

"""The tests that run each line of the decision modules, in whatever process, built by running them
under coverage.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

from tests.mutants.mutations import DECISION_MODULES, decision_files

_FOLDERS = ("tests/unit", "tests/gang", "tests/flow", "tests/cloud")
_GUESSED_SECONDS = 10.0


@dataclass
class LineMap:
    """What the last run of each test file under coverage showed.

    Attributes:
        sources: The text of each decision module when a test was last run on it.
        digests: SHA-256 of each test file when it was run.
        seconds: Duration of each passed test.
        lines: For each test and each decision module that it runs: the lines. They count in
            `sources`.
    """

    sources: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path) -> LineMap:
        """Read a map that `save` has written; an empty one if there is none."""
        if not file.exists():
            return cls()
        return cls(**json.loads(file.read_text()))

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(vars(self)))
        partial.replace(file)

    def tests_of_file(self, path: str) -> dict[str, set[int]]:
        """Return the tests that run a decision module, each with its lines."""
        return {test: set(files[path]) for test, files in self.lines.items() if path in files}

    def breadth(self, test: str) -> int:
        """Return in how many decision modules a test runs code: a test of few modules is near to
        them.
        """
        return len(self.lines[test])

    def move_to(self, root: Path) -> None:
        """Translate the line numbers to the sources below `root`.

        A line that replaces others gets their tests.
        """
        for path in decision_files(root):
            source = (root / path).read_text()
            former = self.sources.get(path, "")
            if source == former:
                continue
            today = _translate_lines(former, source)
            for files in self.lines.values():
                if path in files:
                    moved = set()
                    for line in files[path]:
                        moved.update(today.get(line, ()))
                    files[path] = sorted(moved)
            self.sources[path] = source


def guess_map(root: Path) -> LineMap:
    """Return a map without a run: each unit test file runs every line of the decision modules that
    it imports.
    """
    guessed = LineMap()
    for path in decision_files(root):
        guessed.sources[path] = (root / path).read_text()
    for test_file in sorted((root / "tests/unit").glob("test_*.py")):
        imported = _imported_modules(test_file)
        name = str(test_file.relative_to(root))
        for path, source in guessed.sources.items():
            if _module_name(path) in imported:
                every_line = list(range(1, source.count("\n") + 2))
                guessed.lines.setdefault(name, {})[path] = every_line
                guessed.seconds[name] = _GUESSED_SECONDS
    return guessed


def stale_test_files(root: Path, known: LineMap) -> list[str]:
    """Return the test files that changed since the map was built, or are new."""
    paths = []
    for folder in _FOLDERS:
        paths += sorted((root / folder).glob("test_*.py"))
    return [
        str(path.relative_to(root))
        for path in paths
        if known.digests.get(str(path.relative_to(root))) != _digest(path)
    ]


def update_map(root: Path, known: LineMap, test_files: list[str], *, processes: int) -> None:
    """Run test files under coverage in a copy of the project, and put what they show into the map."""
    with tempfile.TemporaryDirectory(prefix="mutants-map-") as folder:
        copy = Path(folder) / "project"
        copy_project(root, copy)
        seconds_folder = Path(folder) / "seconds"
        seconds_folder.mkdir()
        settings = Path(folder) / "coverage.ini"
        settings.write_text(_coverage_settings(copy, Path(folder)))
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "MUTANTS_SECONDS": str(seconds_folder),
        }
        command = [
            sys.executable,
            "-m",
            "coverage",
            "run",
            f"--rcfile={settings}",
            "-m",
            "pytest",
            "-q",
        ]
        command += ["-p", "tests.mutants.contexts", "-p", "no:cacheprovider", "-n", str(processes)]
        command += ["--dist", "loadfile", "--no-loadscope-reorder", *test_files]
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, errors="replace"
        )
        print(done.stdout[-3000:])
        if done.returncode not in (0, 1):
            raise SystemExit(
                f"the tests could not be run (exit code {done.returncode})\n{done.stderr[-3000:]}"
            )
        combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}"]
        subprocess.run(combine, cwd=copy, env=environment, check=True)
        known.move_to(copy)
        for test in [test for test in known.lines if test.partition("::")[0] in test_files]:
            del known.lines[test]
            known.seconds.pop(test, None)
        passed: dict[str, float] = {}
        for file in seconds_folder.glob("*.json"):
            passed |= json.loads(file.read_text())
        for test, lines in _read_lines(copy, Path(folder) / "data").items():
            if test in passed:
                known.lines[test] = lines
                known.seconds[test] = passed[test]
        for test_file in test_files:
            known.digests[test_file] = _digest(copy / test_file)


def copy_project(root: Path, target: Path) -> None:
    """Copy the files that git tracks, or would track, with their links."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        listing, cwd=root, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        source = root / name
        if source.is_symlink() or source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported_modules(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _translate_lines(former: str, source: str) -> dict[int, list[int]]:
    """Map each line of a former source to the lines of today's that take its place."""
    places: dict[int, list[int]] = {}
    matcher = difflib.SequenceMatcher(
        None, former.splitlines(), source.splitlines(), autojunk=False
    )
    for tag, first, last, new_first, new_last in matcher.get_opcodes():
        for line in range(first, last):
            if tag == "equal":
                places[line + 1] = [new_first + line - first + 1]
            else:
                places[line + 1] = list(range(new_first + 1, new_last + 1))
    return places


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _coverage_settings(copy: Path, folder: Path) -> str:
    included = "\n    ".join(f"{copy}/{pattern}" for pattern in DECISION_MODULES)
    return (
        f"[run]\nparallel = true\nsigterm = true\ndata_file = {folder}/data\n"
        f"patch =\n    subprocess\n    _exit\n    execv\ninclude =\n    {included}\n"
    )


def _read_lines(copy: Path, data_file: Path) -> dict[str, dict[str, list[int]]]:
    data = CoverageData(str(data_file))
    data.read()
    found: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for file in data.measured_files():
        path = str(Path(file).relative_to(copy))
        lines: dict[str, list[int]] = defaultdict(list)
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in {context.rpartition("|")[2] for context in contexts}:
                if context:
                    lines[context].append(line)
        for context, numbers in lines.items():
            found[context][path] = sorted(numbers)
    return found

"""docs/checkpoints.md keeps its word: the package can be taken out, and its example runs with those
files alone.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.store import Store
from ebbflow.training.checkpoint.commands import main as checkpoints

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ebbflow/training" / "checkpoint"
GUIDE = (ROOT / "docs" / "checkpoints.md").read_text()
LIBRARIES = {"torch", "obstore", "awscrt"}
OURS = ("ebbflow.training.checkpoint", "ebbflow.training.errors", "ebbflow.core")


def imported(path: Path, *, at_import: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    inner = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inner |= set(ast.walk(function))
    names: set[str] = set()
    for node in ast.walk(tree):
        if at_import and node in inner:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_the_package_imports_torch_obstore_awscrt_and_the_ground_alone(path: Path) -> None:
    for at_import, libraries in ((True, LIBRARIES), (False, LIBRARIES | {"safetensors"})):
        for name in imported(path, at_import=at_import):
            top = name.split(".")[0]
            known = top in libraries or top in sys.stdlib_module_names
            assert known or name.startswith(OURS), f"{path}: {name}"


@pytest.mark.slow
def test_the_example_runs_with_the_files_that_the_guide_names(tmp_path: Path) -> None:
    package = tmp_path / "ebbflow"
    (package / "training").mkdir(parents=True)
    for name in ("ebbflow/__init__.py", "training/__init__.py", "training/errors.py"):
        shutil.copy(ROOT / name, package / name.removeprefix("ebbflow/"))
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, package / "training" / "checkpoint", ignore=ignore)
    shutil.copytree(ROOT / "ebbflow/core", package / "core", ignore=ignore)
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    said = []
    for _ in range(2):
        command = [sys.executable, "example.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
    assert said == ["from step 0, committed step 10", "from step 10, committed step 20"]
    assert checkpoints(["verify", str(tmp_path / "runs" / "jobs" / "example")]) == 0
    assert Store.open(str(tmp_path / "runs" / "jobs" / "example")).list("quarantine") == []


def test_every_command_of_the_guide_exists(capsys: pytest.CaptureFixture) -> None:
    commands = set(re.findall(r"(?:ebbflow|python -m training) checkpoints (\w+)", GUIDE)) | {
        "unpin"
    }
    assert commands == {
        "list",
        "show",
        "verify",
        "export",
        "import",
        "pin",
        "unpin",
        "prune",
        "sign",
    }
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            checkpoints([command, "--help"])
        assert ended.value.code == 0
        given = capsys.readouterr().out
        for line in GUIDE.splitlines():
            if f"checkpoints {command} " in line:
                assert all(option in given for option in re.findall(r"--[a-z-]+", line)), line

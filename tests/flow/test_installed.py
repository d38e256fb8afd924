"""An installed wheel works in a folder whose own modules carry the names of our folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LARGEST_WHEEL = 1_800_000
_BUILD = (
    "import sys, setuptools.build_meta as backend; print(getattr(backend, "
    "sys.argv[1])(sys.argv[2]))"
)
pytestmark = pytest.mark.flow


def build(kind: str, source: Path, output: Path) -> Path:
    """kind: build_wheel or build_sdist."""
    command = [sys.executable, "-c", _BUILD, kind, str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, because a build leaves files beside its source."""
    folder = tmp_path_factory.mktemp("source") / "ebbflow"
    skipped = shutil.ignore_patterns(
        ".git", ".venv*", "runs", "__pycache__", "*.egg-info", "build", "tests", ".*_cache"
    )
    shutil.copytree(ROOT, folder, symlinks=True, ignore=skipped)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", source, tmp_path_factory.mktemp("wheel"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("RECORD")}


def test_the_wheel_is_small_and_holds_our_package_and_its_registration_with_metaflow(
    wheel: Path,
) -> None:
    assert wheel.stat().st_size < _LARGEST_WHEEL
    top = {name.split("/")[0] for name in names(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "ebbflow",
        "metaflow_extensions",
    }
    registration = "metaflow_extensions/ebbflow/plugins/mfextinit_ebbflow.py"
    # Metaflow's namespace package has files of other distributions too
    assert [name for name in names(wheel) if name.startswith("metaflow_ext")] == [registration]
    assert {
        "ebbflow/configs/laptop.yaml",
        "ebbflow/py.typed",
        "ebbflow/cost/instances.csv",
    } <= names(wheel)
    assert {"ebbflow/training/attach/entry.py", "ebbflow/integrations/transformers.py"} <= names(
        wheel
    )
    assert {
        "ebbflow/workloads/points/point_clouds.py",
        "ebbflow/configs/point-clouds.yaml",
    } <= names(wheel)


def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("build_sdist", source, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(
        "build_wheel", next(path for path in tmp_path.iterdir() if path.is_dir()), tmp_path
    )
    assert names(again) == names(wheel)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel, and with this environment's other
    packages.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Its .pth files do not count
    (own / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--quiet",
    ]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    return folder / "bin"


def test_every_command_works_beside_modules_of_the_same_names(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("training.py", "infra.py", "flows.py", "cost/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('a module of the user was imported')\n")

    def ebbflow(*words: str) -> str:
        environment = {**os.environ, "PATH": f"{installed}:{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        command = [str(installed / "ebbflow"), *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert ebbflow("--version").split() == ["ebbflow", "0.3.0"]
    shorter = [
        "training.max_steps=20",
        "training.evaluation_interval_steps=10",
        "checkpoint.interval_steps=10",
    ]
    shorter.append("cluster.nodes=1")
    sets = []
    for setting in shorter:
        sets.extend(("--set", setting))
    ebbflow("run", "--job", "mine", *sets)
    assert (
        json.loads((tmp_path / "runs" / "latest" / "report.json").read_text())["outcome"]
        == "completed"
    )
    assert "mine" in ebbflow("report", "mine")
    assert json.loads(ebbflow("preflight", "--quick", "--json", *sets))["exit_code"] == 0
    assert "capacity plan" in ebbflow("plan", *sets)
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").write_text("WIDTH = 4\n")
    guide = (
        (ROOT / "docs" / "attach.md").read_text().partition("```python\n")[2].partition("```")[0]
    )
    (tmp_path / "train.py").write_text(f"from utils import WIDTH\n\nassert WIDTH == 4\n{guide}")
    assert "job train: completed at step 64" in ebbflow("run", "train.py")


def test_the_environment_of_make_finds_the_project_from_any_directory(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True, with_pip=True)
    made = subprocess.run(
        ["make", "-C", str(ROOT), f"VENV={folder}", f"{folder}/project.stamp"], capture_output=True
    )
    assert made.returncode == 0, made.stderr
    assert subprocess.run([folder / "bin" / "ebbflow", "--version"], cwd=tmp_path).returncode == 0
    for room in ("infra", "cost", "training"):
        command = [folder / "bin" / "python", "-m", room, "checkpoints"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 3 and "fix: " in done.stderr, (
            "found, though the packages of this venv are missing"
        )


def test_a_checkout_without_symbolic_links_runs_the_default_job(tmp_path: Path) -> None:
    """As of `git clone -c core.symlinks=false`, or a ZIP that Python has unpacked: a link is a small
    file with its target.
    """
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "runs", "__pycache__", "*.egg-info", "build", ".*_cache"
    )
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=ignored)
    for path in checkout.iterdir():
        if path.is_symlink():
            target = str(path.readlink())
            path.unlink()
            path.write_text(target)
    assert (checkout / "flows").read_text() == "ebbflow/flows"
    # The package under test is installed too, and Metaflow refuses the same extension from two places
    shutil.rmtree(checkout / "metaflow_extensions")
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    sets = [
        "training.max_steps=20",
        "training.evaluation_interval_steps=10",
        "checkpoint.interval_steps=10",
        "cluster.nodes=1",
    ]
    command = [sys.executable, "ebbflow/flows/train_flow.py", "run"]
    for setting in sets:
        command.extend(("--set", setting))
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((checkout / "runs" / "latest" / "report.json").read_text())
    assert report["outcome"] == "completed"
    tests = ["tests/unit/test_architecture.py", "tests/unit/test_config_name_rules.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *tests]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout

"""The folder of a script for other machines: what it holds, what is refused, and where it is unpacked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.script_folder import ScriptFolderError, find_script, pack_script
from ebbflow.infra.store import Store


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "utils").mkdir(parents=True)
    (folder / "train.py").write_text("import utils.data")
    (folder / "utils" / "data.py").write_text("x = 1")
    for name in ("runs/old.log", ".metaflow/run", "__pycache__/train.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("of another job")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def packed(project: Path) -> set[str]:
    store = Store.open(str(project.parent / "store"))
    sha256 = pack_script(RunConfig(store=store.uri, script=str(project / "train.py")), store)
    script = find_script("train.py", sha256, store)
    assert script.read_text() == "import utils.data"
    return {str(path.relative_to(script.parent)) for path in script.parent.rglob("*") if path.is_file()}


@pytest.mark.parametrize("git", ["no repository", "repository", "not installed"])
def test_a_package_holds_the_code_and_no_files_of_other_jobs(
    project: Path, git: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if git == "repository":
        subprocess.run(["git", "init", "-q", str(project)], check=True)
    if git == "not installed":
        monkeypatch.setenv("PATH", "")
    (project / ".env.example").write_text("KEY=")
    expected = {"train.py", "utils/data.py"} | ({".env.example"} if git == "repository" else set())
    assert packed(project) == expected


@pytest.mark.parametrize("name", [".env", ".env.local", ".npmrc", ".git-credentials", "key.pem", "credentials"])
def test_what_may_be_a_secret_is_refused(project: Path, name: str) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / name).write_text("secret")
    with pytest.raises(ScriptFolderError, match="looks like a secret"):
        packed(project)

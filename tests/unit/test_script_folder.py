"""The folder of a script for other machines: what it holds, what is refused, and where it is
unpacked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store import Store
from ebbflow.training.attach.script_folder import ScriptFolderError, find_script, pack_script

_RUN = """
import json, sys, traceback
from types import SimpleNamespace
from ebbflow.core.config.schema import RunConfig
from ebbflow.training.attach.script import run_script
prepared = {"script": sys.argv[1], "words": []}
try:
    own = {"heartbeat_path": None, "config": RunConfig()}
    run_script(SimpleNamespace(prepared=prepared, store_uri=sys.argv[2], result_path=None, **own))
except BaseException as error:
    print(json.dumps([type(error).__name__, str(error), traceback.extract_tb(error.__traceback__)[-1].lineno]))
"""


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
    return {
        str(path.relative_to(script.parent)) for path in script.parent.rglob("*") if path.is_file()
    }


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


@pytest.mark.parametrize(
    "name", [".env", ".env.local", ".npmrc", ".git-credentials", "key.pem", "credentials"]
)
def test_a_script_folder_with_a_possible_secret_is_refused(project: Path, name: str) -> None:
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / name).write_text("secret")
    with pytest.raises(ScriptFolderError, match="looks like a secret"):
        packed(project)


@pytest.mark.parametrize(
    "name",
    ["secrets.yaml", "utils/secret.json", "service_account.json", "token.txt", "kubeconfig"],
)
@pytest.mark.parametrize("git", [True, False])
def test_files_with_names_of_secrets_are_left_out_and_named(
    project: Path, capsys: pytest.CaptureFixture[str], name: str, git: bool
) -> None:
    if git:
        subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / name).write_text("secret")
    (project / "tokens.txt").write_text("a vocabulary")
    assert packed(project) == {"train.py", "utils/data.py", "tokens.txt"}
    assert f"{name} is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import sys\n\nsys.exit(3)\n", ["RuntimeError", "train.py exited with 3", 3]),
        (
            "from ebbflow.training.attach.job import refuse\nfrom ebbflow.training.errors "
            "import AttachError\ntry:\n    refuse(AttachError('no loader; fix: one'))\nexcept "
            "Exception:\n    pass\n",
            ["AttachError", "no loader; fix: one", None],
        ),
    ],
)
@pytest.mark.slow
def test_a_script_that_exits_is_reported_with_its_line_and_a_refusal_with_its_error(
    text: str, told: list[object], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-c", _RUN, str(tmp_path / "train.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[:2] == told[:2] and told[2] in (None, found[2])

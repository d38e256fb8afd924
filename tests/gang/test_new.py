"""`ebbflow new`: what it writes passes its own test at once, and names that cannot be used are
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ebbflow.workloads.new import main


@pytest.mark.parametrize("kind", ["text", "image", "points", "rl"])
def test_a_new_workload_passes_its_own_test(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"my_own_{kind}"
    assert main(["new", name, "--like", kind, "--folder", str(tmp_path)]) == 0
    assert f"test_{name}.py" in capsys.readouterr().out
    assert (
        yaml.safe_load((tmp_path / f"{name}.yaml").read_text())["workload"]
        == f"{name}:MyOwn{kind.capitalize()}"
    )
    empty = tmp_path / "pytest.ini"
    empty.write_text("[pytest]\n")
    words = ["-q", "-c", str(empty), "-p", "no:cacheprovider", "-p", "no:randomly", str(tmp_path)]
    assert pytest.main(words) == 0, capsys.readouterr().out
    assert "2 passed" in capsys.readouterr().out
    assert main(["new", name, "--folder", str(tmp_path)]) == 2
    assert "exists; fix: another name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["my-model", "class", "json", "2d"])
def test_a_name_that_no_module_can_have_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", name]) == 2
    assert "cannot be a module's name" in capsys.readouterr().err

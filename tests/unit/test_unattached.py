"""Scripts that do not attach: recognized from their source, without running it."""

from pathlib import Path

import pytest

from ebbflow.training.attach.script import main
from ebbflow.training.attach.unattached import never_attaches
from ebbflow.training.errors import WorkloadError


@pytest.mark.parametrize(
    ("source", "certain"),
    [
        ("import torch\nprint(1)\n", True),
        ("import numpy as np, pandas\nfrom sklearn.svm import SVC\n", True),
        ("import helper\n", True),
        ("import own.loop\n", True),
        ("from torch import nn\nimport ebbflow\n", False),
        ("def main():\n    import ebbflow\n", False),
        ("from ebbflow import attach\n", False),
        ("import attaching\n", False),
        ("import transformers\n", False),
        ("import a_library_nobody_knows\n", False),
        ("import importlib\n", False),
        ("__import__('ebb' + 'flow')\n", False),
        ("this is no python\n", False),
    ],
)
def test_only_a_script_that_certainly_does_not_attach_is_named_before_it_runs(
    tmp_path: Path, source: str, certain: bool
) -> None:
    (tmp_path / "helper.py").write_text("import math\n")
    (tmp_path / "attaching.py").write_text("import ebbflow\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "loop.py").write_text("from . import data\n")
    script = tmp_path / "train.py"
    script.write_text(source)
    assert never_attaches(script) is certain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--set", "cluster.nodes=2"],
            "--set: cluster.nodes is 2, and `ebbflow run train.py` starts 1 node, this machine; "
            "fix: ebbflow run train.py --nodes 2, or cluster.nodes=1",
        ),
        (
            ["--ranks", "3", "--set", "cluster.processes_per_node=2"],
            "--set: cluster.processes_per_node is 2, and --ranks is 3; fix: give one of them",
        ),
        (
            ["--set", "cluster.processes_per_node=auto"],
            "--set: cluster.processes_per_node is auto, and a script's batch depends on its ranks; "
            "fix: give a number",
        ),
    ],
)
def test_a_script_refuses_nodes_and_ranks_that_its_command_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(WorkloadError) as raised:
        main(["train.py", *words])
    assert str(raised.value) == message

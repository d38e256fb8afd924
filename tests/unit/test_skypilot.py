"""A job as a task of SkyPilot: what it starts is what our supervisor reads, and SkyPilot's schema
accepts it.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest
import yaml

from ebbflow.core.program import PROJECT_ROOT
from ebbflow.flows.skypilot import main
from ebbflow.flows.supervising.options import read_options

CONFIG = str(PROJECT_ROOT / "ebbflow/configs" / "gpt-124m-spot.yaml")
SETTINGS = ["--set", "store=s3://bucket/prefix", "--set", "cluster.nodes=1"]


def test_a_job_becomes_a_managed_spot_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "skypilot", CONFIG, *SETTINGS, "--job", "mine"]) == 0
    text = capsys.readouterr().out
    assert str(PROJECT_ROOT) not in text, "the task is for other machines"
    task = yaml.safe_load(text)
    resources = task["resources"]
    pools = resources["any_of"]
    assert 1 < len(pools) <= 8
    assert (pools[0]["use_spot"], pools[0]["infra"]) == (True, "aws/us-east-1")
    assert resources["job_recovery"]["recover_on_exit_codes"] == [75]
    assert [mount["source"] for mount in task["file_mounts"].values()] == ["s3://bucket"]
    program, command, *words = shlex.split(task["run"].removeprefix("exec "))
    assert (program, command) == (".venv/bin/ebbflow", "supervise")
    options = read_options([str(PROJECT_ROOT / words[0]), *words[1:]], project_root=PROJECT_ROOT)
    assert (options.job, options.config.store) == ("mine", "s3://bucket/prefix")
    types = list(dict.fromkeys(pool["instance_type"] for pool in pools))
    assert options.config.cluster.instance_types == types
    if importlib.util.find_spec("sky") is None:
        return  # not among the tests' requirements: it pins many packages
    from jsonschema import Draft202012Validator
    from sky.utils import schemas

    Draft202012Validator(schemas.get_task_schema()).validate(task)
    Draft202012Validator(schemas.get_resources_schema()).validate(resources)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([CONFIG], "ends with its machine"),
        ([CONFIG, *SETTINGS, "--set", "cluster.nodes=2"], "cluster.nodes is 2: "),
        ([CONFIG, *SETTINGS, "--job", "a/b"], "cannot be a job's name"),
        (["missing.yaml"], "there is no such file"),
    ],
)
def test_a_job_that_skypilot_cannot_run_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "skypilot", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_outside_the_project_is_not_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text("cluster: {nodes: 1}\nstore: s3://bucket/prefix\n")
    assert main(["export", "skypilot", str(tmp_path / "x.yaml")]) == 2
    assert "which SkyPilot copies" in capsys.readouterr().err

"""`--with slurm` on the command line: whose backend it is, and what Metaflow gets to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.flows.command_line import CommandLine
from ebbflow.flows.remote import refusal_reason, requested_backend, without_slurm


@pytest.mark.parametrize(
    "words",
    [
        ["flow.py", "run", "--with", "slurm", "--job", "slurm"],
        ["flow.py", "run", "--with=slurm", "--job", "slurm"],
        ["flow.py", "--with", "slurm", "run", "--job", "slurm"],
    ],
)
def test_metaflow_does_not_see_the_backend_and_keeps_a_job_of_that_name(words: list[str]) -> None:
    assert requested_backend(words) == "slurm"
    line = CommandLine.parse(words).without_backend("slurm")
    assert line.argv == ["flow.py", "run", "--job", "slurm"]
    assert requested_backend(line.argv) is None


def test_a_folder_may_be_the_store_on_slurm_and_not_on_kubernetes() -> None:
    config = RunConfig(store="/shared/runs")
    assert refusal_reason(config, "slurm") is None
    assert "containers cannot read" in str(refusal_reason(config, "kubernetes"))


def test_our_backend_wins_over_the_decorator_of_metaflow_slurm_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "metaflow_slurm-0.0.4.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: metaflow-slurm\nVersion: 0.0.4\n")
    line = CommandLine.parse(["flow.py", "run", "--with", "slurm"])
    assert without_slurm(line).argv == ["flow.py", "run"]
    assert capsys.readouterr().out == ""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert without_slurm(line).argv == ["flow.py", "run"]
    assert capsys.readouterr().out == (
        "--with slurm: Ebbflow's own, not the decorator of metaflow-slurm 0.0.4\n"
    )

"""`--with slurm` on the command line: whose backend it is, and what Metaflow gets to see."""

from __future__ import annotations

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.flows.command_line import CommandLine
from ebbflow.flows.remote import refusal_reason, requested_backend


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

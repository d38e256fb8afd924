"""`--with slurm` on the command line: whose backend it is, and what Metaflow gets to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import KnownJob, link_slurm_job, remember_job
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.rank_logs import find_job
from ebbflow.cost.errors import ReportError
from ebbflow.cost.jobs import find_job_uri, list_known_jobs
from ebbflow.flows.command_line import CommandLine
from ebbflow.flows.remote import refusal_reason, requested_backend, without_slurm
from ebbflow.infra.__main__ import main


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
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: metaflow-slurm\nVersion: 0.0.4\n"
    )
    line = CommandLine.parse(["flow.py", "run", "--with", "slurm"])
    assert without_slurm(line).argv == ["flow.py", "run"]
    assert capsys.readouterr().out == ""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert without_slurm(line).argv == ["flow.py", "run"]
    assert capsys.readouterr().out == (
        "--with slurm: Ebbflow's own, not the decorator of metaflow-slurm 0.0.4\n"
    )


def test_diagnose_reads_slurms_output_of_a_job_whose_ranks_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path))
    folder = tmp_path / "jobs" / "sent" / "slurm"
    folder.mkdir(parents=True)
    missing = "ModuleNotFoundError: No module named 'ebbflow'"
    (folder / "7.log").write_text(f"Traceback (most recent call last):\n{missing}\n")
    main(["diagnose", "sent"])
    shown = capsys.readouterr().out
    assert "7.log:2" in shown and missing in shown


@pytest.mark.parametrize("in_runs", [True, False])
def test_a_job_is_found_by_the_ids_of_its_slurm_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_runs: bool
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setenv("EBBFLOW_RUNS", str(runs))
    store = runs if in_runs else tmp_path / "store"
    folder = remember_job(runs, KnownJob("sent", str(store)))
    (store / "jobs" / "sent" / "events").mkdir(parents=True)
    link_slurm_job(folder, "41")
    link_slurm_job(folder, "42")
    for slurm_id in ("41", "42"):
        assert find_job_uri(slurm_id) == str(store / "jobs" / "sent")
        assert find_job(slurm_id, None, PROJECT_ROOT).name == "sent"
    assert list_known_jobs(runs) == ["sent"]
    with pytest.raises(ReportError, match="no events of job '43'"):
        find_job_uri("43")

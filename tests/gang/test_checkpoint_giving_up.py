"""What no start gives up by itself: all commits of a job, or the newest of a store restored from a
snapshot.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from ebbflow.core import launchers
from ebbflow.core.errors import Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import COMMIT, GENERATION_STARTED, OUTCOME, ROLLBACK, Origin, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.store.ranges import read_blocks
from ebbflow.cost.report.render_text import suggest_next_step
from ebbflow.cost.report.report import build_report
from ebbflow.flows.command_line import CommandLine
from ebbflow.flows.launch import Launch
from ebbflow.flows.options import check_run_options
from ebbflow.training.checkpoint import (
    FROM_SCRATCH,
    Checkpointer,
    Generation,
    open_generation,
    reachable_commits,
    record_permits,
)
from ebbflow.training.checkpoint.rollback import ROLLBACK as ROLLBACK_PERMIT
from ebbflow.training.checkpoint.rollback import check_rollback
from ebbflow.training.errors import GangError, NothingToRestore, RolledBack, UnreliableReader
from ebbflow.training.launch.agent import LocalGang
from tests.support.gangs import endless_gang


def commit(job: Store, generation: Generation, *steps: int) -> None:
    """Real commits, with the events that tell of them."""
    origin = Origin(job="job", run="r", generation=generation.number, process="agent")
    with EventLog(job, origin) as log, Checkpointer(job.uri, generation=generation) as saver:
        log.emit(GENERATION_STARTED, parent=generation.parent, parent_step=generation.parent_step)
        for step in steps:
            saver.save(step, nn.Linear(8, 8), None, {"cursor": step})
            log.emit(COMMIT, step=step, key=saver.wait().key)


@pytest.fixture(scope="module")
def two_commits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = Store.open(str(tmp_path_factory.mktemp("job") / "jobs" / "job"))
    commit(job, open_generation(job, run="r", attempt=0), 1, 2)
    return Path(job.uri)


@pytest.fixture
def job(two_commits: Path, tmp_path: Path) -> Store:
    folder = tmp_path / "store" / "jobs" / "job"
    shutil.copytree(two_commits, folder)
    return Store.open(str(folder))


def damage(job: Store) -> None:
    for meta in job.list("data"):
        job.put(meta.key, b"?" + job.get(meta.key)[1:])


def restore(job: Store, generation: Generation) -> int:
    candidates = [ref.key for ref in reachable_commits(job)]
    with Checkpointer(job.uri, generation=generation) as saver:
        return saver.restore(candidates, nn.Linear(8, 8), None).step


def test_a_process_that_reads_wrongly_quarantines_nothing(
    job: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(*what, **options):
        for block in read_blocks(*what, **options):
            block[0][0] ^= 1
            yield block

    generation = open_generation(job, run="r", attempt=1)
    monkeypatch.setattr("ebbflow.training.checkpoint.reader.read_blocks", flipped)
    with pytest.raises(
        UnreliableReader, match=r"node 0 reads wrongly.*\(a new process\).*so the commit is sound"
    ):
        restore(job, generation)
    monkeypatch.undo()
    assert job.list("quarantine") == []
    assert restore(job, generation) == 2


def test_a_job_that_has_commits_begins_anew_only_with_a_permit_which_holds_once(job: Store) -> None:
    damage(job)
    generation = open_generation(job, run="r", attempt=1)
    with pytest.raises(NothingToRestore, match="none of 2 commits verifies"):
        restore(job, generation)
    for _ in range(2):
        with pytest.raises(
            NothingToRestore, match=r"none of its 2 commits .* step 2; .*--from-scratch"
        ) as error:
            open_generation(job, run="r", attempt=2)
    assert (error.value.outcome.exit_code, error.value.curable) == (9, False)
    record_permits(job, FROM_SCRATCH)
    anew = open_generation(job, run="r", attempt=3)
    assert anew.parent is None and reachable_commits(job) == []
    assert open_generation(job, run="r", attempt=4).parent is None, (
        "it died before its first commit"
    )
    newest = open_generation(job, run="r", attempt=5)
    commit(job, newest, 1)
    damage(job)
    with pytest.raises(NothingToRestore):
        restore(job, newest)
    with pytest.raises(NothingToRestore, match="none of its 1 commits"):
        open_generation(job, run="r", attempt=6)


def test_a_gang_without_a_commit_to_restore_ends_with_its_own_outcome(tmp_path: Path) -> None:
    spec = replace(endless_gang(tmp_path, survival={"standby": False}), nodes=1)
    job = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    commit(job, open_generation(job, run="r", attempt=0), 1)
    for meta in job.list("commits"):
        job.put(meta.key, b"torn")
    with pytest.raises(GangError, match="--from-scratch") as error:
        LocalGang(spec, tmp_path / "gang", tmp_path / "output.log").wait(60)
    assert (error.value.outcome, error.value.curable) == (Outcome.NO_RESTORE, False)
    assert len(job.list("generations")) == 1, "nothing was started"


def _all(job: Store, snapshot: Path) -> None:
    for folder in ("commits", "data", "index", "generations"):
        shutil.rmtree(Path(job.uri) / folder, ignore_errors=True)
        if (snapshot / folder).exists():
            shutil.copytree(snapshot / folder, Path(job.uri) / folder)


def _last_commit_gone(job: Store, snapshot: Path) -> None:
    job.delete(job.list("commits")[0].key)


def _everything_gone(job: Store, snapshot: Path) -> None:
    for folder in ("commits", "data", "index", "generations"):
        shutil.rmtree(Path(job.uri) / folder)


@pytest.mark.parametrize(
    ("roll_back", "left"), [(_all, 2), (_last_commit_gone, 3), (_everything_gone, None)]
)
def test_a_store_that_was_restored_from_a_snapshot_is_noticed_and_asks(
    job: Store, tmp_path: Path, roll_back: Callable[[Store, Path], None], left: int | None
) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(job.uri, snapshot)
    commit(job, open_generation(job, run="r", attempt=1), 3, 4)
    assert check_rollback(job, read_events(job)) is None
    roll_back(job, snapshot)
    with pytest.raises(RolledBack, match=r"know a commit of step 4 .*--accept-rollback") as error:
        check_rollback(job, read_events(job))
    assert (error.value.outcome.exit_code, error.value.curable) == (10, False)
    assert f"none newer than step {left}" in str(error.value) or left is None
    record_permits(job, ROLLBACK_PERMIT)
    accepted = check_rollback(job, read_events(job))
    assert accepted.known.step == 4 and (accepted.found and accepted.found.step) == left
    assert job.list("quarantine") == []


@pytest.mark.parametrize("kept", [1, 2])
def test_commits_that_retention_deleted_are_no_rollback(job: Store, kept: int) -> None:
    for meta in job.list("commits")[kept:]:
        job.delete(meta.key)
    assert check_rollback(job, read_events(job)) is None
    second = open_generation(job, run="r", attempt=1)
    commit(job, second)  # it began, and died before its first commit
    assert check_rollback(job, read_events(job)) is None


def test_an_agent_checks_the_store_too_and_the_report_names_what_is_missing(tmp_path: Path) -> None:
    spec = replace(endless_gang(tmp_path, survival={"standby": False}), nodes=1)
    job = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    commit(job, open_generation(job, run="r", attempt=0), 1, 2)
    _last_commit_gone(job, tmp_path)
    with pytest.raises(GangError, match="--accept-rollback") as error:
        LocalGang(spec, tmp_path / "gang", tmp_path / "output.log").wait(60)
    assert (error.value.outcome, error.value.curable) == (Outcome.ROLLED_BACK, False)
    with EventLog(job, Origin(job=spec.job, run="r2", process="train")) as log:
        log.emit(OUTCOME, outcome=Outcome.ROLLED_BACK.value, message=str(error.value))
        log.emit(ROLLBACK, step=2, key="k", found_step=1, found_key="f")
    report = build_report(read_events(job))
    assert (report.outcome, report.exit_code) == (Outcome.ROLLED_BACK, 10)
    assert suggest_next_step(report).command.endswith(f"run --job {report.job} --accept-rollback")
    assert "the commit of step 2 is missing" in report.events["failures"][-1]["what"]


def test_the_options_leave_their_permit_in_the_store_once_the_launcher_holds_the_job(
    tmp_path: Path, job: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launchers.RUN_CLAIM_VARIABLE, "")  # restored after the test
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "runs"))
    words = ["--set", f"store={tmp_path / 'store'}"]
    both = ["--from-scratch", "--accept-rollback"]
    line = CommandLine("train_flow.py", [], "run", [*words, "--job", "job", *both])
    checked = check_run_options(line)
    assert checked.config is not None and not {*both} & {*checked.arguments}
    other = launchers.claim_job(job, "job", "run")
    with pytest.raises(SystemExit) as refused:
        Launch(line.argv).claim_job("job", checked.config, "run", checked.permits)
    assert refused.value.code == 3 and "job job is running" in capsys.readouterr().err
    assert not job.list("permits")
    other.release()
    launch = Launch(line.argv)
    launch.claim_job("job", checked.config, "run", checked.permits)
    launch.release()
    assert sorted(meta.key for meta in job.list("permits")) == [
        "permits/from-scratch/000001.json",
        "permits/rollback/000001.json",
    ]
    with pytest.raises(SystemExit) as refused:
        check_run_options(line.with_arguments([*words, "--from-scratch"]))
    assert refused.value.code == 2 and "--job" in capsys.readouterr().err

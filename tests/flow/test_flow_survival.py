"""A job that loses a rank, a node or everything ends as if nothing had happened: the same weights,
bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ebbflow.core.process import all_processes
from ebbflow.flows import stop
from tests.support.flow import (
    ROOT,
    TINY,
    FlowRun,
    FlowRunner,
    assert_killed_run_is_billed,
    assert_ledger_adds_up,
    processes_with,
    wait_until,
)

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]  # several runs, on a busy machine
Report = dict[str, Any]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The same job without a fault, run by Metaflow's Runner with dictionaries."""
    runner = FlowRunner(tmp_path_factory.mktemp("quiet"))
    laptop = YAML(typ="safe", pure=True).load(ROOT / "ebbflow/configs" / "laptop.yaml")
    run = runner.finish(
        runner.start_runner("run", config=laptop, set={**TINY, "store": runner.store})
    )
    assert run.exit_code == 0 and "Runner says successful: TrainFlow/" in run.output, run.output
    return run.report


def assert_same_result(run: FlowRun, quiet: Report) -> None:
    assert run.report["outcome"] == quiet["outcome"] == "completed"
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert run.report["loss_curve"] == quiet["loss_curve"]


def agent_of(rank: int) -> int:
    """Pid of the task above a rank's process."""
    parents = {process.pid: process.parent for process in all_processes()}
    while b"\0step\0train\0" not in Path(f"/proc/{rank}/cmdline").read_bytes():
        rank = parents[rank]
    return rank


def test_both_nodes_and_then_a_rank_are_lost(quiet: Report, tmp_path: Path) -> None:
    """A lost node, node 0 or not, takes a new attempt; a lost rank is replaced by the agents that
    are there.
    """
    runner = FlowRunner(tmp_path)
    process = runner.start("run", *runner.options(), "--rehearse", "node-loss@step:20:node=1")
    os.kill(agent_of(runner.await_step(32, generation=2)), signal.SIGKILL)
    os.kill(runner.await_step(42, generation=3, rank=1), signal.SIGKILL)
    run = runner.finish(process)
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert (run.report["interruptions"], run.report["failures"]) == (3, 0)
    assert run.report["redone_steps"] >= 1
    attempts = {
        event["generation"]: event["attempt"]
        for event in runner.events()
        if event["name"] == "step"
    }
    assert attempts == {1: 0, 2: 1, 3: 2, 4: 2}
    assert run.report["events"]["counts"]["fault_injected"] == 1
    assert_ledger_adds_up(run.report)


def test_a_launcher_killed_alone_takes_everything_along_and_the_job_is_resumed(
    quiet: Report, tmp_path: Path
) -> None:
    """Also frozen agents and a frozen rank. Until then no other launcher gets the job."""
    runner = FlowRunner(tmp_path)
    process = runner.start("run", *runner.options())
    ranks = [runner.await_step(20, generation=1, rank=rank) for rank in (0, 1)]
    for pid in (*map(agent_of, ranks), ranks[1]):  # the job waits, and no agent finds it out
        os.kill(pid, signal.SIGSTOP)
    second = runner.run("resume")
    assert second.exit_code == 3, second.output
    assert re.search(
        rf"job [a-z-]+ is running: `run` of .* \(pid {process.pid}\), since .* --take-over",
        second.output,
    )
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(
        "the end of all its processes", lambda: not processes_with(str(tmp_path)), timeout=10
    )

    run = runner.run("resume")
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert_killed_run_is_billed(run.report)


def test_stop_ends_a_run_from_elsewhere_after_its_save_and_report(
    quiet: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner = FlowRunner(tmp_path)
    process = runner.start("run", *runner.options(), "--job", "stopped")
    run_log = runner.log
    runner.await_step(20, generation=1)
    # In this process: the start of another one takes as long as the rest of this short job
    monkeypatch.setenv("EBBFLOW_RUNS", str(runner.runs))
    assert stop.main(["stop", "stopped"]) == 0
    said = capsys.readouterr().out
    stopped_at = re.search(r"job stopped: stopped at step (\d+), which is committed", said)
    assert stopped_at and int(stopped_at[1]) >= 20, said
    run = runner.finish(process, 60)
    assert run.exit_code == 75, run_log.read_text()
    assert "job stopped by `stop` of " in run_log.read_text()
    assert run.report["outcome"] == "interrupted" and run.report["redone_steps"] == 0

    assert stop.main(["stop", "stopped"]) == 0
    assert "no launcher runs it" in capsys.readouterr().out
    run = runner.run("run", *runner.options(), "--job", "stopped")
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)


def test_a_notice_and_a_request_to_leave_lose_nothing(quiet: Report, tmp_path: Path) -> None:
    """After the notice Metaflow tries again. The request ends the run, which is resumed by the line
    that it prints: it is asked again and again until it is gone, also while the report is written.
    """
    runner = FlowRunner(tmp_path, environment={"EBBFLOW_LIVE_PAGE": "1"})
    process = runner.start(
        "run", *runner.options(), "--rehearse", "notice@step:12:node=1:seconds=60"
    )
    runner.await_step(20, generation=2)
    process.send_signal(signal.SIGINT)
    limit = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < limit:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    left = runner.finish(process, timeout=60)
    assert left.exit_code == 75, left.output
    assert "Traceback" not in left.output and "avoid pressing" not in left.output
    assert left.report["outcome"] == "interrupted" and left.report["redone_steps"] == 0
    assert not processes_with(str(tmp_path))
    line = re.search(r"ebbflow (resume train --origin-run-id (\d+))", left.output)
    assert line, left.output
    card = runner.run("card", "get", "report")
    assert card.exit_code == 0 and "interrupted" in card.output, (
        "of the step start, since no report step ran"
    )

    run = runner.finish(runner.start_runner("resume", step_to_rerun="train", origin_run_id=line[2]))
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert (run.report["interruptions"], run.report["failures"], run.report["redone_steps"]) == (
        2,
        0,
        0,
    )
    assert_ledger_adds_up(run.report)
    notices = [event for event in runner.events() if event["name"] == "notice"]
    rehearsed = [
        (event["node"], event["data"]["does"])
        for event in notices
        if event["data"]["source"] == "rehearsal"
    ]
    assert rehearsed == [(1, "leave")]
    assert "node 1 had a notice by rehearsal: terminate" in [
        failure["culprit"] for failure in run.report["events"]["failures"]
    ]


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGINT, "preflight"),
        pytest.param(signal.SIGHUP, "prepare", marks=pytest.mark.long),
    ],
)
def test_interrupted_before_training(number: int, step: str, tmp_path: Path) -> None:
    """A terminal's signal comes to every process of its group."""
    runner = FlowRunner(tmp_path)
    process = runner.start("run", "--verbose", *runner.options())
    wait_until(f"the step {step}", lambda: re.search(rf"{step}/\d+ \(pid", runner.log.read_text()))
    os.killpg(process.pid, number)
    run = runner.finish(process, timeout=60)
    assert run.exit_code == 75, run.output
    assert "Traceback" not in run.output and "avoid pressing" not in run.output
    assert "interrupted" in run.output
    assert not processes_with(str(tmp_path))

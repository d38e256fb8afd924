"""A job that loses a rank, a node or everything ends as if nothing had happened: the same weights, bit for bit."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.support.flow import (
    ROOT,
    TINY,
    FlowRun,
    FlowRunner,
    assert_ledger_adds_up,
    generation_seconds,
    processes_with,
    wait_until,
)

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]  # several runs, on a busy machine


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """The same job without a fault, run by Metaflow's Runner with dictionaries."""
    runner = FlowRunner(tmp_path_factory.mktemp("quiet"))
    laptop = YAML(typ="safe", pure=True).load(ROOT / "configs" / "laptop.yaml")
    run = runner.finish(runner.start_runner("run", config=laptop, set={**TINY, "store": runner.store}))
    assert run.exit_code == 0 and "Runner says successful: TrainFlow/" in run.output, run.output
    return run


def assert_same_result(run: FlowRun, quiet: FlowRun) -> None:
    assert run.report["outcome"] == "completed"
    assert run.report["weights_sha256"] == quiet.report["weights_sha256"]
    assert run.report["loss_curve"] == quiet.report["loss_curve"]


def test_quiet_run_has_nothing_to_tell_of(quiet: FlowRun) -> None:
    assert quiet.report["interruptions"] == quiet.report["failures"] == quiet.report["redone_steps"] == 0
    assert_ledger_adds_up(quiet.report)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_and_then_a_rank_are_lost(node: int, quiet: FlowRun, tmp_path: Path) -> None:
    """A lost node takes a new attempt; a lost rank is replaced by the agents that are there."""
    runner = FlowRunner(tmp_path)
    process = runner.start("run", *runner.options(), "--rehearse", f"node-loss@step:20:node={node}")
    os.kill(runner.await_step(20, generation=2, rank=1), signal.SIGKILL)
    run = runner.finish(process)
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert (run.report["interruptions"], run.report["failures"]) == (2, 0)
    assert run.report["redone_steps"] >= 1
    attempts = {event["generation"]: event["attempt"] for event in runner.events() if event["name"] == "step"}
    assert attempts == {1: 0, 2: 1, 3: 1}
    assert run.report["events"]["counts"]["fault_injected"] == 1
    assert_ledger_adds_up(run.report)


def test_a_launcher_killed_alone_takes_everything_along_and_the_job_is_resumed(quiet: FlowRun, tmp_path: Path) -> None:
    """Also a frozen rank. Until then no other launcher gets the job."""
    runner = FlowRunner(tmp_path)
    process = runner.start("run", *runner.options())
    os.kill(runner.await_step(20, generation=1, rank=1), signal.SIGSTOP)  # the job waits, shorter than a hang takes
    second = runner.run("resume")
    assert second.exit_code == 3, second.output
    assert re.search(rf"job \d+ is running: `run` of .* \(pid {process.pid}\), since .* --take-over", second.output)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed_at = time.monotonic()
    wait_until("the end of all its processes", lambda: not processes_with(str(tmp_path)), timeout=10)
    assert time.monotonic() - killed_at <= 3

    run = runner.run("resume")
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert run.report["interruptions"] == 1
    assert_ledger_adds_up(run.report)
    first, second = (generation_seconds(run.report, number) for number in (1, 2))
    assert first > 0 and second > 0
    assert run.report["paid_rank_seconds"] > second  # the killed run's time is in the bill


def test_a_notice_and_requests_to_leave_lose_nothing(quiet: FlowRun, tmp_path: Path) -> None:
    """After the notice Metaflow tries again. The two others end the run, which is resumed by the line that it prints:
    it is asked again and again until it is gone, also while the report is written.
    """
    runner = FlowRunner(tmp_path, environment={"EBBFLOW_LIVE_PAGE": "1"})
    words = ["run", *runner.options(), "--rehearse", "notice@step:12:node=1:seconds=60"]
    for step, generation, number in ((20, 2, signal.SIGHUP), (28, 3, signal.SIGINT)):
        process = runner.start(*words)
        runner.await_step(step, generation=generation)
        process.send_signal(number)
        limit = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < limit:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        left = runner.finish(process, timeout=60)
        assert left.exit_code == 75, left.output
        assert "Traceback" not in left.output and "avoid pressing" not in left.output
        assert left.report["outcome"] == "interrupted" and left.report["redone_steps"] == 0
        assert not processes_with(str(tmp_path))
        line = re.search(r"flows/train_flow.py (resume train --origin-run-id (\d+))", left.output)
        assert line, left.output
        words = line[1].split()
    card = runner.run("card", "get", "report")
    assert card.exit_code == 0 and "interrupted" in card.output, "of the step start, since no report step ran"

    run = runner.finish(runner.start_runner("resume", step_to_rerun="train", origin_run_id=line[2]))
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert (run.report["interruptions"], run.report["failures"], run.report["redone_steps"]) == (3, 0, 0)
    assert_ledger_adds_up(run.report)
    notices = [event for event in runner.events() if event["name"] == "notice"]
    rehearsed = [(event["node"], event["data"]["does"]) for event in notices if event["data"]["source"] == "rehearsal"]
    assert rehearsed == [(1, "leave")]
    assert "node 1 had a notice by rehearsal: terminate" in [one["culprit"] for one in run.report["events"]["failures"]]


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, "preflight"), (signal.SIGHUP, "prepare")])
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

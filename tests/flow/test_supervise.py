"""The supervisor with the real flow: it goes on after everything was killed, stops where going on
is no use, leaves.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import (
    ROOT,
    FlowRun,
    FlowRunner,
    assert_ledger_adds_up,
    processes_with,
    train_quietly,
    wait_until,
)

# Four runs of the flow are behind the first tests
pytestmark = [pytest.mark.flow, pytest.mark.timeout(600)]

CONFIG = str(ROOT / "ebbflow/configs" / "laptop.yaml")

# The job of the story still trains when its second supervisor has started.
_LONGER = {"training__max_steps": 400}


class Supervised(FlowRunner):
    """Starts the supervisor where FlowRunner starts the flow; one rank, so that a run starts
    sooner.
    """

    program = ROOT / "ebbflow/flows" / "supervise.py"

    def words(self, *more: str, **settings: object) -> list[str]:
        return [CONFIG, *self.options(cluster__nodes=1, **settings), "--pause-seconds", "0", *more]

    def await_commit(self, generation: int) -> None:
        wait_until(
            f"a commit of generation {generation}",
            lambda: any(
                event["name"] == "commit" and event["generation"] == generation
                for event in self.events()
            ),
            timeout=120,
        )

    def launchers(self) -> list[int]:
        """Pids of the flow's launchers below this folder: not of its tasks, nor of the supervisor."""
        return [
            pid
            for pid in processes_with(str(self.folder))
            if b"train_flow.py\0run" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]


@dataclass(frozen=True)
class Story:
    """A job whose launcher is killed, and that another supervisor then takes over from the first
    and completes. quiet: the report of the same job without all that."""

    runner: Supervised
    left: FlowRun
    survivors: list[int]
    run: FlowRun
    quiet: dict[str, Any]


def told(run: FlowRun) -> list[str]:
    return re.findall(r"^supervise: (.*)$", run.output, re.MULTILINE)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    runner = Supervised(tmp_path_factory.mktemp("survived"))
    first = runner.start(*runner.words(**_LONGER))
    runner.await_commit(1)
    [launcher] = runner.launchers()
    os.kill(launcher, signal.SIGKILL)
    runner.await_commit(2)
    log = runner.log
    second = runner.start(*runner.words("--take-over", **_LONGER))
    second_log = runner.log
    runner.log = log
    left = runner.finish(first)
    runner.log = second_log
    run = runner.finish(second)
    survivors = processes_with(str(runner.folder))
    quiet = train_quietly(
        tmp_path_factory.mktemp("quiet"), *runner.options(cluster__nodes=1, **_LONGER), ranks=1
    )
    return Story(runner, left, survivors, run, quiet)


def test_a_supervised_job_resumes_bit_equal_after_kills(story: Story) -> None:
    run = story.run
    quiet = story.quiet
    assert run.exit_code == 0, run.output
    assert run.report["job"] == "laptop"
    assert (run.report["interruptions"], run.report["failures"]) == (2, 0)
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert run.report["loss_curve"] == quiet["loss_curve"]
    assert_ledger_adds_up(run.report)
    first, *_, last = told(run)
    assert "goes on, 1 run so far; it has cost $0.00" in first
    assert any(
        line.startswith("job laptop: taking over from `supervise` of ") for line in told(run)
    )
    assert (
        last.startswith("completed after 3 runs, 2 interruptions, 0 failures, ")
        and "simulated price" in last
    )


def test_a_supervisor_whose_job_is_taken_over_saves_and_exits_with_75(story: Story) -> None:
    assert story.left.exit_code == 75, story.left.output
    assert "interrupted (exit code -9), 1 run, 1 interruption, 0 failures" in story.left.output
    assert not story.left.report, "the report is the successor's"
    ended = {
        entry["generation"]: entry["ended"] for entry in story.run.report["events"]["generations"]
    }
    assert ended[2] == "interrupted"
    assert re.fullmatch(
        r"job taken over by `supervise` of .*; it has cost \$.*", told(story.left)[-1]
    )
    assert "Traceback" not in story.left.output
    assert not story.survivors


def test_a_job_that_is_complete_is_not_run_again(story: Story) -> None:
    again = story.runner.run(*story.runner.words(**_LONGER))
    assert again.exit_code == 0 and len(told(again)) == 2 and "complete already" in told(again)[1]
    assert "ebbflow: job" not in again.output


def test_a_crash_loop_ends_with_its_code_its_reason_and_its_cost(tmp_path: Path) -> None:
    runner = Supervised(tmp_path, environment={"PYTHONPATH": str(ROOT)})
    settings = {"workload": "tests.support.crashing:Crashing", "checkpoint__interval_steps": 30}
    run = runner.run(*runner.words(**settings))
    assert run.exit_code == 6, run.output
    assert run.report["outcome"] == "crash_loop" and run.report["failures"] == 3
    *_, why, cost = told(run)
    assert why.startswith("stopped, crash_loop (exit code 6): crash loop: the same failure 3 times")
    assert "a bug at sample" in why and "rank-seconds" in why
    assert re.fullmatch(
        r"after 1 run, .*3 failures.*; it has cost \$\d\.\d{4} at a simulated price", cost
    ), cost
    assert f"${run.report['total_usd']:.4f}" in cost


def test_runs_that_fail_without_training_anything_stop_after_three(tmp_path: Path) -> None:
    """No agent sees such a loop: each run dies before it starts one."""
    # A file where Metaflow needs a folder
    records = tmp_path / "records" / ".metaflow" / "TrainFlow"
    records.parent.mkdir(parents=True)
    records.touch()
    runner = Supervised(
        tmp_path, environment={"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path / "records")}
    )
    run = runner.run(*runner.words())
    assert run.exit_code == 6, run.output
    failed = [line for line in told(run) if line.startswith("failure ")]
    assert [line[:12] for line in failed] == ["failure 1 of", "failure 2 of"]
    assert "crash loop: 3 failures with no new commit in between" in told(run)[-2]


def test_a_refusal_by_the_flow_ends_the_supervisor_at_once(tmp_path: Path) -> None:
    runner = Supervised(tmp_path)
    run = runner.run(*runner.words(cost__budget_usd=0.0001))
    assert run.exit_code == 3, run.output
    assert told(run)[-2].startswith("stopped, preflight (exit code 3): ")


def test_nothing_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    runner = Supervised(tmp_path)
    process = runner.start(*runner.words())
    wait_until("the flow", runner.launchers)
    process.kill()
    process.wait()
    wait_until(
        "the end of all its processes", lambda: not processes_with(str(tmp_path)), timeout=60
    )

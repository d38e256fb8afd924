"""The terminal of a run: what it shows of Metaflow's log and of the job's events, plainly and on a
real terminal.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    FAULT_DETECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NOTICE,
    OUTCOME,
    STEP,
    Event,
    Origin,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.cost.report.render_text import describe_rehearsal, render_closing
from ebbflow.cost.report.report import build_report
from ebbflow.flows import job as flows_job
from ebbflow.flows.command_line import CommandLine, describe_flags
from ebbflow.flows.console import RunView, SpendQuestion, _Lines, open_view
from tests.support.console_log import log_of_a_run
from tests.support.flow import wait_until
from tests.support.timelines import GangLog, event, plan_event

ROOT = Path(__file__).resolve().parents[2]

_ON_A_TERMINAL = """
import sys, time
from ebbflow.core.program import print_on_any_terminal
print_on_any_terminal()
from ebbflow.flows.console import RunView, is_terminal
from ebbflow.core.config.schema import RunConfig
from tests.support.console_log import log_of_a_run, PROGRESS
from ebbflow.core.process import ignore_lost_readers
from ebbflow.core.untrusted_text import guard_terminal
ignore_lost_readers()
guard_terminal(keep_colours=True)
assert is_terminal()
view = RunView("mine", RunConfig(store=sys.argv[1]), fancy=True)
view.logged("Task is starting.", system_msg=True, head="[17/train/1 (pid 5)] ")
view.logged(PROGRESS, head="[17/train/1 (pid 5)] ")
print("a print of the launcher")
time.sleep(0.5)
log_of_a_run(view)
view.close(explained=True)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(flows_job, "RUNS", tmp_path / "runs")
    return RunConfig(store=str(tmp_path / "runs"))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_without_a_terminal_steps_and_progress_are_plain_lines(
    encoding: str, config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = RunView("mine", config, fancy=False)
    log_of_a_run(view, failing=True, encoding=encoding)
    view.close(explained=True)
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert [line.split()[:2] for line in lines if line[0] in "✓✗"] == [
        ["✓", "start"],
        ["✓", "preflight"],
        ["✓", "plan"],
        ["✗", "train"],
    ]
    assert (
        "1 passed, 1 warned, 1 skipped" in output
        and "torch 2" not in output
        and "skip  gpu" not in output
    )
    assert "  warn  cores      4 ranks on 2 cores\n  fix: fewer ranks\n" in output
    assert "capacity plan" not in output and "240 steps\n" not in output
    assert (
        "  89/240 37% · loss 2.65 · 17,990 tok/s · MFU 40% · $0.0014 of $5.00 (simulated) · "
        "commit 60" in output
    )
    assert "a line of the user's model" in output
    assert "\x1b" not in output and "\x07" not in output and "fan_out" not in output
    log = (tmp_path / "runs" / "mine" / "metaflow.log").read_text()
    assert "capacity plan" in log and "torch 2" in log and "Metaflow 2 executing" in log


def test_the_console_shows_the_jobs_events(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open(config.store).sub(job_prefix("mine"))
    view = RunView("mine", config, fancy=False)
    view.logged("Workflow starting (run-id 17):", system_msg=True)
    with (
        EventLog(
            store, Origin(job="mine", run="17", generation=1, node=0, process="agent")
        ) as agent,
        EventLog(store, Origin(job="mine", run="17", generation=2, node=0, rank=0)) as rank,
    ):
        notice = {
            "source": "metadata",
            "action": "terminate",
            "seconds_left": 120.0,
            "does": "leave",
        }
        agent.emit(NOTICE, **notice)
        now = time.time() + 1.0
        agent.emit(
            FAULT_DETECTED,
            culprit="node 1",
            reason="node_lost",
            at=(now, 1.0),
            flush=True,
        )
        rank.emit(GENERATION_STARTED, parent_step=60)
        rank.emit(STEP, step=61, loss=2.0, tokens=1, seconds={}, at=(now + 4.0, 5.0))
        agent.emit(GENERATION_ENDED, culprit="node 1", reason="node_lost", at=(now + 4.1, 5.1))
    shown: list[str] = []
    wait_until(
        "the recovery",
        lambda: shown.append(capsys.readouterr().out) or "again" in "".join(shown),
        30,
    )
    view.close(explained=True)
    output = "".join(shown)
    assert "! notice to node 0: metadata terminate, 120 s left: leave" in output
    assert "✗ node 1: node lost\n" in output, "the ledger counts what is lost"
    assert "generation 2 starts from step 60" in output
    assert "training again after 4.0 s, from step 61" in output
    assert output.count("✗") == 1, "the end of the generation repeats its failure"


def test_training_that_ended_in_a_crash_loop_has_no_check_mark(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its task succeeds, so that the step `report` runs."""
    store = Store.open(config.store).sub(job_prefix("mine"))
    for outcome, line in (
        ("crash_loop", r"✗ train [\d.]+ s: crash loop"),
        ("completed", r"✓ train [\d.]+ s"),
    ):
        view = RunView("mine", config, fancy=False)
        with EventLog(
            store, Origin(job="mine", run="17", generation=3, node=0, process=f"agent-{outcome}")
        ) as agent:
            agent.emit(OUTCOME, outcome=outcome, message="the same failure 3 times", flush=True)
        log_of_a_run(view)
        view.close(explained=True)
        assert re.search(f"^{line}$", capsys.readouterr().out, re.MULTILINE)


def test_if_metaflow_refuses_to_start_its_words_are_shown(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    view = RunView("", config, fancy=False)
    view.echoed("Metaflow 2 executing *TrainFlow*")
    view.echoed("Step *train* has no such decorator", indent=True)
    assert capsys.readouterr().out == ""
    view.close(explained=False)
    assert "Step train has no such decorator\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "starts"),
    [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False), ("", False)],
)
def test_money_is_spent_only_after_a_yes(
    answer: str, starts: bool, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_text(answer)
    with open(tmp_path / "answer") as given:
        monkeypatch.setattr(sys, "stdin", given)
        view = RunView("mine", config, fancy=False, question=SpendQuestion.AFTER_PLAN)
        if starts:
            view.require_yes()
        else:
            with pytest.raises(KeyboardInterrupt):
                view.require_yes()


@pytest.mark.parametrize(
    ("words", "flags", "asked"),
    [
        ("--with batch", "--verbose", "first"),
        ("--with=cloud", "--verbose", "first"),
        ("--with kubernetes", "", "first"),
        ("--with cloud", "", "after the plan"),
        ("--with batch", "--yes", "never"),
        ("--with batch", "no terminal", "never"),
        ("", "", "never"),
        ("--with local", "--verbose", "never"),
    ],
)
def test_the_user_is_asked_before_cloud_money_is_spent(
    words: str, flags: str, asked: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal that cannot move its cursor, and with --verbose."""
    from metaflow import cli

    from ebbflow.flows.train_flow import TrainFlow

    for name in ("logger", "echo_always"):
        monkeypatch.setattr(cli, name, getattr(cli, name))
    config = RunConfig.model_validate({"store": config.store, "cost": {"budget_usd": 5}})
    main, side = pty.openpty()
    os.set_blocking(main, False)
    monkeypatch.setenv("TERM", "dumb")
    line = CommandLine.parse(["train_flow.py", "run", *words.split()])
    terminal = os.ttyname(side)
    with (
        open(main, "r+b", buffering=0) as user,
        open(side),
        open(os.devnull if flags == "no terminal" else terminal) as stdin,
        open(terminal, "w") as stdout,
    ):
        user.write(b"n\n")
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        if asked == "first":
            with pytest.raises(KeyboardInterrupt):
                open_view(TrainFlow, "mine", config, {flags}, line)
            shown = b"".join(iter(lambda: user.read(4096), None))
            assert (
                b"and pay for it, for at most $5.00? `ebbflow plan` shows the estimate. [y/N]"
                in shown
            )
        else:
            view = open_view(TrainFlow, "mine", config, {flags}, line)
            assert (view is None) == (flags == "--verbose")
            question = SpendQuestion.AFTER_PLAN if asked == "after the plan" else SpendQuestion.NONE
            assert view is None or view._question is question


def test_the_help_of_run_names_the_flags_that_metaflow_does_not_know() -> None:
    text = describe_flags()
    for flag in (
        "--verbose",
        "--yes",
        "--compare",
        "--take-over",
        "--from-scratch",
        "--accept-rollback",
    ):
        assert f"\n  {flag}" in text


def on_a_terminal(folder: Path, columns: int, *, closes: bool = False, **environment: str) -> str:
    """The output of a process on a pseudo-terminal of that width, which closes after the first
    output if `closes`.
    """
    main, side = pty.openpty()
    os.set_blocking(main, True)
    own = {
        "COLUMNS": str(columns),
        "TERM": "xterm",
        "EBBFLOW_RUNS": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", _ON_A_TERMINAL, str(folder)]
    process = subprocess.Popen(
        command, env=os.environ | own | environment, stdout=side, stderr=side, cwd=ROOT
    )
    os.close(side)
    found = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            break
        found += piece
        if not piece or closes:
            break
    os.close(main)
    assert process.wait(60) == 0, found.decode()
    return found.decode(environment.get("PYTHONIOENCODING", "utf-8"))


@pytest.mark.parametrize("columns", [80, 140])
def test_on_a_terminal_one_bar_stays_below_the_lines(columns: int, tmp_path: Path) -> None:
    output = on_a_terminal(tmp_path, columns)
    assert "━" in output and "89/240 37% ETA 0:17" in output and "a print of the launcher" in output
    assert output.rstrip().endswith("\x1b[?25h") or output.count("\x1b[?25h") >= output.count(
        "\x1b[?25l"
    ), "the cursor"
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= columns
    assert "\x1b]0;" not in output, "a task's escape sequences never reach the terminal"


def test_a_terminal_that_closes_does_not_end_the_run(tmp_path: Path) -> None:
    on_a_terminal(tmp_path, 80, closes=True)
    assert "capacity plan" in (tmp_path / "mine" / "metaflow.log").read_text()


def test_a_terminal_without_colours_and_one_that_knows_only_ascii(tmp_path: Path) -> None:
    assert not re.search(
        r"\x1b\[(?:[0-9;]*;)?3[0-9](?:;|m)", on_a_terminal(tmp_path, 80, NO_COLOR="1")
    )
    assert on_a_terminal(tmp_path, 80, PYTHONIOENCODING="ascii").isascii()


def test_in_an_ascii_locale_metaflow_starts_and_the_output_is_readable_ascii() -> None:
    script = (
        "from ebbflow.core.program import begin_program; begin_program(); import locale, "
        "subprocess, sys; "
    )
    script += "print(locale.getpreferredencoding(), open('/dev/null').encoding, flush=True); "
    script += "subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "from ebbflow.core.program import begin_program; begin_program(); print('› ✓')"
    own = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"
    } | own
    output = subprocess.check_output(
        [sys.executable, "-c", script, child], env=variables, cwd=ROOT, text=True
    )
    assert output.lower() == "utf-8 utf-8\n> ok\n"


def a_job(outcome: str = "completed", **end: Any) -> list[Event]:
    first = GangLog(1, 1.0, [[0], [1]])
    first.phase("startup", 1.0)
    first.steps(1, 3, useful_step=1.0)
    first.commit(2)
    first.ended("node_lost", 6.0, culprit="node 1 (b) was lost")
    second = GangLog(2, 20.0, [[0], [1]], parent=(2, 1))
    second.phase("startup", 1.0)
    second.steps(3, 4, useful_step=1.0)
    second.outcome(outcome)
    second.ended(outcome, 4.0)
    return [plan_event(), *first.events, *second.events]


@pytest.mark.parametrize("outcome", ["completed", "failed", "budget", "non_finite", "interrupted"])
def test_the_closing_block_begins_with_the_verdict_and_is_short(outcome: str) -> None:
    report = build_report(a_job(outcome))
    lines = render_closing(report, "runs/j/report.html").splitlines()
    assert lines[0].startswith("✓" if outcome == "completed" else "✗") and "$" in lines[0]
    assert len(lines) <= 15 and any("runs/j/report.html" in line for line in lines)
    assert "node 1 (b) was lost" in "".join(lines) and "n/a" not in "".join(lines)
    assert all(len(line) <= 80 for line in lines if "ebbflow r" not in line)
    assert any(re.match(" *ebbflow (run|resume) ", line) for line in lines) == (
        outcome != "completed"
    )


def test_a_rehearsal_is_compared_with_a_run_of_the_same_settings_only() -> None:
    settings = [
        {"key": "training.max_steps", "value": 4, "source": "default"},
        {"key": "store", "value": "a", "source": "x"},
    ]
    injected = event("fault_injected", 3.0, kind="node-loss", target="node 1", generation=1)
    report = build_report([*a_job(), injected, event("configured", 0.1, settings=settings)])
    other = replace(report, job="quiet", interruptions=0)
    assert describe_rehearsal(build_report(a_job()), [other]) == []
    assert "weights equal to the uninterrupted run quiet" in describe_rehearsal(report, [other])[0]
    assert "DIFFER" in describe_rehearsal(report, [replace(other, weights_sha256="0")])[0]
    more = [{**settings[0], "value": 5}]
    for different in ({"configuration": more}, {"interruptions": 1}, {"outcome": Outcome.FAILED}):
        assert "--compare runs one" in describe_rehearsal(report, [replace(other, **different)])[0]


def test_a_stream_above_the_bar_is_one_of_text(config: RunConfig) -> None:
    """click decides so by writing bytes, and would print nothing to a stream that takes them."""
    lines = _Lines(RunView("job", config, fancy=False))
    with pytest.raises(TypeError, match="must be str, not bytes"):
        lines.write(b"")  # type: ignore[arg-type]

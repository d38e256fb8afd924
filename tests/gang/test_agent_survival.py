"""An agent survives whatever a rank does, and says of each end what caused it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import GENERATION_ENDED, OUTCOME, EndReason, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import signal_name
from ebbflow.core.store import Store
from ebbflow.training import worker as worker_module
from ebbflow.training.errors import LONGEST_MESSAGE, GangError, WorkloadError, error_class
from ebbflow.training.launch.agent import run_gang
from ebbflow.training.launch.coordinator import Coordinator
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.heartbeat import HangLimits
from ebbflow.training.launch.logs import RankLog, TerminalEcho, print_line, show_failed_logs
from ebbflow.training.launch.messages import WorkerSpec, end_from_failures
from ebbflow.training.launch.watch import RankWatch
from ebbflow.training.launch.workers import Worker
from tests.support.gangs import endless_gang

SPEC = WorkerSpec(
    job="job",
    run="run",
    attempt=0,
    node=0,
    generation=1,
    generation_id="x",
    candidates=[],
    config=RunConfig(),
    store_uri="unused",
    prepared={},
    agent_pid=os.getpid(),
)
DEADLINES = HangLimits(
    floor_seconds=60.0, start_seconds=60.0, store_seconds=60.0, longest_seconds=60.0
)

ends = st.integers(-64, 255)
texts = st.text(st.characters(exclude_categories=()), max_size=80)  # lone surrogates among them
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
records = st.fixed_dictionaries(
    {"message": st.fixed_dictionaries({"message": texts | junk, "extraInfo": junk})}
    | {"outcome": st.sampled_from(["completed", "x", []]), "step": junk}
)
files = st.one_of(
    st.none(), st.binary(max_size=200), records.map(lambda found: json.dumps(found).encode())
)


class FailingText(Exception):
    def __str__(self) -> str:
        raise SystemExit(7)


class DataError(Exception):
    """Has only the name of one of ours, as many libraries' exceptions do."""


def ended_worker(folder: Path, code: int) -> Worker:
    process = SimpleNamespace(pid=2**22 + 1, returncode=code, poll=lambda: code)
    return Worker(0, 0, folder, SPEC, {}, lambda *_: process)


@settings(max_examples=150, deadline=None)
@given(
    code=ends,
    error=files,
    result=files,
    calls=files,
    log=st.binary(max_size=300),
    nesting=st.booleans(),
)
def test_no_end_of_a_rank_and_nothing_that_it_leaves_ends_its_agent(
    code: int,
    error: bytes | None,
    result: bytes | None,
    calls: bytes | None,
    log: bytes,
    nesting: bool,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker = ended_worker(folder, code)
        written = {
            "rank-0.error.json": error,
            "rank-0.result.json": result,
            "rank-0.records.json": calls,
        }
        for file, content in written.items():
            if content is not None:
                (folder / file).write_bytes(b"[" * 100_000 if nesting else content)
        worker.log_path.write_bytes(log)
        watch = RankWatch([worker], DEADLINES, folder)
        failures = watch.check()
        watch.close()
        group = SimpleNamespace(workers=[worker])
        TerminalEcho(group).echo_new_lines()
        RankLog(worker.log_path, job="job", generation=1, node=0, rank=0, limit_bytes=2**20).finish(
            worker.beat
        )
        if not failures:
            assert worker.result() is not None
            return
        [failure] = [failure for failure in failures if not failure.witness]
        verdict = end_from_failures(failures)
        show_failed_logs(group, failures, job="job", generation=1)
        print_line(verdict.culprit)
        assert verdict.culprit.encode("utf-8").startswith(b"rank 0: ") and verdict.fingerprint
        assert verdict.reason == (EndReason.RANK_KILLED if code < 0 else EndReason.RANK_FAILED)
        assert len(json.dumps(asdict(verdict))) < 1_000_000
        assert failure.killed_by == (signal_name(-code) if code < 0 else None)


def test_real_time_signals_have_names() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 6) == "SIGRTMIN+6"
    assert len({signal_name(number) for number in range(1, 65)}) == 64


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_no_text_ends_an_agent_that_prints_it_on_a_strict_terminal(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", terminal)
    print_line("a lone \udcff surrogate and ∑")
    assert b"a lone \\udcff surrogate" in raw.getvalue()
    terminal.close()
    print_line("after the end of the terminal")


def test_a_rank_that_removes_its_own_log_does_not_end_its_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = ended_worker(tmp_path, 1)
    echo = TerminalEcho(SimpleNamespace(workers=[worker]))
    worker.log_path.write_text("first\n")
    echo.echo_new_lines()
    worker.log_path.unlink()
    echo.echo_new_lines()
    worker.log_path.write_text("first\nsecond\n")
    echo.echo_new_lines()
    assert capsys.readouterr().out == "first\nsecond\n"


def test_an_agent_that_raises_counts_as_a_failure_and_ends_in_a_crash_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise ValueError("a bug of the agent")

    monkeypatch.setattr(Coordinator, "_run_generation", raises)
    spec = replace(endless_gang(tmp_path, survival={"standby": False}), nodes=1)
    ends = []
    for attempt in range(3):
        with pytest.raises(GangError, match="ValueError: a bug of the agent") as error:
            run_gang(replace(spec, attempt=attempt))
        ends.append((error.value.outcome, error.value.curable))
    assert ends == [(Outcome.FAILED, True)] * 2 + [(Outcome.CRASH_LOOP, False)]
    events = read_events(Store.open(spec.store_uri).sub(job_prefix(spec.job)))
    ended = [event.data for event in events if event.name == GENERATION_ENDED]
    assert [(end["reason"], end["user_code"]) for end in ended] == [("agent_failed", True)] * 3
    assert [event.data["outcome"] for event in events if event.name == OUTCOME] == ["crash_loop"]


def ended_by(
    error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch, *, agent: bool = True
) -> tuple[int, WorkerFailure | None]:
    """The exit code of a rank whose training raises `error`, and what its agent makes of it."""
    left: list[int] = []

    def trains(*_: object) -> Any:
        raise error

    worker = ended_worker(folder, 1)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "rank-0.error.json"))
    else:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(worker_module, "_train", trains)
    monkeypatch.setattr(worker_module, "parse_arguments", lambda arguments: None)
    monkeypatch.setattr(worker_module, "tie_forked_children", lambda: None)
    monkeypatch.setattr(worker_module, "leave", left.append)
    worker_module.main([])
    return left[0], worker.failure()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SystemExit(0), "SystemExit: the program called sys.exit(0)"),
        (SystemExit(3), "SystemExit: the program called sys.exit(3)"),
        (GeneratorExit(), "GeneratorExit: "),
        (FailingText(), "FailingText: (its text cannot be made: __str__ raised SystemExit)"),
        (ValueError("\udcff"), "ValueError: \\udcff"),
        (ValueError("x" * 50_000_000), "ValueError: xxx"),
        (DataError("no rows"), "DataError: no rows"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_exception_of_the_users_code_leaves_its_cause(
    error: BaseException,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    code, failure = ended_by(error, tmp_path, monkeypatch)
    assert (
        code == 1
        and failure.message.startswith(cause)
        and len(failure.message) < LONGEST_MESSAGE + 100
    )
    assert (tmp_path / "rank-0.error.json").stat().st_size < 1_000_000
    verdict = end_from_failures([failure])
    assert verdict.user_code and verdict.again and verdict.failed_as == Outcome.FAILED
    printed = capsys.readouterr().err
    assert type(error).__name__ in printed and len(printed) < 1_000_000


def test_an_exception_of_training_keeps_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, failure = ended_by(WorkloadError("no units"), tmp_path, monkeypatch)
    assert code == Outcome.CONFIG.exit_code and not end_from_failures([failure]).curable
    assert error_class("WorkloadError") is WorkloadError and error_class("Outcome") is GangError


def test_without_an_agent_a_workload_that_raises_prints_its_error_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tried = WorkloadError("mine:Mine.loss() raised KeyError: 'x'")
    tried.__cause__ = KeyError("x")
    code, _ = ended_by(tried, tmp_path, monkeypatch, agent=False)
    assert code == 1 and "mine:Mine.loss() raised KeyError" in capsys.readouterr().err

"""Claims on a job: of two launchers one runs it, the other is refused, waits for a dead one, or
takes over.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbflow.core import launchers
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import JobIsRunning
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    BATCH_SUBMITTED,
    GENERATION_STARTED,
    NODE_STARTED,
    OUTCOME,
    PLAN,
    PREFLIGHT,
    STEP,
    Event,
    Origin,
    read_events,
)
from ebbflow.core.launchers import (
    Claim,
    Launcher,
    check_inherited_claim,
    claim_job,
    running_launcher,
    stop_job,
)
from ebbflow.core.layout import launcher_key
from ebbflow.core.process import process_state
from ebbflow.core.store import Store
from ebbflow.cost.__main__ import main as cost_main
from ebbflow.cost.jobs import load_report
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows import finish, launcher, options, reporting
from ebbflow.flows.attempts import settlement
from ebbflow.flows.job import Job
from ebbflow.flows.launch import Launch
from ebbflow.flows.options import CheckedOptions
from ebbflow.observe.observer import runs_elsewhere
from tests.support.flow import ROOT, wait_until
from tests.support.swift import Swift

WAIT_SECONDS = 60.0


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return Store.open(str(tmp_path / "store"))
    swift: Swift = request.getfixturevalue("swift")
    for name, value in swift.environment().items():
        monkeypatch.setenv(name, value)
    return Store.open(f"s3://{swift.new_bucket()}/jobs/mine")


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


def elsewhere(store: Store, number: int = 1, **changes: object) -> Launcher:
    """A claim that a launcher on another machine has left."""
    given = {
        "id": "other",
        "command": "run",
        "host": "node-7",
        "user": "ann",
        "pid": 4711,
        "since_utc": 0.0,
    }
    launcher = Launcher(number=number, **{**given, **changes})
    store.put(launcher_key(number), launcher.to_json())
    return launcher


def age(store: Store, number: int, seconds: float) -> None:
    path = store.local_path(launcher_key(number))
    assert path is not None
    os.utime(path, (time.time() - seconds,) * 2)


def test_an_object_is_created_once(store: Store) -> None:
    assert store.create("a/one", b"first")
    assert not store.create("a/one", b"second")
    assert store.create("a/one", b"first"), "the retry of a put whose answer was lost"
    assert store.get("a/one") == b"first"


def test_of_several_writers_at_the_same_moment_one_creates_the_object(folder: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: folder.create("a/one", b"by %d" % number), range(4)))
    assert sorted(found) == [False, False, False, True]
    assert folder.get("a/one") == b"by %d" % found.index(True)


def test_a_second_launcher_is_refused_with_the_option_to_take_over(store: Store) -> None:
    claim = claim_job(store, "mine", "run")
    with pytest.raises(JobIsRunning) as refused:
        claim_job(store, "mine", "resume")
    said = str(refused.value)
    assert said.startswith("job mine is running: `run` of ") and "\n" not in said
    assert f"on host {socket.gethostname()} (pid {os.getpid()}), since 20" in said
    assert said.endswith("to end that run and go on here, add --take-over")
    assert refused.value.outcome.exit_code == 3
    found = running_launcher(store)
    assert found is not None and found.launcher.id == claim.launcher.id
    claim.release()
    assert running_launcher(store) is None
    again = claim_job(store, "mine", "resume")
    assert again.launcher.number == 2
    again.release()


def test_a_former_launcher_is_fenced_and_waited_for(store: Store) -> None:
    fenced = threading.Event()
    former = claim_job(store, "mine", "run", on_fenced=fenced.set)
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(claim_job, store, "mine", "resume", take_over=True, say=said.append)
        assert fenced.wait(WAIT_SECONDS)
        assert former.fenced_by is not None and former.fenced_by.command == "resume"
        assert not taking.done(), "the former launcher saves, and has not released the job"
        former.release()
        successor: Claim = taking.result(WAIT_SECONDS)
    assert "taking over from `run` of " in said[0] and len(said) == 1
    assert former.fenced_by.id == successor.launcher.id and successor.fenced_by is None
    with pytest.raises(JobIsRunning, match="job mine was taken over: `resume`"):
        check_inherited_claim(store, "mine", former.launcher.id)
    check_inherited_claim(store, "mine", successor.launcher.id)
    successor.release()


def test_stop_fences_the_launcher_and_leaves_the_job_free(store: Store) -> None:
    fenced = threading.Event()
    former = claim_job(store, "mine", "run", on_fenced=fenced.set)
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_job, store, "mine", say=said.append)
        assert fenced.wait(WAIT_SECONDS)
        assert former.is_stopped and not former.is_taken_over
        assert former.describe_loss().startswith("job stopped by `stop` of ")
        assert not stopping.done(), "the former launcher saves, and has not released the job"
        former.release()
        stopped = stopping.result(WAIT_SECONDS)
    assert stopped is not None and stopped.has_left
    assert stopped.launcher.id == former.launcher.id
    assert len(said) == 1 and "stopping `run` of " in said[0]
    assert running_launcher(store) is None
    assert stop_job(store, "mine", say=pytest.fail) is None
    again = claim_job(store, "mine", "run")
    assert former.is_stopped, "a later launcher is another run"
    again.release()


def test_stop_says_when_the_launcher_does_not_leave(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = claim_job(folder, "mine", "run")
    monkeypatch.setattr(launchers, "HAND_OVER_SECONDS", 0.5)
    stopped = stop_job(folder, "mine", say=lambda text: None)
    assert stopped is not None and not stopped.has_left
    former.release()


def test_a_process_of_this_machine_that_is_gone_holds_nothing(folder: Store) -> None:
    left = (
        "import sys; from ebbflow.core.store import Store; from ebbflow.core.launchers import "
        "claim_job;"
    )
    left += "claim_job(Store.open(sys.argv[1]), 'mine', 'run'); import os; os._exit(9)"
    assert (
        subprocess.run(
            [sys.executable, "-c", left, folder.uri], cwd=Path(__file__).parents[2]
        ).returncode
        == 9
    )
    assert running_launcher(folder) is None
    claim = claim_job(folder, "mine", "run", say=pytest.fail)
    assert claim.launcher.number == 2
    claim.release()


def test_a_stopped_process_of_this_machine_holds_its_job_at_any_age(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z: it renews nothing, and goes on with `fg`."""
    held = (
        "import sys, time; from ebbflow.core.store import Store; from ebbflow.core.launchers "
        "import claim_job;"
    )
    held += "claim_job(Store.open(sys.argv[1]), 'mine', 'run'); time.sleep(600)"
    other = subprocess.Popen(
        [sys.executable, "-c", held, folder.uri], cwd=Path(__file__).parents[2]
    )
    try:
        wait_until("its claim", lambda: running_launcher(folder) is not None, timeout=WAIT_SECONDS)
        other.send_signal(signal.SIGSTOP)
        wait_until("its stop", lambda: process_state(other.pid) == "T", timeout=WAIT_SECONDS)
        age(folder, 1, 86400)
        found = running_launcher(folder)
        assert found is not None and found.heartbeat_age_seconds > 86000
        with pytest.raises(
            JobIsRunning,
            match=f"it is stopped, kill -CONT {other.pid} continues it; to end that run",
        ):
            claim_job(folder, "mine", "run", say=pytest.fail)
        monkeypatch.setattr(launchers, "HAND_OVER_SECONDS", 1.0)
        said: list[str] = []
        claim = claim_job(folder, "mine", "run", take_over=True, say=said.append)
        assert claim.launcher.number == 2 and said[-1].endswith("going on from the last commit")
        claim.release()
    finally:
        other.kill()
        other.wait()


def test_a_claim_of_another_machine_is_watched_for_a_sign_of_life(folder: Store) -> None:
    other = elsewhere(folder)
    said = []

    def renew(text: str) -> None:
        said.append(text)
        threading.Timer(0.2, lambda: elsewhere(folder, renewals=other.renewals + 1)).start()

    with pytest.raises(
        JobIsRunning,
        match=r"`run` of ann on host node-7 \(pid 4711\), since 1970-01-01 00:00:00 UTC",
    ):
        claim_job(folder, "mine", "run", say=renew)
    assert len(said) == 1 and said[0].endswith("for a sign of life")


def test_a_claim_by_the_same_pid_in_another_container_is_another_launchers(folder: Store) -> None:
    """Containers on the host's network share its name, so a fenced observer writes no report."""
    claim = claim_job(folder, "mine", "run", say=pytest.fail)
    assert not runs_elsewhere(folder, os.getpid())
    assert runs_elsewhere(folder, os.getpid() + 1)
    claim.release()
    taken = replace(claim.launcher, number=2, id="other", pid_namespace="pid:[1]")
    folder.put(launcher_key(2), taken.to_json())
    assert (taken.host, taken.pid) == (socket.gethostname(), os.getpid())
    assert runs_elsewhere(folder, os.getpid())
    without_proc = replace(taken, boot_id="", pid_namespace="")
    assert without_proc.is_process(os.getpid()) and not without_proc.is_process(os.getpid() + 1)


def test_a_claim_without_a_sign_of_life_is_taken(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(folder)
    age(folder, 1, launchers.STALE_SECONDS + 1)
    claim = claim_job(folder, "mine", "run", say=pytest.fail)  # stale: without a word
    claim.release()
    elsewhere(folder, number=3)
    monkeypatch.setattr(launchers, "STALE_SECONDS", 1.0)
    said: list[str] = []
    claim = claim_job(folder, "mine", "run", say=said.append)
    assert claim.launcher.number == 4 and len(said) == 1
    claim.release()


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"schema": 1, "pid": 7}', b"\xff\xfe"])
def test_a_damaged_claim_holds_the_job_until_it_is_stale(
    folder: Store, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(folder, number=6, released=True)
    folder.put(launcher_key(7), content)
    found = running_launcher(folder)
    assert found is not None and found.launcher.describe().endswith(
        "claim launchers/000007.json cannot be read"
    )
    other = threading.Timer(0.2, lambda: elsewhere(folder, number=7))
    with pytest.raises(JobIsRunning, match="`run` of ann on host node-7"):
        claim_job(folder, "mine", "run", say=lambda text: other.start())
    folder.put(launcher_key(7), content)
    age(folder, 7, launchers.STALE_SECONDS + 1)
    claim = claim_job(folder, "mine", "run", say=pytest.fail)
    assert claim.launcher.number == 8
    folder.put(launcher_key(8), content)
    check_inherited_claim(folder, "mine", claim.launcher.id)
    renewed = claim.launcher.renewals
    wait_until(
        "the renewal of its own",
        lambda: claim.launcher.renewals > renewed + 1,
        timeout=WAIT_SECONDS,
    )
    claim.release()
    assert running_launcher(folder) is None and claim.fenced_by is None


def test_a_second_interrupt_while_the_claim_is_released_ends_the_process(folder: Store) -> None:
    """The handler runs in the thread that releases, and releases as well."""
    program = """
import os, signal, sys
from ebbflow.core.launchers import claim_job
from ebbflow.core.store import Store
claim = claim_job(Store.open(sys.argv[1]), "mine", "run")
def leave(*_):
    claim.release()
    os._exit(75)
signal.signal(signal.SIGINT, leave)
put = claim._store.put
claim._store.put = lambda *words: (os.kill(os.getpid(), signal.SIGINT), put(*words))
claim.release()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, folder.uri], cwd=ROOT, timeout=WAIT_SECONDS
    )
    assert done.returncode == 75
    claim_job(folder, "mine", "run", say=pytest.fail).release()


def test_a_run_id_file_that_is_used_again_names_no_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run-id"
    file.write_text("171")
    words = ["train_flow.py", "resume", "--run-id-file", str(file)]
    monkeypatch.setattr(Launch, "listen", lambda launch: None)
    monkeypatch.setattr(options, "check_resume", lambda line: CheckedOptions(line.arguments))
    for name in ("ignore_lost_readers", "guard_terminal", "_set_environment"):
        monkeypatch.setattr(launcher, name, lambda **_: None)
    launch = launcher.prepare(words)
    assert file.read_text() == "" and launcher._read_run_id(file) == ""
    assert launch.line.argv == words


def test_of_several_launchers_at_the_same_moment_one_gets_the_job(folder: Store) -> None:
    elsewhere(folder, released=True)
    found: list[Claim] = []

    def try_it(_: int) -> str:
        try:
            found.append(claim_job(folder, "mine", "run"))
        except JobIsRunning:
            return "refused"
        return "claimed"

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(try_it, range(6))) == ["claimed", *["refused"] * 5]
    found[0].release()


def test_a_live_claim_is_renewed_and_judged_by_the_stores_clock(
    folder: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = claim_job(folder, "mine", "run")
    wait_until("a renewal", lambda: claim.launcher.renewals > 0, timeout=WAIT_SECONDS)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86400)
    assert running_launcher(folder) is not None
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    found = running_launcher(folder)
    assert found is not None and found.heartbeat_age_seconds < launchers.STALE_SECONDS
    claim.release()


def test_a_store_that_ignores_the_condition_still_fences_one_of_two(folder: Store) -> None:
    fenced = threading.Event()
    claim = claim_job(folder, "mine", "run", on_fenced=fenced.set)
    folder.put(launcher_key(1), replace(claim.launcher, id="other", command="resume").to_json())
    assert fenced.wait(WAIT_SECONDS)
    assert claim.fenced_by is not None and claim.fenced_by.id == "other"
    claim.release()
    assert running_launcher(folder) is not None, "the other one's claim is left as it is"


def test_a_running_job_is_reported_as_running_and_not_as_lost(
    folder: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Store.open(f"{folder.uri}/jobs/mine")
    with EventLog(job, Origin(job="mine", run="171", process="plan")) as log:
        log.emit(PLAN, started_utc=1.0)
    where = ["report", "mine", "--store", folder.uri]
    assert cost_main([*where, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["outcome"], before["exit_code"], before["running"]) == ("interrupted", 75, None)

    claim = claim_job(job, "mine", "run")
    assert cost_main([*where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] is None and found["exit_code"] is None
    assert (found["running"]["host"], found["running"]["pid"]) == (
        socket.gethostname(),
        os.getpid(),
    )
    assert cost_main(where) == 0
    text = capsys.readouterr().out
    page = render_html(RunReport.from_json(found))
    for shown in (" ".join(text.replace("│", " ").split()), page):
        assert f"running since {claim.launcher.since} on host {socket.gethostname()}" in shown
        assert "all figures are so far" in shown
        assert "resume" not in shown and "interrupted" not in shown
    assert load_report("mine", store=folder.uri).state == "starting"

    with EventLog(job, Origin(job="mine", run="1", generation=1, rank=0)) as log:
        log.emit(OUTCOME, outcome="completed")
    Store.open(job.uri).put("report.json", json.dumps(before).encode())
    whole = load_report("mine", store=folder.uri)
    assert (whole.state, whole.outcome) == ("completed", "completed"), (
        "only the report is left to be written"
    )
    job.delete("report.json")
    for path in (folder.local_path("jobs/mine/events/000001") or Path()).iterdir():
        path.unlink()

    claim.release()
    assert cost_main([*where, "--csv"]) == 0
    assert ",interrupted," in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["report", "mine"], ["plan", str(ROOT / "ebbflow/configs" / "laptop.yaml")]]
)
def test_a_reader_that_leaves_ends_a_command_of_cost_quietly(
    words: list[str], folder: Store
) -> None:
    with EventLog(
        Store.open(f"{folder.uri}/jobs/mine"), Origin(job="mine", run="1", process="plan")
    ) as log:
        log.emit(PLAN, started_utc=1.0)
    if words[0] == "report":
        store = ["--store", folder.uri]
    else:
        store = ["--set", f"store={folder.uri}"]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cost", *words, *store]
    done = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("module", ["cost", "infra"])
def test_an_interrupted_command_ends_with_75_and_one_word(
    module: str, number: int, tmp_path: Path
) -> None:
    words = {"cost": ["plan"], "infra": ["preflight"]}[module]
    fifo = tmp_path / "never.yaml"
    os.mkfifo(fifo)  # reading the configuration waits
    command = [sys.executable, "-m", module, *words, str(fifo)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_until("its signal handlers", lambda: catches(process.pid, signal.SIGHUP))
        process.send_signal(number)
        assert process.communicate(timeout=WAIT_SECONDS)[0] == "interrupted\n"
        assert process.returncode == 75
    finally:
        process.kill()
        process.wait()


def test_the_report_of_a_passed_preflight_and_no_plan_is_interrupted() -> None:
    passed = {"id": "memory", "status": "passed", "severity": "error"}
    with_check = partial(
        Event, job="mine", run="1", attempt=0, generation=0, node=0, rank=-1, step=None, t_mono=0.0
    )
    assert (
        build_report([with_check(name=PREFLIGHT, t_wall=1.0, data={"results": [passed]})]).exit_code
        == 75
    )
    failed = {**passed, "status": "failed"}
    assert (
        build_report([with_check(name=PREFLIGHT, t_wall=1.0, data={"results": [failed]})]).exit_code
        == 3
    )


def test_output_without_a_reader_is_dropped_and_the_launcher_continues(tmp_path: Path) -> None:
    program = (
        "from ebbflow.core.process import ignore_lost_readers; ignore_lost_readers(); import "
        "sys, time\n"
    )
    program += (
        "for each in range(3): print('x' * 100000, flush=True)\nprint('done', file=sys.stderr)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "done\n")


def catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_run_whose_job_was_taken_over_ends_no_batch_job_and_writes_no_report(
    folder: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(name="mine", run="1", config=RunConfig(store=folder.uri))
    with job.events("submit") as log:
        log.emit(BATCH_SUBMITTED, job_id="x-1", job_name="train", step="train_node", task="5")
    former = elsewhere(job.store, id="former")
    monkeypatch.setenv(launchers.RUN_CLAIM_VARIABLE, former.id)
    asked: list[object] = []
    client = SimpleNamespace(meta=SimpleNamespace(region_name="us-east-1"))
    monkeypatch.setattr(
        settlement, "describe_attempts", lambda job_ids, *_, **__: asked.append(job_ids) or {}
    )
    with job.events("settle") as log:
        assert settlement.settle_attempts(job, read_events(job.store), client, log) == []
    assert asked == [["x-1"]]

    elsewhere(job.store, number=2, id="successor")
    with (
        job.events("settle") as log,
        pytest.raises(JobIsRunning, match="job mine was taken over: `run` of ann"),
    ):
        settlement.settle_attempts(job, read_events(job.store), client, log)
    monkeypatch.setattr(reporting, "write_report", pytest.fail)
    monkeypatch.setattr(Job, "remember", lambda job: None)
    assert finish.finish_job(job, 1, time.time(), asked=False) == 75
    assert "job mine was taken over" in capsys.readouterr().err and asked == [["x-1"]]


def test_a_run_that_was_asked_to_leave_after_its_last_step_is_no_failure(
    folder: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.flows.job.RUNS", tmp_path / "runs")
    job = Job(name="mine", run="1", config=RunConfig(store=folder.uri))
    started = time.time() - 1
    origin = Origin(job="mine", run="1", generation=1)
    with EventLog(job.store, replace(origin, process="agent")) as log:
        log.emit(GENERATION_STARTED, nodes=1, processes_per_node=1, parent_step=0)
        log.emit(NODE_STARTED, ranks=[0], host="here")
    with EventLog(job.store, replace(origin, rank=0)) as log:
        log.emit(STEP, step=1, loss=1.0, seconds={"useful_step": 1e-6}, tokens=8)
    assert finish.finish_job(job, 75, started, asked=True) == 75
    with EventLog(job.store, replace(origin, rank=0, process="end")) as log:
        log.emit(OUTCOME, outcome="completed", step=1)
    (job.folder / "report.json").unlink()
    assert finish.finish_job(job, 75, started, asked=True) == 0

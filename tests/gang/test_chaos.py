"""Faults on purpose, and the judge of what is said about them.

That the judge can find fault is the point.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.chaos.fault import Aim, Symptom
from benchmarks.chaos.hooks import HOOKS
from benchmarks.chaos.kinds import FAULTS
from benchmarks.chaos.orders import Order, Orders, Strike
from benchmarks.chaos.proxy import Conduct, FaultProxy
from benchmarks.chaos.scene import Scene
from benchmarks.chaos.trial import Injection, Trial, run_trial
from benchmarks.training.survival.campaign import Campaign, Judged, Planned
from benchmarks.training.survival.commands import main
from benchmarks.training.survival.figures import survival_figures
from benchmarks.training.survival.judge import Finding, judge
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import FAULT_DETECTED, GENERATION_ENDED, STEP, Event
from ebbflow.training.errors import CheckpointError
from ebbflow.training.launch.messages import GangOutcome

SLEEPER = Aim(node=1, rank=1, number=0)

QUIET = GangOutcome(
    outcome=Outcome.COMPLETED, step=90, message="", weights_sha256="aa", generation=1
)


def test_an_order_is_carried_out_once_and_by_its_rank_alone(tmp_path: Path) -> None:
    outside = Orders(tmp_path)
    inside = Orders(tmp_path)
    outside.give(1, Order(hook="slow", number=7, settings={"seconds": 1.5}))
    assert inside.take(0) is None
    order = inside.take(1)
    assert order == Order(hook="slow", number=7, settings={"seconds": 1.5})
    assert inside.take(1) is None and outside.struck(7) is None
    inside.strike(order, step=3)
    struck = outside.struck(7)
    assert struck is not None and struck.step == 3
    outside.give(0, order)
    assert outside.withdraw(0) and inside.take(0) is None


def test_every_kind_says_what_must_come_of_it() -> None:
    assert len(FAULTS) >= 15
    for fault in FAULTS.values():
        assert fault.what and fault.action and fault.limit_seconds > 0
        assert fault.reasons or fault.symptom is Symptom.NOTHING
        if fault.where:
            assert fault.where.removeprefix("in ") in HOOKS


def test_a_gang_that_does_not_come_back_ends_its_trial_and_no_other() -> None:
    scene = SimpleNamespace(
        spec=SimpleNamespace(job="job-1"),
        gang=None,
        running=False,
        starts=99,
        newest_commit=str,
        close=lambda: None,
    )
    faults = [(FAULTS["rank-kill"], SLEEPER)]
    trial = run_trial(cast(Scene, scene), faults, ignore)
    assert trial.outcome is None and trial.left == faults and trial.starts == 99
    assert "started 99 times without an end" in trial.errors[-1]


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that says back what it is told."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                    while data := peer.recv(1024):
                        peer.sendall(data)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "conduct", [Conduct.PASS, Conduct.DELAY, Conduct.BLACKHOLE, Conduct.DROP, Conduct.RESET]
)
def test_the_proxy_does_to_a_connection_what_it_is_told(conduct: Conduct, echo: int) -> None:
    proxy = FaultProxy([("127.0.0.1", 9), ("127.0.0.1", echo)], delay_seconds=0.05)
    try:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as peer:
            peer.sendall(b"before")
            assert peer.recv(1024) == b"before"
            proxy.conduct = conduct
            if conduct in (Conduct.PASS, Conduct.DELAY):
                peer.sendall(b"after")
                assert peer.recv(1024) == b"after"
            elif conduct is Conduct.BLACKHOLE:
                peer.sendall(b"after")
                peer.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    peer.recv(1024)
            elif conduct is Conduct.DROP:
                assert peer.recv(1024) == b""
            else:
                with pytest.raises(ConnectionResetError):
                    peer.recv(1024)
    finally:
        proxy.close()


def told(
    name: str, seconds: float, *, generation: int, step: int | None = None, **data: object
) -> Event:
    return Event(
        name=name,
        job="job",
        run="run",
        attempt=0,
        generation=generation,
        node=0,
        rank=0,
        step=step,
        t_wall=seconds,
        t_mono=seconds,
        data=dict(data),
    )


def story(culprit: str, **verdict: object) -> tuple[Trial, list[Event]]:
    """Rank 1 falls asleep at 10 s, after step 20; the verdict comes at 14 s, step 19 is done again
    at 16 s.
    """
    injection = Injection(
        fault=FAULTS["sleep"], aim=SLEEPER, strike=Strike(t_wall=10.0, t_mono=10.0, step=21)
    )
    events = [
        told(STEP, 9.9, generation=1, step=20),
        told(FAULT_DETECTED, 14.0, generation=1, culprit=culprit, **verdict),
        told(GENERATION_ENDED, 14.1, generation=1, reason="hang"),
        *(
            told(STEP, seconds, generation=2, step=step)
            for step, seconds in ((19, 16.0), (20, 16.1), (21, 16.2))
        ),
    ]
    return Trial(injections=[injection]), events


def test_a_verdict_is_judged_by_rank_place_reason_and_time() -> None:
    trial, events = story("rank 1: no progress", where="training/rehearse.py:9 in asleep", rank=1)
    [found] = judge(trial, events)
    assert (found.guilty, found.place, found.reason, found.in_time) == (True, True, True, True)
    assert (found.verdict_seconds, found.back_seconds) == (4.0, 6.0)
    assert found.caught_up_seconds == pytest.approx(6.2)
    assert survival_figures([found])["all"]["guilty"] == {"right": 1, "of": 1}


@pytest.mark.parametrize(
    ("culprit", "verdict", "wrong"),
    [
        ("rank 0: no progress", {}, {"guilty", "place"}),
        ("rank 1: no progress", {"where": "training/step_sync.py:9 in exchange"}, {"place"}),
        (
            "rank 1: no progress",
            {"where": "training/rehearse.py:9 in asleep", "reason": "rank_failed"},
            {"reason"},
        ),
    ],
)
def test_a_wrong_verdict_is_found_out(
    culprit: str, verdict: dict[str, str], wrong: set[str]
) -> None:
    trial, events = story(culprit, **verdict)
    [found] = judge(trial, events)
    assert {
        name for name in ("guilty", "place", "reason", "in_time") if not getattr(found, name)
    } == wrong


def test_silence_is_neither_right_nor_in_time_and_a_verdict_on_the_innocent_is_a_false_kill() -> (
    None
):
    trial, events = story("rank 1: no progress")
    [found] = judge(trial, [event for event in events if event.name == STEP])
    assert (found.guilty, found.in_time, found.verdict_seconds) == (False, False, None)
    patient = replace(trial.injections[0], fault=FAULTS["slow-step"])
    [found] = judge(Trial(injections=[patient]), events)
    assert found.false_kill and found.guilty is None


@pytest.mark.parametrize(
    ("kinds", "guilty", "places"),
    [
        (["extra-collective", "node-kill-at-step", "store-away"], 2, 1),
        pytest.param(
            ["extra-collective", "memory-limit", "node-kill-at-step", "rank-kill", "store-away"],
            4,
            2,
            marks=pytest.mark.long,
        ),
    ],
)
def test_gangs_under_faults_name_the_guilty_and_end_with_the_weights_of_the_quiet_one(
    tmp_path: Path, kinds: list[str], guilty: int, places: int
) -> None:
    path = tmp_path / "figures.json"
    arguments = [
        "--injections",
        str(len(kinds)),
        "--kinds",
        ",".join(kinds),
        "--step-seconds",
        "0.02",
    ]
    assert main([*arguments, "--json", str(path), "--folder", str(tmp_path)]) == 0
    figures = json.loads(path.read_text())
    assert (
        figures["kind"] == "measured"
        and figures["different_weights"] == []
        and figures["jobs"] == 1
    )
    assert sorted(figures["kinds"]) == kinds
    assert figures["all"]["guilty"] == figures["all"]["reason"] == {"right": guilty, "of": guilty}
    assert figures["all"]["place"] == {"right": places, "of": places}
    assert figures["all"]["back_seconds"]["count"] == guilty


def planned(*kinds: str) -> Planned:
    return [(FAULTS[kind], Aim(node=1, rank=1, number=number)) for number, kind in enumerate(kinds)]


def campaign(
    tmp_path: Path, job: Callable[[Campaign, str, Planned], Judged], told: list[int]
) -> Campaign:
    config = RunConfig(store=str(tmp_path / "store"))

    def keep(campaign: Campaign) -> None:
        told.append(len(campaign.findings))

    return Campaign(config=config, folder=tmp_path, per_job=2, tell=ignore, keep=keep, job=job)


def ignore(_line: str) -> None:
    return None


def taken(batch: Planned, *, left: int = 0, weights: str = "aa") -> Judged:
    """A job that takes all but the last `left` of its faults."""
    done = batch[: len(batch) - left]
    trial = Trial(
        injections=[Injection(fault=fault, aim=aim, strike=Strike.now()) for fault, aim in done],
        left=batch[len(done) :],
        outcome=replace(QUIET, weights_sha256=weights),
    )
    findings = []
    for fault, _ in done:
        findings.append(
            Finding(
                kind=fault.kind,
                target="",
                step=1,
                verdict_seconds=1.0,
                back_seconds=2.0,
                caught_up_seconds=2.0,
                guilty=True,
                place=True,
                reason=True,
                in_time=True,
                false_kill=False,
                overdue=False,
                said="",
            )
        )
    return trial, findings


def test_faults_that_a_job_could_not_take_are_done_by_the_next(tmp_path: Path) -> None:
    jobs: list[list[str]] = []
    told: list[int] = []

    def job(_: Campaign, name: str, batch: Planned) -> Judged:
        jobs.append([fault.kind for fault, _ in batch])
        if name == "job-2":
            raise CheckpointError("the job's events cannot be read")
        return taken(batch, left=int(name == "job-1"))

    bench = campaign(tmp_path, job, told)
    bench.run(planned("rank-kill", "sleep", "exception"))
    assert jobs == [[], ["rank-kill", "sleep"], *[["sleep", "exception"]] * 2]
    assert [finding.kind for finding in bench.findings] == ["rank-kill", "sleep", "exception"]
    assert bench.wrong == [] and told == [1, 1, 3], "figures are handed out after each job"


def test_a_fault_that_cannot_be_done_is_told_and_the_others_are_done(tmp_path: Path) -> None:
    def job(_: Campaign, name: str, batch: Planned) -> Judged:
        if batch and batch[0][0].kind == "sleep":
            return Trial(left=list(batch), errors=["nobody sleeps here"]), []
        return taken(batch, weights="bb" if name == "job-4" else "aa")

    bench = campaign(tmp_path, job, [])
    bench.run(planned("rank-kill", "rank-stop", "sleep", "exception", "busy-loop"))
    assert [found.kind for found in bench.findings] == [
        "rank-kill",
        "rank-stop",
        "exception",
        "busy-loop",
    ]
    assert "sleep was not done in 2 jobs: ['nobody sleeps here']" in bench.wrong[0]
    assert len(bench.wrong) == 2 and bench.wrong[1].startswith("job-4 ended with"), (
        "other weights are told"
    )


def test_a_machine_that_takes_no_job_ends_the_bench(tmp_path: Path) -> None:
    def job(_: Campaign, _name: str, batch: Planned) -> Judged:
        if not batch:
            return taken(batch)
        return (Trial(left=list(batch), errors=["no steady steps"]), [])

    bench = campaign(tmp_path, job, [])
    bench.run(planned(*["rank-kill"] * 500))
    assert (
        bench.jobs == 5
        and "faults were not done, since 5 jobs in a row took none" in bench.wrong[-1]
    )

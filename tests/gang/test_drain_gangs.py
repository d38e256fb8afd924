"""Real gangs that are given notices at the moments that suit them least; each leaves its work
behind, and goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ebbflow.core.events import GENERATION_ENDED, NOTICE, STAGED, STEP, Event, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.infra.notices import rehearse_notice
from ebbflow.training.checkpoint import reachable_commits
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.heartbeat import Heartbeat, HeartbeatReading
from ebbflow.training.launch.messages import GangOutcome, GangSpec
from tests.support.flow import wait_until
from tests.support.gangs import endless_gang, with_settings

NOTICE_SECONDS = 50.0


class Job:
    """One job over several starts. spec: of the next one."""

    def __init__(self, spec: GangSpec, folder: Path) -> None:
        self.spec = spec
        self._folder = folder
        self.store = Store.open(spec.store_uri).sub(job_prefix(spec.job))

    def start(self) -> LocalGang:
        known = set(self.ranks())
        gang = LocalGang(
            self.spec, self._folder / f"start-{self.spec.attempt}", self._folder / "output.log"
        )
        self.spec = replace(self.spec, attempt=self.spec.attempt + 1)
        wait_until("its ranks", lambda: set(self.ranks()) - known, timeout=60)
        return gang

    def ranks(self) -> list[Path]:
        return sorted(Path(self.spec.log_folder).glob("*/rank-0.heartbeat"))

    def await_beat(self, wanted: Callable[[HeartbeatReading], bool]) -> HeartbeatReading:
        return wait_until(
            "a beat",
            lambda: (beat := Heartbeat(self.ranks()[-1]).read()) if self._wanted(wanted) else None,
            timeout=60,
        )

    def _wanted(self, wanted: Callable[[HeartbeatReading], bool]) -> bool:
        return wanted(Heartbeat(self.ranks()[-1]).read())

    def notify(self, node: int) -> None:
        rehearse_notice(self.notice_path(node), action="terminate", seconds=NOTICE_SECONDS)

    def notice_path(self, node: int) -> Path:
        return Path(self.spec.log_folder) / f"notice-node-{node}.json"

    def events(self, name: str, generation: int | None = None) -> list[Event]:
        found = [event for event in read_events(self.store) if event.name == name]
        return [event for event in found if generation in (None, event.generation)]

    @property
    def saved_step(self) -> int:
        return reachable_commits(self.store, limit=1)[0].step


def spec_of(folder: Path, **sections: dict) -> GangSpec:
    survival = {"notice_file": str(folder / "metaflow"), **sections.pop("survival", {})}
    return endless_gang(folder, survival=survival, **sections)


def assert_left(outcome: GangOutcome, job: Job) -> None:
    """Every step that was taken is in the newest commit."""
    assert outcome.outcome == "interrupted"
    assert outcome.step == job.saved_step
    assert outcome.message.endswith("; saved, to be resumed")


def test_several_in_an_evaluation_then_one_before_the_first_step_then_one_between_generations(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path, checkpoint={"interval_steps": 1000})
    job = Job(with_settings(spec, training={"evaluation_interval_steps": 5}), tmp_path)
    gang = job.start()
    # It comes to its end; then all leave after the next step
    job.await_beat(lambda beat: beat.phase == "evaluation")
    job.notify(1)
    (tmp_path / "metaflow").write_text(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 40))
    )
    gang.agents[0].send_signal(signal.SIGTERM)
    assert_left(gang.wait(60), job)
    heard = {(event.node, event.data["source"]) for event in job.events(NOTICE)}
    assert (0, "signal") in heard and len(job.events(GENERATION_ENDED)) == 1
    (tmp_path / "metaflow").unlink()

    gang = job.start()
    saved = job.saved_step
    job.notify(0)
    outcome = gang.wait(60)
    assert_left(outcome, job)
    assert outcome.step == saved and job.events(STEP, generation=2) == []
    assert outcome.message.startswith("asked to leave (rehearsed notice to node 0)")

    gang = job.start()
    beat = job.await_beat(lambda beat: beat.step > saved + 20)
    os.kill(beat.pid, signal.SIGKILL)
    wait_until(
        "the news of it",
        lambda: "killed by SIGKILL" in (tmp_path / "output.log").read_text(),
        timeout=20,
    )
    job.notify(0)
    error = None
    try:
        outcome = gang.wait(60)
    except Exception as ended:
        error = ended
    # Between two generations no other one is begun; of one that has begun no rank takes a step.
    assert getattr(error, "outcome", outcome.outcome) == "interrupted"
    assert job.events(STEP, generation=4) == [] and job.saved_step == saved


def test_a_rebalance_recommendation_saves_and_a_notice_hurries_that_save(tmp_path: Path) -> None:
    """At its cap the save under way would take longer than the notice gives."""
    job = Job(
        spec_of(tmp_path, checkpoint={"upload_mib_per_second": 0.005, "interval_steps": 1_000_000}),
        tmp_path,
    )
    gang = job.start()
    job.await_beat(lambda beat: beat.step > 10)
    rehearse_notice(job.notice_path(0), action="rebalance", seconds=float("inf"))
    staged = wait_until("a save", lambda: job.events(STAGED), timeout=30)[0].step
    assert staged is not None and staged > 10 and not job.store.list("commits")
    job.await_beat(lambda beat: beat.step > staged + 5)
    job.notify(1)
    assert_left(gang.wait(60), job)

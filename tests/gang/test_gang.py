"""Whole gangs of real ranks without Metaflow: who is blamed for a hang, and what is not worth a
second try.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.events import (
    COMMIT_SKIPPED,
    FAULT_DETECTED,
    GENERATION_ENDED,
    NODE_ENDED,
    NODE_STARTED,
    read_events,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import all_processes, children, process_state
from ebbflow.core.store import Store
from ebbflow.core.terms import Fallback, Terms
from ebbflow.training.checkpoint import reachable_commits
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.heartbeat import Heartbeat, HeartbeatReading
from ebbflow.training.launch.messages import GangSpec
from tests.support.flow import listening_addresses, wait_until
from tests.support.gangs import endless_gang, free_port, with_settings


@pytest.fixture
def spec(tmp_path: Path) -> GangSpec:
    return endless_gang(
        tmp_path,
        checkpoint={"interval_steps": 20},
        cluster={"step_deadline_seconds": 60.0, "start_deadline_seconds": 60.0},
        metrics={"port": free_port()},
    )


def start(spec: GangSpec, folder: Path) -> LocalGang:
    return LocalGang(spec, folder, folder.parent / "output.log")


def job_store(spec: GangSpec) -> Store:
    return Store.open(spec.store_uri).sub(job_prefix(spec.job))


def newest_commit(spec: GangSpec) -> CommitRef:
    return reachable_commits(job_store(spec), limit=1)[0]


def beat(spec: GangSpec, rank: int) -> HeartbeatReading:
    """Of the newest generation."""
    return Heartbeat(max(Path(spec.log_folder).glob(f"0*/rank-{rank}.heartbeat"))).read()


def with_descendants(gang: LocalGang) -> list[int]:
    """All processes of the gang, the agents first."""
    found = [agent.pid for agent in gang.agents]
    parents = {process.pid: process.parent for process in all_processes()}
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def await_commit(spec: GangSpec) -> None:
    wait_until("a commit", lambda: job_store(spec).list("commits"), timeout=60)


def test_a_gang_survives_a_pause_a_frozen_and_a_killed_rank_and_saves_at_a_notice(
    spec: GangSpec, tmp_path: Path
) -> None:
    """The pause is as of a frozen virtual machine: longer than a node may be silent, and than a
    rank may make no progress. It is nobody's fault. A frozen or killed rank is named, ended and
    replaced within the attempt.
    """
    spec = with_settings(spec, survival={"hang_floor_seconds": 6.0})
    gang = start(spec, tmp_path / "gang")
    await_commit(spec)
    listening = listening_addresses(with_descendants(gang))
    assert listening == {"0100007F"}, (
        "control channel, torch's store, gloo, wire, metrics: 127.0.0.1 alone"
    )
    wait_until("the secret's end", lambda: not job_store(spec).list("secrets"), timeout=60)

    frozen = with_descendants(gang)
    assert len(frozen) >= 6  # two agents, two ranks and their uploaders
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in frozen:  # the agents go on first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(10 if number == signal.SIGSTOP else 0)
    before = newest_commit(spec).step
    wait_until("two commits more", lambda: newest_commit(spec).step >= before + 40, timeout=120)
    assert newest_commit(spec).generation == 1

    for generation, number in ((2, signal.SIGSTOP), (3, signal.SIGKILL)):
        victim = beat(spec, rank=1)
        os.kill(victim.pid, number)
        wait_until(
            "another commit",
            lambda wanted=generation: newest_commit(spec).generation == wanted,
            timeout=60,
        )
        assert process_state(victim.pid) in ("", "Z")
        assert beat(spec, rank=1).pid != victim.pid and all(
            agent.poll() is None for agent in gang.agents
        )

    gang.agents[1].send_signal(signal.SIGTERM)
    outcome = gang.wait(60)
    assert (outcome.outcome, outcome.generation) == ("interrupted", 3)
    assert outcome.message == "asked to leave (SIGTERM); saved, to be resumed"
    assert newest_commit(spec).step == outcome.step

    events = read_events(job_store(spec))
    assert not [event for event in events if event.name == COMMIT_SKIPPED]
    *faults, _ = [event for event in events if event.name == GENERATION_ENDED]
    detections = [event for event in events if event.name == FAULT_DETECTED]
    for ended, detected, reason in zip(faults, detections, ("hang", "rank_killed"), strict=True):
        assert ended.data["reason"] == reason and not ended.data["user_code"]
        assert ended.data["culprit"].startswith("rank 1: ")
        told = detected.data
        assert (told["rank"], told["node"], told["reason"], told["certainty"]) == (
            1,
            1,
            reason,
            "proven",
        )
        assert (
            detected.t_mono < ended.t_mono and told["lost_rank_seconds"] > 0 and told["next_action"]
        )
    told = detections[0].data
    assert (
        ".py:" in told["where"]
        and told["where"].partition(" in ")[2] in Path(told["dump"]).read_text()
    )
    # All of an agent's life is paid for once: one generation begins where the other ends
    for node in (0, 1):
        *ends, _ = [event for event in events if event.name == NODE_ENDED and event.node == node]
        starts = [event for event in events if event.name == NODE_STARTED and event.node == node]
        for before, ended, after in zip(starts[:-1], ends, starts[1:], strict=True):
            assert before.t_mono + ended.data["seconds"] == pytest.approx(after.t_mono, abs=1e-6)
            assert ended.t_mono == after.t_mono


def test_a_gang_leaves_spot_if_a_restart_of_its_ranks_would_break_the_guarantee(
    spec: GangSpec, tmp_path: Path
) -> None:
    reserve = Fallback(
        seconds=60, restart_seconds=4000, restart_usd=0, step_seconds=0, usd=0, step_usd=0
    )
    terms = Terms(usd_per_rank_second=0.001, deadline_utc=time.time() + 3600, fallback=reserve)
    gang = start(replace(spec, terms=terms), tmp_path / "gang")
    await_commit(spec)
    os.kill(beat(spec, rank=1).pid, signal.SIGKILL)
    outcome = gang.wait(60)
    assert outcome.outcome == "interrupted" and outcome.generation == 2
    assert (
        "leaves Spot for on-demand" in outcome.message
        and "finishing on demand may take 1.13 h" in outcome.message
    )


def test_a_preempted_node_without_time_to_save_reports_it(spec: GangSpec, tmp_path: Path) -> None:
    """Of 2 s nothing is left for a save: that long a process takes to end."""
    spec = with_settings(spec, checkpoint={"stop_seconds": 2.0})
    gang = start(spec, tmp_path / "gang")
    await_commit(spec)
    gang.agents[1].send_signal(signal.SIGTERM)
    outcome = gang.wait(60)
    assert outcome.outcome == "interrupted"
    newest = newest_commit(spec)
    assert 0 < newest.step < outcome.step and newest.step % 20 == 0
    assert outcome.message.endswith(
        f"step {outcome.step} is not saved, to be resumed from step {newest.step}"
    )
    skipped = [event for event in read_events(job_store(spec)) if event.name == COMMIT_SKIPPED]
    [reason] = [event.data["reason"] for event in skipped if event.step == outcome.step]
    assert reason.endswith("and 0.0 s are left; the last commit counts")


def test_a_frozen_coordinator_is_seen_by_the_others_which_leave(
    spec: GangSpec, tmp_path: Path
) -> None:
    gang = start(with_settings(spec, survival={"hang_floor_seconds": 6.0}), tmp_path / "gang")
    await_commit(spec)
    gang.agents[0].send_signal(signal.SIGSTOP)
    try:
        gang.agents[1].wait(60)
    finally:
        gang.kill()
    told = json.loads((tmp_path / "gang" / "node-1.result.json").read_text())
    assert "node 0 was lost: silent for 6 s" in told["error"] and told["curable"]


def test_a_frozen_rank_does_not_outlive_its_agent(spec: GangSpec, tmp_path: Path) -> None:
    gang = start(spec, tmp_path / "gang")
    [keeper] = wait_until("the keeper", lambda: children(gang.agents[1].pid), timeout=30)
    [standby] = wait_until("what forks the ranks", lambda: children(keeper), timeout=30)
    [rank] = wait_until("rank 1", lambda: children(standby), timeout=60)
    for pid in (rank, standby):
        os.kill(pid, signal.SIGSTOP)
    gang.kill()
    pids = (rank, standby, keeper)
    wait_until(
        "the end of all", lambda: {process_state(pid) for pid in pids} <= {"", "Z"}, timeout=30
    )


def test_a_job_that_cannot_continue_is_refused_by_all_nodes_without_a_retry(
    spec: GangSpec, tmp_path: Path
) -> None:
    """Another model than the commits'; and a damaged record, at which the other nodes have not
    joined yet: node 0 reads the store before anything else.
    """
    first = start(spec, tmp_path / "first")
    await_commit(spec)
    first.kill()
    other = with_settings(spec, model={"hidden_size": 48})
    second = start(replace(other, attempt=1), tmp_path / "second")
    with pytest.raises(GangError, match=r"32.*48|48.*32") as error:
        second.wait(60)
    assert not error.value.curable and error.value.outcome == "config"

    record = (
        Path(spec.store_uri) / job_prefix(spec.job) / job_store(spec).list("generations")[0].key
    )
    record.write_text('{"x":')
    patient = with_settings(spec, cluster={"start_deadline_seconds": 600.0})
    third = start(replace(patient, attempt=2), tmp_path / "third")
    with pytest.raises(GangError, match="generations/000001") as error:
        third.wait(120)
    assert not error.value.curable
    other = json.loads((tmp_path / "third" / "node-1.result.json").read_text())
    assert "generations/000001" in other["error"] and not other["curable"], (
        "of node 0, or read by itself after that"
    )


def test_of_two_launchers_the_older_gives_way_for_good(spec: GangSpec, tmp_path: Path) -> None:
    older = start(spec, tmp_path / "older")
    await_commit(spec)
    newer = start(replace(spec, run="other"), tmp_path / "newer")
    with pytest.raises(GangError) as error:
        older.wait(60)
    assert not error.value.curable
    time.sleep(1)
    assert all(agent.poll() is None for agent in newer.agents), "the newer gang was disturbed"
    newer.kill()

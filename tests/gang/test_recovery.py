"""What the agents of a gang cure by themselves, and when they stop trying."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.events import (
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_STARTED,
    OUTCOME,
    read_events,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import children
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.cost.report.report import build_report
from ebbflow.training.checkpoint import reachable_commits
from ebbflow.training.errors import GangError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangSpec
from ebbflow.training.workload_loader import prepare_data, workload_context
from tests.support.crashing import CRASHES_AT_STEP
from tests.support.flow import wait_until
from tests.support.gangs import endless_gang

# Of the message: what stands before and after each number.
MONEY = (("$", " at the planned price"), ("which cost ", " rank-seconds"))


def gang(spec: GangSpec, folder: Path) -> LocalGang:
    return LocalGang(spec, folder / "gang", folder / "output.log")


def job_store(spec: GangSpec) -> Store:
    return Store.open(spec.store_uri).sub(job_prefix(spec.job))


def test_a_bug_in_three_starts_ends_the_job_and_reports_its_cost(
    tmp_path: Path,
) -> None:
    """Ranks are started cold here: what a standby does for them must not be needed."""
    terms = Terms(usd_per_rank_second=0.01)
    spec = endless_gang(tmp_path, survival={"standby": False})
    config = spec.config.model_copy(update={"workload": "tests.support.crashing:Crashing"})
    prepared = prepare_data(
        config, workload_context(config, Gang(), store=Store.open(spec.store_uri))
    )
    spec = replace(spec, config=config, prepared=prepared, terms=terms)
    with pytest.raises(GangError, match=r"the same failure 3 times \(ValueError") as error:
        gang(spec, tmp_path).wait(150)
    assert (
        error.value.outcome == "crash_loop"
        and error.value.outcome.exit_code == 6
        and not error.value.curable
    )
    events = read_events(job_store(spec))
    ended = [event.data for event in events if event.name == GENERATION_ENDED]
    assert len(ended) == 3 and len({end["fingerprint"] for end in ended}) == 1
    assert {end["reason"] for end in ended} == {"rank_failed"} and all(
        end["user_code"] for end in ended
    )
    [outcome] = [event.data for event in events if event.name == OUTCOME]
    assert (
        outcome["outcome"] == "crash_loop"
        and f"sample {(CRASHES_AT_STEP - 1) * 4 + 2}" in outcome["message"]
    )
    usd, rank_seconds = (
        float(outcome["message"].split(sign)[1].split(mark)[0]) for sign, mark in MONEY
    )
    assert usd == pytest.approx(0.01 * rank_seconds, abs=0.01) and usd > 0
    report = build_report(events)
    assert (report.outcome, report.exit_code, report.failures) == ("crash_loop", 6, 3)


def test_a_network_that_no_rank_has_is_not_tried_again(tmp_path: Path) -> None:
    spec = endless_gang(tmp_path)
    config = spec.config.model_copy(update={"workload": "tests.support.crashing:Unconnected"})
    prepared = prepare_data(
        config, workload_context(config, Gang(), store=Store.open(spec.store_uri))
    )
    spec = replace(spec, config=config, prepared=prepared)
    with pytest.raises(GangError, match="ip -br addr") as error:
        gang(spec, tmp_path).wait(150)
    assert error.value.outcome == "config" and not error.value.curable
    events = read_events(job_store(spec))
    assert len([event for event in events if event.name == GENERATION_STARTED]) == 1


def test_a_lost_node_is_done_without_where_enough_are_left_and_taken_in_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAFLOW_KUBERNETES_JOBSET_NAME", "js")  # whose Job replaces the node
    cluster = {"nodes": 3, "min_nodes": 2, "start_deadline_seconds": 60.0}
    checkpoint = {"interval_steps": 10}
    kubernetes = {"node_replacements": 1}
    spec = replace(
        endless_gang(tmp_path, checkpoint=checkpoint, cluster=cluster, kubernetes=kubernetes),
        nodes=3,
    )
    running = gang(spec, tmp_path)
    wait_until("a commit", lambda: reachable_commits(job_store(spec), limit=1), timeout=60)
    running.agents[1].kill()
    wait_until(
        "a commit of the others",
        lambda: reachable_commits(job_store(spec), limit=1)[0].generation == 2,
        timeout=60,
    )
    lost = running.agents_by_node[1]
    running.agents_by_node[1] = subprocess.Popen(lost.args)
    wait_until(
        "a commit of all",
        lambda: reachable_commits(job_store(spec), limit=1)[0].generation == 3,
        timeout=60,
    )
    running.agents[2].send_signal(signal.SIGTERM)
    outcome = running.wait(60)
    assert (outcome.outcome, outcome.generation) == ("interrupted", 3)
    late = subprocess.run(lost.args, timeout=60)
    told = json.loads((tmp_path / "gang" / "node-1.result.json").read_text())
    assert (
        late.returncode == 1
        and "ended before this node joined" in told["error"]
        and not told["curable"]
    )

    events = read_events(job_store(spec))
    [ended] = [
        event.data for event in events if event.name == GENERATION_ENDED and event.generation == 1
    ]
    assert ended["reason"] == "node_lost" and ended["culprit"].startswith("node 1 ")
    begun = {
        event.generation: event.data["nodes"]
        for event in events
        if event.name == GENERATION_STARTED
    }
    assert begun == {1: 3, 2: 2, 3: 3}
    [grown] = [
        event.data for event in events if event.name == GENERATION_STARTED and event.generation == 3
    ]
    [left] = [
        event.data for event in events if event.name == GENERATION_ENDED and event.generation == 2
    ]
    assert (left["reason"], left["culprit"]) == ("interrupted", "")
    assert (
        grown["parent_step"] > 0
        and build_report(events).redone_steps
        == build_report([event for event in events if event.generation < 3]).redone_steps
    ), "growing redoes no step"
    ranks = [
        event.data["ranks"]
        for event in events
        if event.name == NODE_STARTED and event.generation == 2
    ]
    assert sorted(ranks) == [[0], [1]]


def test_a_rank_whose_standby_is_lost_comes_back(tmp_path: Path) -> None:
    spec = replace(endless_gang(tmp_path, checkpoint={"interval_steps": 10}), nodes=1)
    running = gang(spec, tmp_path)
    wait_until("a commit", lambda: reachable_commits(job_store(spec), limit=1), timeout=60)
    [keeper] = children(running.agents[0].pid)
    [standby] = children(keeper)
    os.kill(standby, signal.SIGKILL)
    wait_until(
        "a later commit",
        lambda: reachable_commits(job_store(spec), limit=1)[0].generation == 2,
        timeout=60,
    )
    running.agents[0].send_signal(signal.SIGTERM)
    assert running.wait(60).outcome == "interrupted"

"""What users may aim at their own job, what comes of it, and what is refused before it costs
anything.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ebbflow.core.events import FAULT_DETECTED, FAULT_INJECTED, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import reachable_commits
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.rehearse import KINDS, Fault, RehearsalError
from tests.support.flow import wait_until
from tests.support.gangs import endless_gang


@pytest.mark.parametrize(
    ("text", "step", "target"),
    [
        ("node-loss@60%", 60, (1, 2)),
        ("node-loss@step:7:node=0", 7, (0, 0)),
        ("rank-kill@12.5%", 13, (1, 3)),
        ("rank-kill@99%:rank=1", 99, (0, 1)),
        ("rank-kill@50%:node=0", 50, (0, 0)),
        ("notice@50%", 50, (1, 2)),
        ("notice@step:9:node=0:seconds=30", 9, (0, 0)),
        ("sleep@60%", 60, (1, 3)),
        ("uneven-steps@60%:node=0", 60, (0, 0)),
        ("slow-step@step:9:rank=1:seconds=2.5", 9, (0, 1)),
    ],
)
def test_a_fault_strikes_one_rank_at_one_step(
    text: str, step: int, target: tuple[int, int]
) -> None:
    fault = Fault.parse(text)
    fault.check(max_steps=100, nodes=2, world_size=4)
    assert fault.due_step(100) == step
    struck = [
        (rank // 2, rank)
        for rank in range(4)
        if fault.targets(node=rank // 2, rank=rank, nodes=2, world_size=4)
    ]
    assert struck == [target]
    assert Fault(**asdict(fault)) == fault
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node-loss", "not KIND@WHEN"),
        *(("meteor@60%", rf"kinds are\n(.*\n)*    {kind} ") for kind in KINDS),
        ("node-loss@60%:rank=1", "takes :node=N"),
        ("notice@60%:rank=1", "takes :node=N"),
        ("node-loss@60%:seconds=9", "takes no :seconds"),
        ("sleep@60%:seconds=9", "takes no :seconds"),
        ("rank-kill@100%", "not between 0% and 100%"),
        ("rank-kill@0%", "not between 0% and 100%"),
        ("rank-kill@step:100", "step 100 is not between 1 and training.max_steps - 1 = 99"),
        ("rank-kill@50%:rank=4", "there is no rank 4; the job has ranks 0 to 3"),
        ("node-loss@50%:node=2", "there is no node 2; the job has nodes 0 to 1"),
    ],
)
def test_a_fault_that_cannot_fire_is_refused(text: str, says: str) -> None:
    with pytest.raises(RehearsalError, match=says):
        Fault.parse(text).check(max_steps=100, nodes=2, world_size=4)


def test_a_rehearsal_that_needs_two_ranks_is_refused_for_one() -> None:
    with pytest.raises(RehearsalError, match="uneven-steps needs two ranks"):
        Fault.parse("uneven-steps@50%").check(max_steps=100, nodes=1, world_size=1)


def test_a_rehearsed_hang_is_named_and_does_not_come_again(tmp_path: Path) -> None:
    """Aimed at a job that knows nothing of it: the text model, as any user's would be."""
    survival = {"hang_floor_seconds": 3.0}
    spec = endless_gang(tmp_path, checkpoint={"interval_steps": 10}, survival=survival)
    gang = LocalGang(
        replace(spec, rehearse="sleep@step:15:rank=1"), tmp_path / "gang", tmp_path / "output.log"
    )
    store = Store.open(spec.store_uri).sub(job_prefix(spec.job))

    def passed_again() -> bool:
        newest = reachable_commits(store, limit=1)
        return bool(newest) and newest[0].generation == 2 and newest[0].step >= 20

    try:
        wait_until("a commit from behind the fault", passed_again, timeout=120)
        for agent in gang.agents:
            agent.send_signal(signal.SIGTERM)
        assert gang.wait(60).outcome == "interrupted"
    finally:
        gang.kill()
    events = read_events(store)
    [injected] = [event for event in events if event.name == FAULT_INJECTED]
    assert (injected.rank, injected.step, injected.data["kind"]) == (1, 15, "sleep")
    [verdict] = [event.data for event in events if event.name == FAULT_DETECTED]
    assert verdict["rank"] == 1 and verdict["where"].endswith(" in asleep")

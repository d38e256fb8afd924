"""What users may aim at their own job, and what is refused before it costs anything."""

from __future__ import annotations

import pytest

from training.rehearse import Fault, RehearsalError


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
    ],
)
def test_a_fault_strikes_one_rank_at_one_step(text: str, step: int, target: tuple[int, int]) -> None:
    fault = Fault.parse(text)
    fault.check(max_steps=100, nodes=2, world_size=4)
    assert [at for at in range(1, 101) if fault.due(at, 100)] == [step]
    struck = [(rank // 2, rank) for rank in range(4) if fault.targets(node=rank // 2, rank=rank, nodes=2, world_size=4)]
    assert struck == [target]
    assert Fault.from_json(fault.to_json()) == fault
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node-loss", "not KIND@WHEN"),
        ("meteor@60%", "kinds are node-loss"),
        ("node-loss@60%:rank=1", "takes :node=N"),
        ("notice@60%:rank=1", "takes :node=N"),
        ("node-loss@60%:seconds=9", "takes no :seconds"),
        ("rank-kill@100%", "not between 0% and 100%"),
        ("rank-kill@0%", "not between 0% and 100%"),
        ("rank-kill@step:100", "step 100 is not between 1 and training.max_steps - 1 = 99"),
        ("rank-kill@50%:rank=4", "there is no rank 4; the job has ranks 0 to 3"),
        ("node-loss@50%:node=2", "there is no node 2; the job has nodes 0 to 1"),
    ],
)
def test_a_fault_that_cannot_fire_is_refused(text: str, says: str) -> None:
    with pytest.raises(RehearsalError, match=says.replace("(", r"\(")):
        Fault.parse(text).check(max_steps=100, nodes=2, world_size=4)

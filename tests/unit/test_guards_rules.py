"""What guards decide, from numbers alone: spikes, odd replicas, slow ranks, growing memory, smaller
micro-batches.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbflow.core import process
from ebbflow.core.config.schema import GuardsConfig
from ebbflow.core.layout import commit_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import (
    FROM_SCRATCH,
    open_generation,
    reachable_commits,
    record_permits,
)
from ebbflow.training.checkpoint.lineage import NO_PARENT
from ebbflow.training.checkpoint.manifest import CheckpointId, Manifest
from ebbflow.training.checkpoint.verified_io import sha256_text
from ebbflow.training.engine.guards.guards import (
    Action,
    Judgement,
    LossGuard,
    LossScale,
    RobustWindow,
    find_divergent_ranks,
    weights_checksum,
)
from ebbflow.training.engine.guards.memory import (
    MemoryGrowthMonitor,
    is_out_of_memory,
)
from ebbflow.training.engine.guards.overrides import record_rewind, rewind_parent
from ebbflow.training.errors import NothingToRestore
from ebbflow.training.launch.watch import resident_bytes
from tests.support.rank_threads import call_in_process_group


def test_the_window_is_median_and_mad_of_the_last_values() -> None:
    drawn = random.Random(1)
    size = 30
    window = RobustWindow(size)
    values = []
    for _ in range(200):
        value = drawn.gauss(5.0, 1.0) * (40.0 if drawn.random() < 0.05 else 1.0)
        if 2 * len(values[-size:]) >= size:
            median = statistics.median(values[-size:])
            mad = statistics.median(abs(other - median) for other in values[-size:])
            assert window.z_score(value) == pytest.approx(
                max(0.0, (value - median) / (1.4826 * mad))
            )
        else:
            assert window.z_score(value) == 0.0, "too little is known"
        window.values.append(value)
        values.append(value)
    assert list(window.values) == values[-size:]


def test_equal_values_make_no_spike_of_the_next_rounding() -> None:
    window = RobustWindow(10, [2.0] * 10)
    assert window.z_score(2.0001) < 1 < 8 < window.z_score(2.1)


@pytest.mark.parametrize(
    ("known", "value", "score"),
    [
        ([], 9.0, 0.0),
        ([1.0, 2.0, 3.0, 4.0], 99.0, 0.0),  # less than half of the window
        ([1.0, 2.0, 3.0, 4.0, 5.0], 7.0, 4.0 / 1.4826),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.5, 0.5 / 1.4826),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 0.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1.0, 0.0),
        ([-2.0] * 5, -1.0, 1.0 / 0.002),  # a thousandth of the median
        ([0.0] * 5, 3e-12, 3.0),
    ],
)
def test_the_score_of_a_value_is_its_robust_distance_above_the_median(
    known: list[float], value: float, score: float
) -> None:
    assert RobustWindow(10, known).z_score(value) == pytest.approx(score, rel=1e-12)


def judged(guard: LossGuard, losses: list[float]) -> list[str]:
    return [
        guard.judge(
            loss=loss,
            gradient_norm=1.0,
            non_finite="" if math.isfinite(loss) else "loss is not finite on rank 0",
        ).action.value
        for loss in losses
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("stop", ["stop"]),
        ("skip", ["skip", "skip", "step", "skip", "skip", "rewind"]),
        ("rewind", ["rewind"]),
    ],
)
def test_a_non_finite_loss_stops_skips_or_rewinds(policy: str, expected: list[str]) -> None:
    guard = LossGuard(GuardsConfig(non_finite=policy, skips_in_a_row=2))
    assert judged(guard, [1.0] * 5) == ["step"] * 5
    assert (
        judged(guard, [math.nan, math.inf, 1.0, math.nan, math.nan, math.nan][: len(expected)])
        == expected
    )


def test_a_spike_is_left_out_and_not_remembered_and_a_fall_is_no_spike() -> None:
    guard = LossGuard(GuardsConfig(spike="skip", spike_window_steps=20))
    drawn = random.Random(2)
    assert set(judged(guard, [drawn.gauss(3.0, 0.1) for _ in range(20)])) == {"step"}
    assert judged(guard, [9.0, 0.1, 9.0, 3.0]) == ["skip", "step", "skip", "step"]
    assert 9.0 not in guard.to_json()["losses"]
    judgement = guard.judge(loss=3.0, gradient_norm=50.0, non_finite="")
    assert judgement.action is Action.SKIP and "gradient norm 50 is" in judgement.reason
    assert (
        LossGuard(GuardsConfig()).judge(loss=1e9, gradient_norm=1.0, non_finite="").action
        is Action.STEP
    )


def test_a_spike_is_larger_than_its_limit() -> None:
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]
    limit = RobustWindow(10, losses).z_score(9.0)
    for spike_z, action in ((limit, Action.STEP), (math.nextafter(limit, 0.0), Action.SKIP)):
        guard = LossGuard(GuardsConfig(spike="skip", spike_window_steps=10, spike_z=spike_z))
        assert judged(guard, losses) == ["step"] * 5
        assert guard.judge(loss=9.0, gradient_norm=1.0, non_finite="").action is action


def test_the_reason_of_a_spike_has_its_figures() -> None:
    guard = LossGuard(GuardsConfig(spike="skip", spike_window_steps=10, skips_in_a_row=1))
    for step in (1.0, 2.0, 3.0, 4.0, 5.0):
        guard.judge(loss=step, gradient_norm=2 * step, non_finite="")
    known = guard.to_json()
    reason = "loss 17.83 is 10.0 robust deviations (limit 8) above the median 3 of 5 steps"
    judgement = guard.judge(loss=3.0 + 10 * 1.4826, gradient_norm=99.0, non_finite="")
    assert judgement == Judgement(Action.SKIP, reason, finite=True)
    judgement = guard.judge(loss=3.0, gradient_norm=6.0 + 100 * 2 * 1.4826, non_finite="")
    reason = (
        "gradient norm 302.5 is 100.0 robust deviations (limit 8) above the median 6 of 5 steps"
    )
    assert judgement == Judgement(
        Action.REWIND, f"{reason}, after 1 skipped steps in a row", finite=True
    )
    assert guard.to_json() == known | {"skipped_in_a_row": 1}
    assert guard.judge(loss=3.0, gradient_norm=6.0, non_finite="") == Judgement(Action.STEP)
    assert guard.to_json()["gradient_norms"][-1] == 6.0 and guard.skipped_in_a_row == 0


def test_a_guard_without_spikes_remembers_no_losses() -> None:
    guard = LossGuard(GuardsConfig())
    judged(guard, [1.0, 2.0])
    judgement = guard.judge(loss=1.0, gradient_norm=1.0, non_finite="")
    assert (judgement.reason, judgement.finite) == ("", True)
    with pytest.raises(FrozenInstanceError):
        judgement.finite = False  # type: ignore[misc]
    assert guard.to_json() == {"losses": [], "gradient_norms": [], "skipped_in_a_row": 0}


def test_the_loss_scale_doubles_after_2000_good_steps_and_halves_at_an_overflow() -> None:
    scale = LossScale()
    assert scale.to_json() == {"value": 16.0, "good_steps": 0}
    for good_steps in (*range(1, 2000), 0):
        assert scale.update(overflow=False) == "" and scale.to_json()["good_steps"] == good_steps
        assert scale.value == (16.0 if good_steps else 32.0)
    scale.restore({"value": 32.0, "good_steps": 1999})
    assert scale.update(overflow=True) == "float16 overflow in gradients; loss scale 32 → 16"
    assert scale.to_json() == {"value": 16.0, "good_steps": 0}


@pytest.mark.parametrize(
    ("value", "overflow", "expected"),
    [
        (2.0**-14, True, 2.0**-14),
        (2.0**-13, True, 2.0**-14),
        (2.0**23, False, 2.0**24),
        (2.0**24, False, 2.0**24),
        (1.5 * 2.0**23, False, 2.0**24),
    ],
)
def test_the_loss_scale_stays_between_its_limits(
    value: float, overflow: bool, expected: float
) -> None:
    scale = LossScale()
    scale.restore({"value": value, "good_steps": 1999})
    assert bool(scale.update(overflow=overflow)) is (value > expected)
    assert scale.to_json() == {"value": expected, "good_steps": 0}


def test_a_guard_restored_from_a_commit_continues_as_before() -> None:
    drawn = random.Random(3)
    losses = [drawn.choice([drawn.gauss(3.0, 0.2), math.nan, 9.0]) for _ in range(300)]
    config = GuardsConfig(spike="skip", non_finite="skip", spike_window_steps=12, skips_in_a_row=2)
    straight = LossGuard(config)
    whole = judged(straight, losses)
    assert {"step", "skip", "rewind"} == set(whole)
    for cut in (1, 7, 100, 255):
        first = LossGuard(config)
        second = LossGuard(config)
        begun = judged(first, losses[:cut])
        second.restore(json.loads(json.dumps(first.to_json())))
        assert begun + judged(second, losses[cut:]) == whole


@pytest.mark.parametrize(
    ("sums", "copies", "odd", "certain"),
    [
        ([5, 5, 5, 5], 4, [], True),
        ([5, 5, 6, 5], 4, [2], True),
        ([5, 6], 2, [0, 1], False),
        # Two ranks hold a copy: only every second rank is compared
        ([1, 2, 1, 2, 1, 3], 3, [5], True),
        ([1, 2, 3, 4], 1, [], True),
        ([5, 5, 6, 6], 4, [0, 1, 2, 3], False),
        ([5, 6, 7], 3, [0, 1, 2], False),
        ([5, 6, 5, 5, 6], 5, [1, 4], True),
        ([1, 9, 7, 2, 1, 2], 3, [1, 2], True),
        ([1, 9, 2, 9, 3, 8], 3, [0, 2, 4, 5], False),
        ([9, 1, 9, 2, 8, 3], 3, [1, 3, 4, 5], False),
    ],
)
def test_the_odd_rank_is_named_by_majority(
    sums: list[int], copies: int, odd: list[int], certain: bool
) -> None:
    assert find_divergent_ranks(sums, copies) == (odd, certain)


def test_every_single_changed_bit_changes_the_sum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, dtype=torch.bfloat16))
    before = weights_checksum(model)
    assert before == weights_checksum(model) and 0 < before < 2**53
    for parameter in model.parameters():
        bits = parameter.data.view(-1).view(
            torch.int32 if parameter.element_size() == 4 else torch.int16
        )
        for place in range(bits.numel()):
            for bit in (0, 7, 14):
                bits[place] ^= 1 << bit
                assert weights_checksum(model) != before
                bits[place] ^= 1 << bit
    assert weights_checksum(model) == before


def test_the_checksum_of_weights_is_a_sum_of_bits_modulo_a_prime() -> None:
    """In each tensor, the bits are added as integers of 4, 2 or 1 bytes."""
    module = nn.Module()
    values = [
        (np.array([[1.5, -2.0]]), np.int32),
        (np.array([[0.5, -3.0], [7.0, 1.0]], dtype=np.float32), np.int32),
        (np.array([[1.0, -1.0, 0.25]], dtype=np.float16), np.int16),
        (np.array([[3, 250]], dtype=np.uint8), np.uint8),
        (np.zeros((0, 3), dtype=np.float32), np.int32),
    ]
    expected = 0
    for number, (value, kind) in enumerate(values):
        transposed = torch.from_numpy(value).T  # is not contiguous
        module.register_parameter(f"p{number}", nn.Parameter(transposed, requires_grad=False))
        if value.size:
            expected = (expected * 1_000_003 + int(value.view(kind).sum(dtype=np.int64))) % (
                2**47 - 115
            )
    assert weights_checksum(module) == expected + 1
    assert weights_checksum(nn.Module()) == 1


def test_the_checksum_of_a_shard_is_that_of_its_own_values() -> None:
    weight = torch.arange(15.0).view(5, 3)

    def shard_sum(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        module = nn.Module()
        sharded = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(sharded))
        return weights_checksum(module)

    parts = [nn.Linear(3, rows, bias=False) for rows in (3, 2)]
    for part, value in zip(parts, weight.split(3), strict=True):
        part.weight.data = value
    assert call_in_process_group(2, shard_sum) == [weights_checksum(part) for part in parts]


def test_the_sum_takes_little_room_beside_a_large_tensor() -> None:
    model = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        weights_checksum(model)
    sums = [event for event in profile.events() if event.name == "aten::sum"]
    assert len(sums) == 4 + 1, "one of each four million elements, and one of these"
    assert max(abs(event.self_cpu_memory_usage) for event in profile.events()) <= 32 * 2**20 + 64


@pytest.mark.parametrize(
    ("held", "left", "needed", "warns"),
    [
        (lambda t: 1e9 + 1e6 * t, 2e8, 1e6, True),  # 1 MB/s of 200 MB
        (lambda t: 1e9 + 1e6 * t, 2e8, 50.0, False),  # the job ends before
        (lambda t: 1e9 + 1e6 * t, 2e9, 1e6, False),  # far away
        (lambda t: 1e9 + (5e8 if t > 30 else 0), 2e8, 1e6, False),  # one leap
        (lambda t: 1e9 + 1e8 * (t % 10), 2e8, 1e6, False),  # up and down
        # Settling down: full after longer than it has lived
        (lambda t: 1e9 + 1e6 * min(t, 100.0), 2e8, 1e6, False),
    ],
)
def test_memory_that_runs_out_soon_is_seen_coming(
    held: Callable[[float], float], left: float, needed: float, warns: bool
) -> None:
    now = 0.0
    watch = MemoryGrowthMonitor(
        "memory", held=lambda: held(now), left=lambda: left, sharers=1, now=lambda: now
    )
    reasons = []
    for tick in range(2000):
        now = tick / 8
        reasons.append(watch.look(needed))
    found = [reason for reason in reasons if reason]
    assert bool(found) is warns
    assert not any(reasons[: 8 * 55]), "a minute is watched first"
    if warns:
        assert found[0].startswith("memory grows by 1.0 MiB/s and 0.19 GiB are left: full in 2")


def test_files_that_are_mapped_or_cached_are_no_memory_that_runs_out(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * 2**20))
    before = resident_bytes(os.getpid())
    data = np.memmap(path, dtype=np.uint8, mode="r")
    assert int(data[::4096].sum()) == 0 and resident_bytes(os.getpid()) - before < 16 * 2**20
    # An array could get memory that this process has freed before, and would add nothing.
    with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"1" * len(held))
        assert resident_bytes(os.getpid()) - before > 0.9 * len(held)


@pytest.mark.parametrize(("version", "unlimited"), [("", "max"), ("memory", str(2**63 - 4096))])
def test_memory_left_is_that_of_the_tightest_group_with_its_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, unlimited: str
) -> None:
    """A container has its own group as the root, or sees where it is; a group around it may leave
    less.
    """
    limit, use, (inactive, active) = process._CGROUP_FILES[version]
    monkeypatch.setattr(process, "_CGROUPS", tmp_path)

    def describe_group(path: str, most: str, used: int) -> None:
        folder = tmp_path / version / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(most + "\n")
        (folder / use).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 300\n{inactive} 200\n{active} 400\nodd\n")

    groups = (row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines())
    own = next((path.lstrip("/") for _, controllers, path in groups if controllers == version), "")
    describe_group("", unlimited, 900)
    assert process.memory_left().keys() == {"available on this machine"}
    describe_group("", "1000", 900)
    assert process.host_bytes_left() == process.memory_left()["left in this container"] == 700
    if own:
        describe_group(own, "900", 900)
        assert process.host_bytes_left() == 600
        describe_group(own, unlimited, 900)
        assert process.host_bytes_left() == 700


def test_an_allocation_that_fails_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(real.value)


def test_a_rewind_skips_unreadable_commits(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    first = open_generation(store, run="run", attempt=0)
    for step in (4, 8):
        store.put(commit_key(step, first.number, f"{step:064x}"), b"torn")
    record_rewind(store, generation=first.number, rank=0, limit=6, first_sample=80, sound=True)
    assert rewind_parent(store) is None
    with pytest.raises(
        NothingToRestore, match="none of its 2 commits can be restored, the newest of step 8"
    ):
        open_generation(store, run="run", attempt=1)
    record_permits(store, FROM_SCRATCH)
    assert open_generation(store, run="run", attempt=1).parent is None


def test_commits_whose_weights_may_differ_are_left_and_not_quarantined(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    first = open_generation(store, run="run", attempt=0)
    raw = Manifest(
        save=CheckpointId(job="job", generation=first.name, step=8, world_size=0),
        data=(),
        indexes=(),
        tensors={},
    )
    store.put(commit_key(8, first.number, sha256_text(raw.to_bytes())), raw.to_bytes())
    record_rewind(store, generation=first.number, rank=0, limit=6, first_sample=0, sound=False)
    parent = rewind_parent(store)
    assert parent == NO_PARENT
    assert open_generation(store, run="run", attempt=1, parent=parent).parent is None
    assert store.list("quarantine") == [] and reachable_commits(store) == []

"""The loop on real gangs: the same curve in every mode, exact averages, one agreed end; and its
small parts alone.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from ebbflow.core.config.schema import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
    TrainingConfig,
)
from ebbflow.core.errors import Outcome
from ebbflow.core.events import LedgerClass, read_events
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.training.data import prepare_tokens
from ebbflow.training.errors import RendezvousError
from ebbflow.training.gang import Gang
from ebbflow.training.limits import Limits, Stop
from ebbflow.training.progress import Progress, Status
from ebbflow.training.reporter import Clock, process_start_monotonic
from ebbflow.training.step_sync import find_slowest
from ebbflow.training.workload import Cursor
from tests.support.gangs import run_ranks, train_gang

SLOW_STEPS = 22
SLOW_SECONDS = 0.06
STEPS = 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    for number in range(12):
        path = folder / "texts" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            "".join(f"{number * line} is {number} times {line}.\n" for line in range(60))
        )
    return folder


@pytest.fixture(scope="module")
def tokens(folder: Path) -> str:
    data = DataConfig(path="texts", suffixes=[".txt"], held_out_fraction=0.3)
    return prepare_tokens(data, Store.open(str(folder / "store")), project_root=folder).fingerprint


def make_config(
    folder: Path, *, mode: str = "ddp", accumulation: int = 1, steps: int = STEPS
) -> RunConfig:
    return RunConfig(
        store=str(folder / "store"),
        model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, sequence_length=32),
        training=TrainingConfig(
            batch_size=8,
            max_steps=steps,
            gradient_accumulation_steps=accumulation,
            evaluation_interval_steps=10,
            scheduler=SchedulerConfig(warmup_steps=3),
        ),
        data=DataConfig(held_out_samples=7),
        parallel=ParallelConfig(mode=mode),
    )


@pytest.fixture(scope="module")
def reference(folder: Path, tokens: str) -> dict:
    """One process, no accumulation, ragged samples."""
    scenario = {"config": make_config(folder), "tokens": tokens, "ragged": True}
    return train_gang(folder, {"alone": scenario}, world_size=1)["alone"][0]


@pytest.fixture(scope="module")
def runs(folder: Path, tokens: str) -> dict[str, list[dict]]:
    """What happened to two ranks, by scenario; both of each scenario's results."""
    scenarios = {}
    for mode in ("ddp", "fsdp2"):
        scenarios |= {
            f"{mode} {accumulation}": {
                "config": make_config(folder, mode=mode, accumulation=accumulation),
                "ragged": True,
            }
            for accumulation in (1, 2)
        }
    sharded = make_config(folder, mode="fsdp2")
    scenarios["whole samples"] = {
        "config": make_config(folder, mode="fsdp2", accumulation=2, steps=6)
    }
    scenarios["poison"] = {"config": sharded, "poison": {"rank": 1, "step": 5}}
    scenarios["spoilt"] = {"config": sharded, "rehearse": "non-finite@step:4:rank=1"}
    scenarios["rehearsal"] = {
        "config": make_config(folder, steps=4),
        "rehearse": "rank-kill@step:2:rank=1",
        "forgets": "fault_injected",
    }
    for mode, phase in (("fsdp2", "forward"), ("fsdp2", "backward"), ("ddp", "backward")):
        config = make_config(folder, mode=mode, steps=SLOW_STEPS)
        scenarios[f"slow {mode} {phase}"] = {
            "config": config,
            "slow": {"rank": 1, "seconds": SLOW_SECONDS, "phase": phase},
        }
    scenarios["leave"] = {"config": make_config(folder), "leave": {"rank": 1, "step": 4}}
    return train_gang(
        folder, {name: {**s, "tokens": tokens} for name, s in scenarios.items()}, world_size=2
    )


@pytest.mark.parametrize("name", ["ddp 1", "ddp 2", "fsdp2 1", "fsdp2 2"])
def test_every_mode_trains_alike(runs: dict[str, list[dict]], reference: dict, name: str) -> None:
    """Samples differ in weight, so that a mean of means, over ranks or micro-batches, would show."""
    for result in runs[name]:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(reference["norms"], rel=1e-4)
        assert result["losses"] == runs[name][0]["losses"], "all ranks know the exact mean"
    assert runs[name][0]["evaluations"] == pytest.approx(reference["evaluations"], rel=1e-5)
    assert len(runs[name][0]["evaluations"]) == 2
    assert len({result["weights_sha256"] for result in runs[name]}) == 1
    assert reference["losses"][-1] < reference["losses"][0] - 0.5


def test_equal_runs_are_equal_bit_for_bit(
    folder: Path, tokens: str, runs: dict[str, list[dict]]
) -> None:
    config = make_config(folder, mode="fsdp2", accumulation=2, steps=6)
    again = train_gang(folder, {"again": {"config": config, "tokens": tokens}}, world_size=2)[
        "again"
    ]
    for first, second in zip(runs["whole samples"], again, strict=True):
        for key in ("losses", "norms", "evaluations", "weights_sha256"):
            assert first[key] == second[key]


def test_ranks_together_read_each_sample_once(runs: dict[str, list[dict]]) -> None:
    read = []
    for result in runs["whole samples"]:
        for first, count in result["seen"]:
            read.append(range(first, first + count))
    samples = []
    for part in read:
        samples += part
    assert sorted(samples) == list(range(6 * 8))


@pytest.mark.parametrize("name", ["poison", "spoilt"])
def test_a_number_that_is_not_finite_on_one_rank_stops_all_at_the_same_step(
    runs: dict[str, list[dict]], name: str
) -> None:
    """In the fifth step, by itself or by rehearsal."""
    for result in runs[name]:
        assert (result["outcome"], result["step"], len(result["losses"])) == (
            Outcome.NON_FINITE,
            4,
            4,
        )
        assert "step 5: loss is not finite on rank 1" in result["message"]
        assert result["saved"] == []
    assert len({result["weights_sha256"] for result in runs["poison"]}) == 1


def test_a_signal_to_one_rank_makes_all_save_and_leave_at_the_same_step(
    runs: dict[str, list[dict]],
) -> None:
    for result in runs["leave"]:
        assert (result["outcome"], result["step"], result["saved"]) == (Outcome.INTERRUPTED, 4, [4])
        assert result["weights_sha256"] is None


@pytest.mark.parametrize("name", ["slow fsdp2 forward", "slow fsdp2 backward", "slow ddp backward"])
def test_a_rank_is_slow_by_its_own_time_though_all_steps_take_as_long(
    runs: dict[str, list[dict]], name: str
) -> None:
    ranks = [run["steps"] for run in runs[name]]
    durations = []
    for steps in ranks:
        durations.append(sum(sum(step["seconds"].values()) for step in steps))
    assert durations[0] == pytest.approx(durations[1], rel=0.2)
    found = []
    for both in zip(*ranks, strict=True):
        found.append(find_slowest([step["own_seconds"] for step in both]))
    lost = [slowest.lost_seconds for slowest in found if slowest.rank == 1]
    assert len(lost) >= 0.8 * SLOW_STEPS
    assert sum(lost) == pytest.approx(SLOW_STEPS * SLOW_SECONDS, rel=0.4)
    own = []
    for steps in ranks:
        own.append(sum(step["own_seconds"] for step in steps))
    assert own[1] > own[0] + 0.5 * SLOW_STEPS * SLOW_SECONDS


def test_a_fault_that_cannot_be_recorded_does_not_strike(runs: dict[str, list[dict]]) -> None:
    """It would strike again in every attempt."""
    (first, second) = runs["rehearsal"]
    assert [(result["outcome"], result["step"]) for result in (first, second)] == [
        (Outcome.COMPLETED, 4)
    ] * 2
    assert first["notices"] == []
    (notice,) = second["notices"]
    assert notice["step"] == 2 and "rank-kill@step:2:rank=1 was skipped" in notice["message"]
    assert "the disk is full" in notice["message"]


def write_config(folder: Path, config: RunConfig) -> Path:
    """As YAML, of which JSON is a part."""
    path = folder / f"{config.training.max_steps}.yaml"
    data = config.data.model_copy(update={"path": str(folder / "texts"), "suffixes": [".txt"]})
    path.write_text(config.model_copy(update={"data": data}).model_dump_json(indent=1))
    return path


def outcome_and_losses(folder: Path, job: str) -> tuple[dict, dict[int, float]]:
    events = read_events(Store.open(str(folder / "store" / "jobs" / job)))
    outcomes = [event for event in events if event.name == "outcome"]
    return outcomes[-1].data, {
        event.step: event.data["loss"] for event in events if event.name == "step"
    }


def test_a_job_resumed_from_its_commit_ends_as_an_uninterrupted_one(folder: Path) -> None:
    """The command without a pipeline, twice, against once."""
    whole = make_config(folder, mode="fsdp2", steps=12)
    half = make_config(folder, mode="fsdp2", steps=5)
    paths = [write_config(folder, config) for config in (whole, half)]
    settings = (
        "training.scheduler.type=constant",
        "checkpoint.interval_steps=5",
        "data.held_out_fraction=0.3",
    )
    overrides = []
    for setting in settings:
        overrides.extend(("--set", setting))
    for job, path in (("straight", paths[0]), ("stopped", paths[1]), ("stopped", paths[0])):
        outputs = run_ranks(2, ["-m", "training", str(path), "--job", job, *overrides])
    assert "step 6/12 · 50%" in outputs[0]
    straight = outcome_and_losses(folder, "straight")
    stopped = outcome_and_losses(folder, "stopped")
    assert straight == stopped
    assert straight[0]["outcome"] == Outcome.COMPLETED
    assert len(straight[1]) == 12
    for rank in (0, 1):
        assert_no_second_is_lost(folder, "straight", rank)


def assert_no_second_is_lost(folder: Path, job: str, rank: int) -> None:
    """A rank's intervals follow one another from its process's start to its last event."""
    events = [
        event
        for event in read_events(Store.open(str(folder / "store" / "jobs" / job)))
        if event.rank == rank
    ]
    intervals = [event for event in events if event.name in ("phase", "step")]
    first = intervals[0]
    last = intervals[-1]
    assert (first.data["class"], last.data["class"]) == ("startup", "shutdown")
    booked = [
        sum(e.data["seconds"].values()) if e.name == "step" else e.data["seconds"]
        for e in intervals
    ]
    assert sum(booked) == pytest.approx(last.t_mono - (first.t_mono - booked[0]), abs=0.01)


def test_shares_of_a_batch_follow_one_another() -> None:
    for world_size in (1, 2, 3, 5, 8):
        shares = [Cursor(100, 8).share(rank, world_size) for rank in range(world_size)]
        indices = []
        for share in shares:
            indices += range(share.first, share.first + share.count)
        assert indices == list(range(100, 108))


def test_limits_stop_before_the_money_or_the_time_is_gone() -> None:
    now = 0.0
    terms = Terms(usd_per_rank_second=0.01, budget_usd=10.0, spent_usd=4.0, reserve_usd=1.0)
    limits = Limits(terms, world_size=2, elapsed_seconds=lambda: now)
    now = 249.0
    assert limits.stop() is Stop.NONE
    now = 250.0
    assert limits.spent_usd == pytest.approx(9.0)
    assert limits.stop() is Stop.BUDGET
    assert "$9.0000 spent of $10.0000" in limits.describe(Stop.BUDGET)
    for usd in (0.01, 0.0):  # a reservation that is paid anyway costs nothing
        for seconds_left, expected in ((60, Stop.NONE), (40, Stop.DEADLINE)):
            terms = Terms(
                usd_per_rank_second=usd,
                reserve_seconds=50.0,
                deadline_utc=time.time() + seconds_left,
            )
            assert Limits(terms, world_size=2, elapsed_seconds=lambda: 0.0).stop() is expected
    for seconds_left, expected in ((60, Stop.NONE), (40, Stop.INTERRUPTED)):
        terms = Terms(
            usd_per_rank_second=0.0, reserve_seconds=50.0, end_utc=time.time() + seconds_left
        )
        ending = Limits(terms, world_size=2, elapsed_seconds=lambda: 0.0)
        assert ending.stop(1) is expected
    assert "leaves its reservation, which ends in" in ending.describe(Stop.INTERRUPTED)


def test_the_clock_leaves_no_gap() -> None:
    now = 100.0
    phases = []
    clock = Clock(lambda name, **data: phases.append(data), started=90.0, now=lambda: now)
    now = 103.0
    clock.enter(LedgerClass.RESTORE)
    now = 104.5
    clock.emit_phases()
    assert phases == [{"class": "startup", "seconds": 13.0}, {"class": "restore", "seconds": 1.5}]
    clock.enter(LedgerClass.DATA_WAIT)
    now = 105.0
    clock.enter(LedgerClass.USEFUL_STEP)
    now = 107.0
    assert clock.booked_seconds(LedgerClass.USEFUL_STEP) == 2.0
    now = 108.0
    taken = clock.take()
    assert taken["data_wait"] == 0.5 and taken["useful_step"] == 3.0
    now = 110.0
    total = (
        sum(phase["seconds"] for phase in phases) + sum(taken.values()) + sum(clock.take().values())
    )
    assert total == clock.elapsed_seconds == 20.0


def test_a_process_is_older_than_its_first_line_and_no_older_than_its_parent() -> None:
    born = process_start_monotonic()
    assert born < time.monotonic()
    program = (
        "from ebbflow.training.reporter import *; import time; print(time.monotonic() - "
        "process_start_monotonic())"
    )
    before = time.monotonic()
    age = float(run_ranks(1, ["-c", program])[0])
    assert 0.0 <= age <= time.monotonic() - before + 1.0 / os.sysconf("SC_CLK_TCK")


def test_progress_is_one_whole_line_each_ten_seconds() -> None:
    now = 0.0
    lines = []
    terms = Terms(usd_per_rank_second=0.01, budget_usd=5.0, price_kind="recorded")
    progress = Progress(
        max_steps=100, peak_flops_per_second=4e9, terms=terms, write=lines.append, now=lambda: now
    )
    for step in range(1, 101):
        now = step * 1.0
        if step > 10:
            commit = 10
        else:
            commit = None
        progress.step(
            Status(
                step=step, loss=2.5, tokens=1000, flops=1e9, spent_usd=0.5, last_commit_step=commit
            )
        )
    assert [line.split(" · ")[0] for line in lines] == [
        f"step {s}/100" for s in (*range(1, 100, 10), 100)
    ]
    assert "ETA" not in lines[0], "the first step also compiles"
    assert lines[1] == (
        "step 11/100 · 11% · loss 2.5000 · 1,000 tok/s · MFU 25% of measured peak · ETA 1:29 · "
        "$0.5000 of $5.00 (recorded price) · commit 10"
    )
    assert not [line for line in lines if line != line.strip() or "\r" in line or "\n" in line]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    program = (
        "import os, json\n"
        "from ebbflow.training.gang import connect\n"
        "from ebbflow.training.errors import RendezvousError\n"
        "os.environ['WORLD_SIZE'] = '3'\n"
        "try:\n    connect(start_seconds=3, collective_seconds=5, generation='g')\n"
        "except RendezvousError as error:\n    print(json.dumps(str(error)), flush=True)\n"
        "os._exit(0)\n"
    )
    messages = [json.loads(output.splitlines()[-1]) for output in run_ranks(2, ["-c", program])]
    assert any(
        "2 of 3 ranks came within 3 s" in message and "missing: rank 2" in message
        for message in messages
    )
    assert all(
        "missing" in message or "the key-value store does not answer" in message
        for message in messages
    )


@pytest.mark.parametrize(
    ("signs", "ends", "missing"),
    [(True, False, ""), (False, False, "rank 1"), (True, True, "rank 1")],
)
def test_a_rank_that_works_is_awaited_as_long_as_it_gives_signs_of_life(
    signs: bool, ends: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ends in its work gives no more signs."""
    import torch.distributed as dist

    monkeypatch.setattr("ebbflow.training.gang._SIGN_SECONDS", 0.01)
    store = dist.HashStore()
    begun = time.monotonic()

    def work() -> None:
        gang = Gang(rank=1, world_size=2, store=store)
        alive = gang.announce(lambda: None)
        while time.monotonic() - begun < 1.0:
            if signs:
                alive()
            time.sleep(0.02)
        if not ends:
            gang.await_ranks("reading", 5.0, lambda: None)

    other = threading.Thread(target=work)
    other.start()
    heard: list[float] = []
    try:
        Gang(rank=0, world_size=2, store=store).await_ranks(
            "reading", 0.5, lambda: heard.append(time.monotonic())
        )
        error = ""
    except RendezvousError as caught:
        error = str(caught)
    other.join()
    assert f"missing: {missing}; fix:" in error if missing else error == ""
    assert len(heard) > 2


def test_the_peak_of_a_place_is_the_best_of_its_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import ebbflow.training.progress

    measured = iter([3e9, 1e9, 5e9])
    monkeypatch.setattr(
        ebbflow.training.progress, "measure_flops_per_second", lambda *given: next(measured)
    )
    place = torch.device("cpu"), torch.float32, tmp_path / "peak.json"
    assert [ebbflow.training.progress.peak_flops_per_second(*place) for _ in range(3)] == [
        3e9,
        3e9,
        5e9,
    ]

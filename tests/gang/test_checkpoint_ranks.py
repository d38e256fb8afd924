"""Real gloo ranks: what two ranks saved comes back bit-equal at any world size and in any mode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ebbflow.core.store import Store
from ebbflow.training.checkpoint import open_generation, reachable_commits
from ebbflow.training.checkpoint.commands import main as checkpoints
from tests.support.gangs import run_ranks

MODES = ("ddp", "fsdp2", "hsdp")


def run_gang(world_size: int, action: str, modes: str, folder: Path, out: Path) -> list[dict]:
    """What each rank wrote; fails with the output of all when one fails."""
    run_ranks(
        world_size, ["-m", "tests.support.checkpoint_rank", action, modes, str(folder), str(out)]
    )
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Three jobs, each with one commit that two ranks wrote in one mode, and what the ranks had in
    memory.
    """
    folder = tmp_path_factory.mktemp("gang")
    for mode in MODES:
        open_generation(Store.open(str(folder / "jobs" / mode)), run="r", attempt=0)
    return folder, run_gang(2, "save", "+".join(MODES), folder, folder / "saved")


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_make_one_commit_and_write_each_byte_once(
    saved: tuple[Path, list[dict]], mode: str
) -> None:
    folder, (first, second) = saved
    store = Store.open(str(folder / "jobs" / mode))
    (commit,) = reachable_commits(store)
    assert first[mode]["commit"] == second[mode]["commit"] == commit.key
    assert first[mode]["digests"] == second[mode]["digests"]
    assert checkpoints(["verify", store.uri]) == 0
    pieces = {
        name: rows for name, (_, _, rows) in json.loads(store.get(commit.key))["tensors"].items()
    }
    writers = set()
    for rows in pieces.values():
        writers |= {row[0] for row in rows}
    assert writers == {0, 1}, "one rank wrote all"
    shards = {"fsdp2": 2, "hsdp": 1, "ddp": 1}[mode]
    assert len(pieces["model.0.weight"]) == len(pieces["optimizer.0.weight.exp_avg"]) == shards
    assert len(pieces["model.1.running_mean"]) == 1


@pytest.mark.parametrize(
    ("world_size", "modes"), [(1, "plain"), (2, "fsdp2+ddp+hsdp"), (3, "fsdp2")]
)
def test_every_mode_restores_every_other_bit_for_bit(
    saved: tuple[Path, list[dict]], tmp_path: Path, world_size: int, modes: str
) -> None:
    folder, ranks = saved
    restored = run_gang(world_size, "restore", modes, folder, tmp_path / "restored")
    for rank, results in enumerate(restored):
        assert set(results) == {f"{job}>{mode}" for job in MODES for mode in modes.split("+")}
        for name, result in results.items():
            job = name.split(">")[0]
            assert result["digests"] == ranks[0][job]["digests"], (rank, name)
            assert result["extra"] == {"cursor": 16}
            if world_size == 2:
                assert result["rng"] == "restored" and result["drawn"] == ranks[rank][job]["drawn"]
            else:
                assert result["rng"] == "reseeded from the commit"
    drawn = {tuple(results["ddp>" + modes.split("+")[0]]["drawn"]) for results in restored}
    assert len(drawn) == world_size, "each rank needs random numbers of its own"


def test_a_rank_that_reads_longer_than_a_collective_may_take_is_awaited(
    saved: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    """The error of a rank that never comes names it."""
    first, second = run_gang(2, "slow", "ddp", saved[0], tmp_path / "slow")
    assert first["ddp"]["step"] == second["ddp"]["step"] == 2
    assert min(first["ddp"]["seconds"], second["ddp"]["seconds"]) > 5
    assert first["ddp"]["signs"] > second["ddp"]["signs"]
    missing = (
        "came to the end of a stage of rank 0 alone, and none gave a sign of life for 6 s; "
        "missing: rank 1; fix: "
    )
    assert first["ddp"]["missing"].startswith(f"rank 0: 1 of 2 ranks {missing}")


@pytest.mark.parametrize(("world_size", "modes"), [(1, "plain"), (2, "fsdp2+ddp+hsdp")])
def test_another_model_is_a_mistake_of_the_configuration_in_every_mode(
    saved: tuple[Path, list[dict]], tmp_path: Path, world_size: int, modes: str
) -> None:
    """A shard's optimizer state cannot be allocated from another shape, which must not be what the
    user hears of.
    """
    folder, _ = saved
    for results in run_gang(world_size, "mismatch", modes, folder, tmp_path / "mismatch"):
        for name, result in results.items():
            assert len(result["raised"]) == 2, name
            for kind, outcome, curable, text in result["raised"]:
                assert (kind, outcome, curable) == ("CommitMismatch", "config", False), text
                assert (
                    "model.0.weight is float32 [5, 6] in the commit, float32 [8, 6] in this model"
                    in text
                )
                assert "6 more of 9 tensors differ" in text
            assert result["reachable"] == 1, "a mismatch is not a reason for quarantine"


def test_a_node_that_reads_wrongly_is_the_suspect_and_damage_is_confirmed_by_another(
    saved: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    job = tmp_path / "jobs" / "ddp"
    shutil.copytree(saved[0] / "jobs" / "ddp", job)
    for result in run_gang(2, "doubt", "ddp", tmp_path, tmp_path / "doubt"):
        kind, text, quarantined = result["wrong reads"]
        assert (kind, quarantined) == ("UnreliableReader", 0), text
        assert (
            "node 1 reads wrongly (rank 1)" in text and "a second reader (rank 0 on node 0)" in text
        )
        kind, text, quarantined = result["damage"]
        assert (kind, quarantined) == ("NothingToRestore", 1), text
        assert "agrees" in text and "--from-scratch" in text

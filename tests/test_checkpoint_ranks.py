"""Real gloo ranks: what two ranks saved comes back bit-equal at any world size and in any mode."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.store import Store
from training.checkpoint import open_generation, reachable_commits
from training.checkpoint.commands import main as checkpoints

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "support" / "checkpoint_rank.py"


def run_gang(world_size: int, action: str, modes: str, job_store: Path, out: Path, *more: str) -> list[dict]:
    """What each rank wrote; fails with the output of all when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        contract = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **{key: str(v) for key, v in contract.items()}}
        env = {**os.environ, **ours}
        command = [sys.executable, str(SCRIPT), action, modes, str(job_store), str(out), *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, env=env, **pipes))
    try:
        output = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(output)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A job whose one commit two FSDP2 ranks wrote, and what they had in memory."""
    folder = tmp_path_factory.mktemp("gang")
    job = folder / "jobs" / "gang"
    generation = open_generation(Store.open(str(job)), run="r", attempt=0)
    return job, run_gang(2, "save", "fsdp2", job, folder / "saved", generation.id)


def test_two_ranks_agree_on_one_commit_and_share_the_bytes(saved: tuple[Path, list[dict]]) -> None:
    job, (first, second) = saved
    assert first["fsdp2"]["commit"] == second["fsdp2"]["commit"]
    assert first["fsdp2"]["digests"] == second["fsdp2"]["digests"]
    sizes = [meta.size for meta in Store.open(str(job)).list("data")]
    assert len(sizes) == 2 and min(sizes) > 0.5 * max(sizes)
    assert checkpoints(["verify", str(job)]) == 0


@pytest.mark.parametrize(("world_size", "modes"), [(1, "plain"), (2, "fsdp2+ddp+hsdp"), (3, "fsdp2")])
def test_restore_is_bit_equal(saved: tuple[Path, list[dict]], tmp_path: Path, world_size: int, modes: str) -> None:
    job, ranks = saved
    restored = run_gang(world_size, "restore", modes, job, tmp_path / "restored")
    for rank, by_mode in enumerate(restored):
        for mode, result in by_mode.items():
            assert result["digests"] == ranks[0]["fsdp2"]["digests"], (rank, mode)
            assert result["extra"] == {"cursor": 16}
            same_size = world_size == 2
            assert result["rng"] == ("restored" if same_size else "reseeded from the commit")
            assert (result["drawn"] == ranks[rank]["fsdp2"]["drawn"] if same_size else True)
    if world_size == 3:
        drawn = {tuple(by_mode["fsdp2"]["drawn"]) for by_mode in restored}
        assert len(drawn) == 3, "each rank needs random numbers of its own"


@pytest.mark.parametrize("mode", ["ddp", "hsdp"])
def test_replicas_share_the_writing_and_restore_as_shards(tmp_path: Path, mode: str) -> None:
    job = tmp_path / "jobs" / mode
    store = Store.open(str(job))
    generation = open_generation(store, run="r", attempt=0)
    ranks = run_gang(2, "save", mode, job, tmp_path / "saved", generation.id)
    whole = run_gang(2, "restore", "fsdp2", job, tmp_path / "restored")
    assert whole[0]["fsdp2"]["digests"] == ranks[0][mode]["digests"]
    (commit,) = reachable_commits(store)
    pieces = json.loads(store.get(commit.key))["tensors"]
    assert all(len(rows) == 1 for _, _, rows in pieces.values()), "a replica was written twice"
    assert {rows[0][0] for name, (_, _, rows) in pieces.items() if name.startswith("model.")} == {0, 1}

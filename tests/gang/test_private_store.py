"""A gang on one machine: its key-value store is a file that no other user can reach."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import TrainingConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.coordinator import GenerationPlanner
from tests.support.flow import wait_until
from tests.support.gangs import endless_gang, free_port

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3


def test_ranks_meet_without_a_server_that_others_could_reach(tmp_path: Path) -> None:
    keys = tmp_path / "keys" / "store"
    keys.parent.mkdir(mode=0o700)
    ready = tmp_path / "ready"
    port = free_port()
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, str(ROOT / "tests/support/private_rank.py"), str(keys), str(ready)]
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    try:
        wait_until("the ranks to meet", ready.exists, timeout=90)
        with socket.socket() as stranger:
            assert stranger.connect_ex(("127.0.0.1", port)) != 0, "nothing serves its keys"
        assert keys.stat().st_size > 0
        ready.unlink()
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_agents_on_one_machine_give_their_ranks_one_private_folder(tmp_path: Path) -> None:
    spec = endless_gang(tmp_path)
    gang = LocalGang(spec, tmp_path / "agents", tmp_path / "agents.log")
    try:
        found: list[Path] = []

        def trains() -> bool:
            found[:] = (tmp_path / "logs").glob("*/keys")
            text = (tmp_path / "agents.log").read_text()
            assert all(agent.poll() is None for agent in gang.agents), text
            return bool(found) and "step " in text

        wait_until("steps", trains, timeout=100)
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in found] == [0o700]
        assert (found[0] / "store").stat().st_size > 0
    finally:
        gang.kill()


def test_where_files_cannot_be_locked_a_gang_meets_elsewhere_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) on this machine")
    library = tmp_path / "no_flock.so"
    source = ROOT / "tests/support/no_flock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("EBBFLOW_TEST_NO_FLOCK", "/")
    spec = endless_gang(tmp_path)
    refused = LocalGang(spec, tmp_path / "agents", tmp_path / "refused.log")
    try:
        words = r"no folder serves \(.*logs/\w+-\w+: flock: No locks available; .*fix: set TMPDIR"
        with pytest.raises(GangError, match=words) as caught:
            refused.wait(90)
    finally:
        refused.kill()
    assert caught.value.outcome == Outcome.CONFIG and not caught.value.curable
    monkeypatch.setenv("EBBFLOW_TEST_NO_FLOCK", str(tmp_path / "logs"))
    config = spec.config.model_copy(update={"training": TrainingConfig(batch_size=4, max_steps=2)})
    gang = LocalGang(replace(spec, config=config), tmp_path / "agents", tmp_path / "agents.log")
    try:
        outcome = gang.wait(90)
    finally:
        gang.kill()
    assert outcome.outcome == Outcome.COMPLETED, outcome.message


def test_a_gang_on_several_machines_has_a_server(tmp_path: Path) -> None:
    spec = endless_gang(tmp_path)
    store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    for address, private in (("127.0.0.1", True), ("10.0.0.1", False)):
        planner = GenerationPlanner(
            replace(spec, main_address=address), store, born=time.monotonic()
        )
        start = planner.plan(planner.open(), [0, 1], ["a", "b"])
        assert bool(start.keys_path) is private

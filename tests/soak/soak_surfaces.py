"""Sound jobs of varied shape, uninterrupted and killed: no false word on any surface.

`python -m tests.support.surfaces` does the same for a job of your own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.attached_scripts import attached
from tests.support.surfaces import find_false_words, read_surfaces

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]

ATTACHED = ("ddp", "fsdp2", "nano_gpt", "resnet", "accelerated", "hugging_face", "lightning_mlp")
_NEEDS_RANKS = ("ddp", "fsdp2")
_PLAIN = """
import numpy as np
rng = np.random.default_rng(0)
weights = np.zeros(4)
for step in range(200):
    rows = rng.normal(size=(64, 4))
    weights -= 0.1 * (rows.T @ (rows @ weights - rows.sum(1))) / 64
print(weights)
"""


@pytest.mark.parametrize("start", ["ebbflow run", "torchrun", "python"])
@pytest.mark.parametrize("name", ATTACHED)
def test_a_sound_attached_script_shows_no_false_word(tmp_path: Path, name: str, start: str) -> None:
    if start == "python" and name in _NEEDS_RANKS:
        pytest.skip("needs ranks")
    script = attached(tmp_path, name)

    _check(tmp_path, _run(tmp_path, _start(start, script.name)), was_killed=False)


@pytest.mark.parametrize("name", ATTACHED)
def test_an_attached_script_whose_rank_is_killed_shows_no_false_word(
    tmp_path: Path, name: str
) -> None:
    script = attached(tmp_path, name)
    command = [*_start("ebbflow run", script.name), "--rehearse", "rank-kill@step:7"]

    _check(tmp_path, _run(tmp_path, command), was_killed=True)


@pytest.mark.parametrize("start", ["ebbflow run"])
def test_a_script_without_attach_shows_no_false_word(tmp_path: Path, start: str) -> None:
    (tmp_path / "plain.py").write_text(_PLAIN)

    _check(tmp_path, _run(tmp_path, _start(start, "plain.py")), was_killed=False)


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ["--set", "training.max_steps=20"],
        ["--set", "training.max_steps=40", "--set", "cluster.nodes=1"],
        ["--set", "training.max_steps=30", "--set", "parallel.mode=ddp"],
    ],
)
def test_a_configuration_shows_no_false_word(tmp_path: Path, words: list[str], kill: bool) -> None:
    rehearsal = ["--rehearse", "rank-kill@60%"] if kill else []
    command = [sys.executable, "-m", "ebbflow", "run", *words, *rehearsal]

    _check(tmp_path, _run(tmp_path, command), was_killed=kill)


@pytest.mark.parametrize("name", ["nano_gpt", "resnet"])
def test_a_script_that_is_asked_to_leave_twice_shows_no_false_word(
    tmp_path: Path, name: str
) -> None:
    script = attached(tmp_path, name)
    text = script.read_text()
    # It asks itself, once in each of the first two starts
    script.write_text(
        f"import os, signal, threading, pathlib\n"
        f"_mark = pathlib.Path('starts')\n"
        f"_starts = int(_mark.read_text()) if _mark.exists() else 0\n"
        f"_mark.write_text(str(_starts + 1))\n"
        f"if _starts < 2:\n"
        f"    threading.Timer(6.0, os.kill, (os.getpid(), {int(signal.SIGTERM)})).start()\n{text}"
    )
    terminal = ""
    for code in (75, 75, 0):
        terminal = _run(tmp_path, _start("python", script.name), code=code)

    _check(tmp_path, terminal, was_killed=True)


def _start(start: str, script: str) -> list[str]:
    ranks = 2 if Path(script).stem in _NEEDS_RANKS else 1
    match start:
        case "ebbflow run":
            return [sys.executable, "-m", "ebbflow", "run", script, "--ranks", str(ranks)]
        case "torchrun":
            module = "torch.distributed.run"
            return [
                sys.executable,
                "-m",
                module,
                "--standalone",
                f"--nproc-per-node={ranks}",
                script,
            ]
        case _:
            return [sys.executable, script]


def _run(folder: Path, command: Sequence[str], *, code: int = 0) -> str:
    settings = {
        "EBBFLOW__COST__USD_PER_NODE_HOUR": "36",
        "EBBFLOW__CHECKPOINT__INTERVAL": "steps",
        "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5",
        "EBBFLOW_LIVE_PAGE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def _check(folder: Path, terminal: str, *, was_killed: bool) -> None:
    job = (folder / "runs" / "latest").resolve()
    assert find_false_words(read_surfaces(job, terminal), was_killed=was_killed) == []

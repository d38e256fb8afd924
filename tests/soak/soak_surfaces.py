"""A hundred sound jobs of varied shape, uninterrupted and killed: no false word on any surface, and
of those that resume equal nine of ten say so.

`python -m tests.support.surfaces` does the same for a job of your own. The last test counts over all
tests that ran before it in this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.attached_scripts import attached
from tests.support.script_shapes import EXACT, NOT_EXACT
from tests.support.surfaces import Surfaces, find_false_words, read_surfaces

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]

CONFIGS = Path(__file__).resolve().parents[2] / "ebbflow" / "configs"
ATTACHED = ("ddp", "fsdp2", "nano_gpt", "resnet", "accelerated", "hugging_face", "lightning_mlp")
_NEEDS_RANKS = ("ddp", "fsdp2")
# The script asks itself to leave after the first commit of each of its first two starts.
_ASKED = """
import os, pathlib, signal, threading, time
def _ask(before):
    while _count() == before:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
def _count():
    return len(list(pathlib.Path("runs/jobs").glob("*/commits/*/*/*.json")))
_starts = pathlib.Path("starts")
_starts.write_text((_starts.read_text() if _starts.exists() else "") + "*")
if _starts.read_text() != "***":
    threading.Thread(target=_ask, args=[_count()], daemon=True).start()
"""
_PLAIN = """
import numpy as np
rng = np.random.default_rng(0)
weights = np.zeros(4)
for step in range(200):
    rows = rng.normal(size=(64, 4))
    weights -= 0.1 * (rows.T @ (rows @ weights - rows.sum(1))) / 64
print(weights)
"""


@dataclass
class Resumes:
    """Jobs that were killed and resumed, and ended as if whole, by what they promised."""

    equal: int = 0
    promised: int = 0  # of the equal ones, those that said "bit for bit"
    not_examined: int = 0  # of the equal ones, those that said "not yet examined"
    jobs: int = 0  # all jobs that were checked, whole ones among them


@pytest.fixture(scope="module")
def resumes() -> Resumes:
    return Resumes()


@pytest.mark.parametrize("start", ["ebbflow run", "torchrun", "python"])
@pytest.mark.parametrize("name", ATTACHED)
def test_a_sound_attached_script_shows_no_false_word(
    tmp_path: Path, resumes: Resumes, name: str, start: str
) -> None:
    if start == "python" and name in _NEEDS_RANKS:
        pytest.skip("needs ranks")
    script = attached(tmp_path, name)

    _check(tmp_path, _run(tmp_path, _start(start, script.name)), resumes)


@pytest.mark.parametrize("name", ATTACHED)
def test_an_attached_script_whose_rank_is_killed_shows_no_false_word(
    tmp_path: Path, resumes: Resumes, name: str
) -> None:
    script = attached(tmp_path, name)
    command = [*_start("ebbflow run", script.name), "--rehearse", "rank-kill@step:7"]

    _check(tmp_path, _run(tmp_path, command), resumes, was_killed=True)


@pytest.mark.parametrize("name", [*EXACT, *NOT_EXACT])
def test_a_shape_of_script_is_promised_what_it_keeps(
    tmp_path: Path, resumes: Resumes, name: str
) -> None:
    source = EXACT.get(name) or NOT_EXACT[name][0]
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
        (folder / f"{name}.py").write_text(source)
    command = _start("ebbflow run", f"{name}.py")
    whole = _run(folders[0], command)
    _check(folders[0], whole, resumes)

    terminal = _run(folders[1], [*command, "--rehearse", "rank-kill@step:13"])
    surfaces = _check(folders[1], terminal, resumes, was_killed=True)

    found = surfaces.report.events.get("promise")
    assert found is not None
    promise = found.get("level")
    if _final_line(terminal) == _final_line(whole):
        resumes.equal += 1
        resumes.promised += promise == "bit for bit"
        resumes.not_examined += promise == "not yet examined"
    else:
        assert promise != "bit for bit", terminal
    if name in EXACT:
        assert promise != "not exact", found


@pytest.mark.parametrize("start", ["ebbflow run", "python"])
def test_a_script_without_attach_shows_no_false_word(
    tmp_path: Path, resumes: Resumes, start: str
) -> None:
    (tmp_path / "plain.py").write_text(_PLAIN)
    terminal = _run(tmp_path, _start(start, "plain.py"))

    if start == "ebbflow run":
        _check(tmp_path, terminal, resumes)
    else:
        assert not (tmp_path / "runs").exists(), "it is no job of ours"


@pytest.mark.parametrize("fault", ["", "rank-kill@60%", "node-loss@60%", "notice@40%"])
@pytest.mark.parametrize(
    "words",
    [
        ["--set", "training.max_steps=20"],
        ["--set", "training.max_steps=40", "--set", "cluster.nodes=1"],
        ["--set", "training.max_steps=30", "--set", "parallel.mode=ddp"],
        ["images.yaml", "--set", "training.max_steps=30"],
        ["point-clouds.yaml", "--set", "training.max_steps=20"],
    ],
)
def test_a_configuration_shows_no_false_word(
    tmp_path: Path, resumes: Resumes, words: list[str], fault: str
) -> None:
    if words[0].endswith(".yaml"):
        words = [str(CONFIGS / words[0]), *words[1:]]
    rehearsal = ["--rehearse", fault] if fault else []
    command = [sys.executable, "-m", "ebbflow", "run", *words, *rehearsal]

    _check(tmp_path, _run(tmp_path, command), resumes, was_killed=bool(fault))


@pytest.mark.parametrize("name", ["nano_gpt", "resnet"])
def test_a_script_that_is_asked_to_leave_twice_shows_no_false_word(
    tmp_path: Path, resumes: Resumes, name: str
) -> None:
    script = attached(tmp_path, name)
    text = script.read_text()
    script.write_text(_ASKED + text)
    terminal = ""
    for code in (75, 75, 0):
        command = [*_start("python", script.name), "0.2"]  # seconds for each step
        terminal = _run(tmp_path, command, code=code)

    _check(tmp_path, terminal, resumes, was_killed=True)


def test_nine_of_ten_jobs_that_resume_equal_say_so(resumes: Resumes) -> None:
    print(resumes)
    if resumes.equal == 0:
        pytest.skip("no shape of script ran before")
    assert resumes.promised >= 0.9 * resumes.equal
    assert resumes.not_examined <= 0.05 * resumes.equal


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


def _check(folder: Path, terminal: str, resumes: Resumes, *, was_killed: bool = False) -> Surfaces:
    job = (folder / "runs" / "latest").resolve()
    surfaces = read_surfaces(job, terminal)
    assert find_false_words(surfaces, was_killed=was_killed) == []
    resumes.jobs += 1
    return surfaces


def _final_line(terminal: str) -> str:
    """Return the line that a shape prints at its end: its step and a hash of its weights."""
    (line, *_) = re.findall(r"final \d+ .*", terminal)
    return line

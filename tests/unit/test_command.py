"""The console command: what it lists, and what it says to a wrong word."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ebbflow import __version__
from ebbflow.command import COMMANDS, Home, main
from ebbflow.cost import __main__ as cost
from ebbflow.infra import __main__ as infra
from ebbflow.tryout.__main__ import load_tool

ROOT = Path(__file__).resolve().parents[2]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"ebbflow {__version__}\n"
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert re.findall(r"^  (\w+)  ", listed, re.MULTILINE) == list(COMMANDS)
    assert all(len(line) <= 100 for line in listed.splitlines())


@pytest.mark.parametrize(
    ("word", "hint"), [("reprot", "did you mean report?"), ("frobnicate", "ebbflow --help")]
)
def test_an_unknown_command_is_one_line_with_the_fix(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and repr(word) in said and hint in said


def test_every_command_of_the_rooms_is_listed_under_its_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for home, room in ((Home.INFRA, infra), (Home.COST, cost)):
        with pytest.raises(SystemExit):
            room.main(["--help"])
        for name in re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE):
            assert COMMANDS[name].home in (home, Home.BENCHMARKS), name
    for name, command in COMMANDS.items():
        if command.home is Home.TRYOUT:
            assert load_tool(name).__module__ == f"ebbflow.tryout.{name}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_knows_the_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if shutil.which(shell):
        assert (
            subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode
            == 0
        )
    assert main(["completion", "tcsh"]) == 2


def test_the_version_is_written_in_one_place() -> None:
    assert "version = attr: ebbflow.__version__" in (ROOT / "setup.cfg").read_text()
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text().replace("[", "").replace(
        "]", ""
    )

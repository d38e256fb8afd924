"""The console command: what it lists, and what it says to a wrong word."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ebbflow import __version__
from ebbflow.command import COMMANDS, Group, Home, _expand_tracker, main
from ebbflow.cost import __main__ as cost
from ebbflow.flows.command_line import FLAGS, RUN_OPTIONS
from ebbflow.flows.run_help import METAFLOWS, SECTIONS
from ebbflow.infra import __main__ as infra
from ebbflow.tryout.__main__ import load_tool

ROOT = Path(__file__).resolve().parents[2]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"ebbflow {__version__}\n"
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert main(["lab"]) == 0
    laboratory = capsys.readouterr().out
    assert re.findall(r"^  (\w+)  ", listed + laboratory, re.MULTILINE) == list(COMMANDS)
    assert all(len(line) <= 100 for line in (listed + laboratory).splitlines())
    headings = re.findall(r"^(\w.*)\n  ", listed, re.MULTILINE)
    assert headings == [group.value for group in Group if group is not Group.LAB]


def test_a_command_of_the_laboratory_also_keeps_its_short_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["completion", "bash"], ["lab", "completion", "bash"]):
        assert main(words) == 0
        assert "complete -W" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["job.yaml"], ["--config", "job.yaml"]),
        (["--yes", "job.yaml", "--set", "a=1"], ["--yes", "--config", "job.yaml", "--set", "a=1"]),
        (["--config", "job.yaml"], ["--config", "job.yaml"]),
        (["--config=job.yaml"], ["--config=job.yaml"]),
        (["--set", "data.tokenizer=x.yaml"], ["--set", "data.tokenizer=x.yaml"]),
        ([], []),
    ],
)
def test_a_configuration_file_alone_is_the_value_of_config(
    words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def record(_program: str, argv: list[str]) -> None:
        started.append(argv[2:])
        raise SystemExit

    monkeypatch.setattr(os, "execv", record)
    with pytest.raises(SystemExit):
        main(["run", *words])
    assert started == [["run", *expected]]


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


def test_the_help_of_run_names_every_option_of_ours_and_metaflows_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out

    own = {"--tracker", "--profile", "--memory-snapshot", "--nodes", "--ranks"}
    for option in {*RUN_OPTIONS, *FLAGS, *own}:
        assert f"  {option}" in shown
    headings = [line for line in shown.splitlines() if line in SECTIONS]
    assert headings == list(SECTIONS) and headings[-1] == METAFLOWS
    assert max(map(len, shown.splitlines())) <= 110


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--tracker", "jsonl"], '[{"type": "jsonl"}]'),
        (["--tracker=wandb", "--tracker", "mlflow"], '[{"type": "wandb"}, {"type": "mlflow"}]'),
    ],
)
def test_a_tracker_on_the_command_line_is_a_setting(words: list[str], setting: str) -> None:
    given = ["train.py", *words, "--", "--tracker", "theirs"]
    assert _expand_tracker(given) == [
        "train.py",
        "--set",
        f"trackers={setting}",
        "--",
        "--tracker",
        "theirs",
    ]


def test_an_unknown_tracker_is_refused_with_those_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--tracker", "comet"]) == 2
    assert capsys.readouterr().err == (
        "ebbflow run: --tracker takes one of wandb, mlflow, tensorboard, jsonl, and not 'comet'\n"
    )

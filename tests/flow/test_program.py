"""How the project's programs start: without their packages, on any terminal, from any directory,
with any order.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.config import ConfigError, load_config
from ebbflow.flows import options
from ebbflow.flows.command_line import CommandLine, reorder_words
from ebbflow.flows.options import parse_json_option, parse_overrides
from tests.support.flow import FLOW, ROOT

_DOORS = {
    "flow": [str(FLOW), "run"],
    "supervise": [str(ROOT / "ebbflow/flows" / "supervise.py"), "configs/laptop.yaml"],
    "infra": ["-m", "infra", "preflight"],
    "cost": ["-m", "cost", "plan", "configs/laptop.yaml"],
    "training": ["-m", "training", "examine", "configs/laptop.yaml"],
}


def run(
    *command: str, cwd: Path = ROOT, drop_privileges: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=_obey_permissions if drop_privileges else None,
    )


def run_command(*arguments: str) -> CommandLine:
    return CommandLine("train_flow.py", [], "run", [*arguments])


@pytest.mark.parametrize("door", _DOORS)
def test_a_missing_package_is_one_line_with_the_fix(door: str) -> None:
    done = run(sys.executable, "-S", *_DOORS[door])  # -S: without site-packages
    assert done.returncode == 3, done.stderr
    assert (
        len(done.stderr.splitlines()) == 1
        and " is not installed for " in done.stderr
        and "fix: " in done.stderr
    )


def test_another_error_keeps_its_traceback() -> None:
    program = (
        "from ebbflow.core.program import begin_program; begin_program(); import no_such_module"
    )
    done = run(sys.executable, "-c", program)
    assert done.returncode == 1 and "Traceback" in done.stderr and "no_such_module" in done.stderr


def test_a_plan_is_readable_on_an_ascii_terminal() -> None:
    done = run(
        sys.executable, "-m", "cost", "plan", "configs/laptop.yaml", PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (
        done.stdout.isascii()
        and lines[0].startswith("+- capacity plan -")
        and lines[1].startswith("| 240 steps")
    )


def test_unprintable_characters_are_printed_as_escapes() -> None:
    program = (
        r"from ebbflow.core.program import begin_program; begin_program(); print('│ 2 × é 日 "
        r"\udc80')"
    )
    ascii_only = run(sys.executable, "-c", program, PYTHONIOENCODING="ascii")
    assert ascii_only.stdout == "| 2 x \\xe9 \\u65e5 \\udc80\n", ascii_only.stderr
    utf8 = run(sys.executable, "-c", program, PYTHONIOENCODING="utf-8")
    assert utf8.stdout == "│ 2 × é 日 \\udc80\n", utf8.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--set a.b=1 run", "run --set a.b=1"),
        ("--set=a.b=1 --config x.yaml run --job j", "run --set=a.b=1 --config x.yaml --job j"),
        ("--job run run", "run --job run"),
        ("--from-scratch --job j run", "run --from-scratch --job j"),
        ("--with batch --set a=1 run --with x", "--with batch run --set a=1 --with x"),
        ("--no-pylint run --set a=1", "--no-pylint run --set a=1"),
        ("card view report", "card view report"),
        ("", ""),
    ],
)
def test_options_of_run_may_precede_it(typed: str, meant: str) -> None:
    assert reorder_words(typed.split()) == meant.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--set training.max_steps=5", "--set is an option of run; fix: "),
        (
            "--set training.max_steps=none run",
            "--set training.max_steps=none:1:20: training.max_steps must be",
        ),
        ("resume --set training.max_steps=5", "resume takes no --set: "),
        ("card view report", "no run is recorded in "),
        ("--with kubernetes argo-workflows create", "Argo Workflows cannot run this flow, "),
        ("step-functions create --only-json", "AWS Step Functions cannot run this flow, "),
    ],
)
def test_invalid_arguments_are_reported_without_a_traceback(
    words: str, message: str, tmp_path: Path
) -> None:
    done = run(
        sys.executable, str(FLOW), *words.split(), METAFLOW_DATASTORE_SYSROOT_LOCAL=str(tmp_path)
    )
    assert (
        done.returncode == 2 and done.stderr.startswith(message) and "Traceback" not in done.stderr
    )


def test_the_help_of_run_shows_its_own_options() -> None:
    text = run(sys.executable, str(FLOW), "run", "--help").stdout
    assert "--set KEY=VALUE" in text and "--config FILE" in text and "--job NAME" in text
    assert "[required]" not in text and "JSON" not in text


def test_the_project_is_the_users_folder_or_the_checkout_that_contains_it(tmp_path: Path) -> None:
    command = (
        sys.executable,
        "-c",
        "from ebbflow.core.program import PROJECT_ROOT; print(PROJECT_ROOT)",
    )
    places = [tmp_path, ROOT / "docs", ROOT]
    found = [
        run(*command, cwd=place, PYTHONPATH=str(ROOT), EBBFLOW_PROJECT="").stdout
        for place in places
    ]
    assert found == [f"{tmp_path}\n", f"{ROOT}\n", f"{ROOT}\n"]
    assert run(*command, PYTHONPATH=str(ROOT), EBBFLOW_PROJECT="/mine").stdout == "/mine\n"


def test_a_job_that_an_earlier_version_left_in_the_checkout_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(options, "IMPORT_ROOT", tmp_path / "checkout")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkout/runs/jobs/old").mkdir(parents=True)
    (tmp_path / "my.yaml").write_text("cluster: {nodes: 1}\n")
    with pytest.raises(SystemExit) as left:
        options.check_run_options(run_command("--config", "my.yaml", "--job", "old"))
    said = capsys.readouterr().err
    assert (
        left.value.code == 2 and f"continue it with EBBFLOW_PROJECT={tmp_path}/checkout" in said
    ), said
    options.check_run_options(run_command("--config", "my.yaml", "--job", "new"))


def test_records_of_a_read_only_project_are_the_users_own(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    program = (
        "import pathlib, sys; from ebbflow.core.layout import *; project = "
        "pathlib.Path(sys.argv[1])\nprint(runs_folder(project)); print(records_root(project, "
        "METAFLOW_FOLDER))"
    )
    command = (sys.executable, "-c", program, str(project))
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    writable = run(*command, drop_privileges=True, **state)
    assert writable.stdout.split() == [str(project / "runs"), str(project)], writable.stderr
    project.chmod(0o555)
    closed = run(*command, drop_privileges=True, **state)
    assert closed.stdout.split() == [
        str(tmp_path / "state/ebbflow/runs"),
        str(tmp_path / "state/ebbflow"),
    ]
    assert run(*command, drop_privileges=True, EBBFLOW_RUNS="/mine").stdout.startswith("/mine\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_program_starts_with_closed_streams(closed: str, tmp_path: Path) -> None:
    program = (
        "import ebbflow.core.program as p; p.begin_program(); print(1); open('written', "
        "'w').write('whole')"
    )
    command = ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, program]
    done = run(*command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "written").read_text() == "whole", (
        "the file took no descriptor that is printed to"
    )


def test_a_log_on_a_full_disk_costs_the_output_alone(tmp_path: Path) -> None:
    program = "from ebbflow.core.process import ignore_lost_readers; ignore_lost_readers()\n"
    program += (
        "for number in range(10_000): print(number, flush=True)\nopen('written', "
        "'w').write('whole')"
    )
    done = run(
        "sh",
        "-c",
        '"$0" -c "$1" >/dev/full',
        sys.executable,
        program,
        cwd=tmp_path,
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "written").exists()


def test_arguments_from_metaflows_runner_are_read_as_given() -> None:
    """A string arrives in quotes, a list and a dictionary as JSON."""
    assert (
        parse_json_option('"configs/laptop.yaml"')
        == "configs/laptop.yaml"
        == parse_json_option("configs/laptop.yaml")
    )
    assert parse_json_option("5") == "5", "a file may have that name"
    typed = ["training.learning_rate=0.001", 'data.path="a b"', "batch.tags={team: x}"]
    assert (
        parse_overrides(json.dumps({"training.learning_rate": 1e-3, "data.path": "a b"}))
        == typed[:2]
    )
    assert parse_overrides(json.dumps(typed)) == typed and parse_overrides(typed[2]) == typed[2:]


def test_a_configuration_given_as_a_dictionary_is_checked_like_a_file() -> None:
    given = {"model": {"hidden_size": 64, "num_heads": 4}, "cluster": {"nodes": 1}}
    loaded = load_config(json.dumps(given, indent=1), ["model.num_layers=3"], project_root=ROOT)
    assert (
        loaded.config.model.hidden_size,
        loaded.config.model.num_layers,
        loaded.config.cluster.nodes,
    ) == (64, 3, 1)
    assert loaded.sources["model.hidden_size"] == "--config:3"
    with pytest.raises(
        ConfigError, match=r"^--config:\d:\d+: model\.hidden_size must be divisible by"
    ):
        load_config(
            json.dumps({"model": {"hidden_size": 64, "num_heads": 5}}, indent=1), project_root=ROOT
        )


def _obey_permissions() -> None:
    """Root may write anywhere until it loses CAP_DAC_OVERRIDE (1) and CAP_DAC_READ_SEARCH (2)."""
    for capability in (1, 2):
        # PR_CAPBSET_DROP; fails, as it may, where there is none
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)

"""Slurm's environment of a task: node lists, task counts, and torchrun's variables made from it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.infra.slurm.environment import (
    SlurmEnvironmentError,
    SlurmTask,
    adopt_slurm_environment,
    is_own_program,
    parse_node_list,
    parse_task_counts,
    stop_signals,
)

ROOT = Path(__file__).resolve().parents[2]
# What `srun -N3 -n5` sets for the second task of the second node
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_JOB_NODELIST": "localhost,n[1-3,7]",
    "SLURM_STEP_NODELIST": "localhost,n[1,7]",
    "SLURM_TASKS_PER_NODE": "8(x5)",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("gpu[008-011]-ib,login", ["gpu008-ib", "gpu009-ib", "gpu010-ib", "gpu011-ib", "login"]),
        ("r[1-2]c[01-02]", ["r1c01", "r1c02", "r2c01", "r2c02"]),
        ("a[1,3],b,c[09-10].site.edu", ["a1", "a3", "b", "c09.site.edu", "c10.site.edu"]),
    ],
)
def test_a_node_list_names_its_nodes(text: str, names: list[str]) -> None:
    assert parse_node_list(text) == names


@pytest.mark.parametrize("text", ["", "n[1-3", "n1-3]", "n[3-1]", "n[a-c]", "n[]", "n[1-]"])
def test_a_broken_node_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SlurmEnvironmentError, match=r"node list .*; fix: ") as caught:
        parse_node_list(text)
    assert "\n" not in str(caught.value) and repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("4(x2),1", [4, 4, 1]), ("2,1(x3)", [2, 1, 1, 1])]
)
def test_task_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert parse_task_counts(text) == counts


def test_a_task_gets_the_variables_of_torchrun() -> None:
    environment = dict(TASK)
    adopt_slurm_environment(environment)
    assert {name: environment[name] for name in environment if name not in TASK} == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(15_000 + (4711 * 7 + 2) % 15_000),
    }


def test_variables_of_torchrun_and_single_tasks_are_left_alone() -> None:
    under_torchrun = {**TASK, "RANK": "0"}
    alone = {**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    alone |= {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    in_batch_shell = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}
    for environment in (under_torchrun, alone, in_batch_shell, {}):
        before = dict(environment)
        adopt_slurm_environment(environment)
        assert environment == before


def test_a_job_on_one_node_meets_on_the_loopback_interface() -> None:
    task = SlurmTask.from_environment(
        {
            **TASK,
            "SLURM_NODEID": "0",
            "SLURM_STEP_NODELIST": "n1",
            "SLURM_STEP_TASKS_PER_NODE": "5",
        }
    )
    assert task is not None and task.torchrun_variables()["MASTER_ADDR"] == "127.0.0.1"


def test_contradicting_variables_are_refused() -> None:
    with pytest.raises(
        SlurmEnvironmentError, match=r"node 1 of 1 in 'n1'.*; fix: start the script"
    ):
        SlurmTask.from_environment({**TASK, "SLURM_STEP_NODELIST": "n1"})


def test_importing_ebbflow_in_a_script_sets_them_and_in_our_commands_does_not(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, ebbflow\nprint(os.environ.get('RANK'))\n")
    environment = {**TASK, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "3\n"
    assert not is_own_program(command)
    assert is_own_program([sys.executable, "-m", "ebbflow.training", "job.yaml"])
    assert is_own_program([sys.executable, "-u", "/venv/bin/ebbflow", "run"])


@pytest.mark.slow
def test_a_script_with_an_unreadable_node_list_gets_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch, ebbflow\nebbflow.attach(torch.nn.Linear(1, 1))\n")
    environment = {**TASK, "SLURM_STEP_NODELIST": "n[1-", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ebbflow: Slurm's node list 'n[1-' cannot be read at '")


def test_the_signal_before_the_time_limit_is_a_notice_under_slurm_only() -> None:
    assert stop_signals(TASK) == (signal.SIGTERM, signal.SIGUSR1)
    assert stop_signals({}) == (signal.SIGTERM,)

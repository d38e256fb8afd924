"""`@ebbflow`: bad input of a user's flow is refused in one line before anything runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from metaflow import FlowSpec

from ebbflow.flows.own_flow.deployment_plan import print_deployment_plans
from ebbflow.flows.own_flow.script_arguments import ArgumentError, ScriptOptions
from ebbflow.flows.own_flow.step_checks import (
    CheckedStep,
    OwnFlowError,
    TrainingCall,
    add_requirements,
)
from ebbflow.flows.own_flow.step_options import OptionError, StepOptions
from ebbflow.flows.own_flow.task_job import TaskJob, share_gpus
from ebbflow.flows.own_flow.task_name import TaskName
from ebbflow.flows.own_flow.trained_model import TrainedModel
from ebbflow.flows.own_flow.training_settings import check_configurations, make_settings
from ebbflow.training.attach.script import explain_missing_file
from ebbflow.training.errors import describe_exception

ROOT = Path(__file__).resolve().parents[2]
FLOW = """
from metaflow import FlowSpec, current, ebbflow, kubernetes, step

class MyFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.train{called_with})

    {decorators}
    @step
    def train(self):
        self.model = {training}
        self.next(self.join)

    @step
    def join(self{inputs}):
        self.next(self.end)

    @step
    def end(self):
        pass

if __name__ == "__main__":
    MyFlow()
"""
SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--max-steps")
parser.parse_args()
"""


def check(folder: Path, *words: str, **parts: str) -> tuple[int, str]:
    """Return the exit code of `flow.py check` and its text in one line."""
    filled = {
        "called_with": "",
        "decorators": "@ebbflow",
        "training": 'current.ebbflow.run("train.py", lr=0.1, max_steps=3)',
        "inputs": "",
        "script": SCRIPT,
        **parts,
    }
    (folder / "flow.py").write_text(FLOW.format(**filled))
    (folder / "train.py").write_text(filled["script"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "METAFLOW_USER": "tester"}
    done = subprocess.run(
        [sys.executable, "flow.py", *(words or ("check",))],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_a_step_with_ebbflow_passes_metaflows_check_alone_and_with_num_parallel(
    tmp_path: Path,
) -> None:
    code, text = check(tmp_path)
    assert code == 0, text
    code, text = check(tmp_path, training="min('resnet', key=len), print('x'), repr(run('resnet'))")
    assert code == 0, f"a function of the user's is no training: {text}"
    code, text = check(
        tmp_path, called_with=", num_parallel=2", inputs=", inputs", decorators="@ebbflow(budget=3)"
    )
    assert code == 0, text


def make_step(folder: Path) -> CheckedStep:
    return CheckedStep(
        name="train",
        place="flow.py:9",
        options=StepOptions(),
        store=str(folder),
        datastore="local",
        flow_folder=folder,
        backend=None,
        is_gang=False,
        is_caught=False,
        nodes=1,
        calls=(),
        files=(),
    )


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            {"decorators": "@ebbflow(bugdet=3)"},
            r"flow.py:11: @ebbflow of step train: bugdet is no option .*fix: use one of budget,",
        ),
        (
            {"decorators": "@ebbflow(budget=-1)"},
            r"flow.py:11: @ebbflow of step train: budget=-1 is no number above 0; fix: ",
        ),
        (
            {"decorators": "@ebbflow(25)"},
            r"flow.py:11: @ebbflow of step train: 25 has no name; fix: .*budget=25",
        ),
        (
            {"decorators": '@ebbflow(deadline="8 o\'clock")'},
            r"deadline=.* is no time; fix: hours as a number",
        ),
        (
            {"decorators": '@ebbflow(store="http://bucket/x")'},
            r"store 'http://bucket/x' is a web address; fix: s3://",
        ),
        (
            {"decorators": '@ebbflow(config="missing.yaml")'},
            r"config='missing.yaml' is no file in .*; fix: ",
        ),
        (
            {"training": 'current.ebbflow.run("tran.py")'},
            r"flow.py:12: run\('tran.py'\): no such file in .*; fix: ",
        ),
        (
            {"training": 'current.ebbflow.run("train.py", learning_rate=3)'},
            r"flow.py:12: train.py has no option for learning_rate=; fix: one of --lr, --max-steps",
        ),
        (
            {"training": 'current.ebbflow.train("job.yaml", sets={})'},
            r"flow.py:12: train\('job.yaml'\): no such file",
        ),
        (
            {"decorators": "@ebbflow(budget_of_all=40)"},
            r"flow.py:11: .*budget_of_all is for the trials of a foreach.*; fix: budget=40",
        ),
        (
            {
                "decorators": "@ebbflow(budget_of_all=40)",
                "called_with": ', foreach="rates"',
                "inputs": ", inputs",
                "training": "current.ebbflow.attach(1)",
            },
            r"budget_of_all needs the cost of a trial .*; fix: move the loop into a script",
        ),
    ],
)
@pytest.mark.slow
def test_bad_input_is_refused_with_place_and_fix(
    tmp_path: Path, parts: dict[str, str], text: str
) -> None:
    code, output = check(tmp_path, **parts)
    assert code == 1
    assert re.search(text, output), output
    assert "Traceback" not in output


@pytest.mark.slow
def test_the_decorator_and_its_options_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    words = ("--with=ebbflow:bugdet=3,ranks=2", "check")
    code, output = check(tmp_path, *words, decorators="")
    assert code == 1
    assert re.search(r"@ebbflow of step \w+: bugdet is no option of @ebbflow; fix: ", output), (
        output
    )
    both = check(tmp_path, "--with=ebbflow:budget=3", "check")
    assert both[0] == 0, both[1]


def test_a_decorator_of_the_command_line_is_refused_in_a_deployment(tmp_path: Path) -> None:
    """The deployed workflow lacked it: each step trained without commits and budget."""
    words = ("--with=ebbflow:budget=3", "step-functions", "create", "--only-json")
    code, output = check(tmp_path, *words, decorators="")
    assert code == 1
    assert "step-functions create leaves out --with ebbflow; fix: write @ebbflow above" in output
    assert "Traceback" not in output
    assert "planned" not in output


def test_a_configuration_that_is_no_path_is_refused(tmp_path: Path) -> None:
    task = TaskName(flow="F", run="1", origin_run=None, step="train", task="2", attempt=0)
    job = TaskJob(cast(FlowSpec, None), task, make_step(tmp_path))
    with pytest.raises(
        OwnFlowError, match=r"train takes the path of a file, not a dict; fix: set="
    ):
        job.train(cast(str, {"training": {"max_steps": 4}}))


def test_a_step_on_kubernetes_is_planned_for_it_unless_the_file_says_otherwise(
    tmp_path: Path,
) -> None:
    step = replace(make_step(tmp_path), backend="kubernetes")
    file = tmp_path / "job.yaml"
    file.write_text("training: {max_steps: 4}\n")
    assert make_settings(step, nodes=2, file=file).config.cluster.plan_for == "kubernetes"
    file.write_text("cluster: {plan_for: batch}\n")
    assert make_settings(step, nodes=2, file=file).config.cluster.plan_for == "batch"
    file.write_text("cluster: {plan_for: local}\n")  # a file that is also used on a laptop
    assert make_settings(step, nodes=2, file=file).config.cluster.plan_for == "kubernetes"
    owned = replace(make_step(tmp_path), options=StepOptions(usd_per_node_hour=2.0))
    assert make_settings(owned, nodes=1, file=None).config.cluster.plan_for == "local"


@pytest.mark.slow
def test_a_deployment_is_refused_for_what_is_known_and_computed_arguments_wait_for_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text("training: {max_steps: 400}\n")
    (tmp_path / "train.py").write_text("import ebbflow\n")
    run = TrainingCall(
        kind="run",
        file="train.py",
        line=12,
        arguments=(),
        overrides={},
        words=(),
        values=None,
    )
    train = replace(run, kind="train", file="job.yaml")
    step = replace(make_step(tmp_path), backend="kubernetes", calls=(run,))
    print_deployment_plans(replace(step, nodes=None))
    print_deployment_plans(replace(step, options=StepOptions(deadline=0.001)))
    print_deployment_plans(replace(step, options=StepOptions(budget=9)))
    printed = capsys.readouterr()
    assert printed.out == "", "it has the workflow's JSON"
    first, second, third = printed.err.splitlines()
    waits = "@ebbflow: step train, train.py: planned when the step runs, because "
    assert first == f"{waits}num_parallel is computed"
    assert second == f"{waits}the training was not measured"
    assert "; hours unknown, because the training was not measured; budget $9.00, no" in third
    step = replace(step, calls=(train,), options=StepOptions(budget=0.0001))
    with pytest.raises(OwnFlowError, match=r"flow.py:9: step train, job.yaml: budget: .* \(.*\)"):
        print_deployment_plans(step)


def test_two_steps_with_one_job_name_are_refused(tmp_path: Path) -> None:
    both = '@ebbflow(name="train")\n    @step\n    def other(self):\n        self.next(self.train)'
    code, output = check(tmp_path, decorators=f"{both}\n\n    @ebbflow", called_with="".join(()))
    assert code == 1
    assert "has the job name 'train' too" in output


def test_a_store_in_a_folder_is_refused_for_a_container(tmp_path: Path) -> None:
    words = ("--datastore=s3", "--datastore-root=s3://bucket/flows", "check")
    code, output = check(tmp_path, *words, decorators='@kubernetes\n    @ebbflow(store="runs")')
    assert code == 1
    assert re.search(r"store .*/runs is a folder, which the container does not keep; fix", output)


@pytest.mark.slow
def test_a_file_that_a_script_names_and_no_container_gets_is_told_with_the_option_that_packs_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("data/rows.csv", "words.json", "unnamed.csv"):
        (tmp_path / name).touch()
    script = f"{SCRIPT}rows = open('data/rows.csv'), open('words.json'), open('written.csv', 'w')\n"
    remote = '@kubernetes\n    @ebbflow(store="s3://bucket/x")'
    words = ("--datastore=s3", "--datastore-root=s3://bucket/flows", "check")
    code, output = check(tmp_path, *words, script=script, decorators=remote)
    assert code == 0, output
    assert (
        "@ebbflow: flow.py:12: train.py names data/rows.csv, words.json, which the code package "
        "leaves out; fix, if it reads them: python flow.py --package-suffixes=.csv,.json …"
    ) in output
    packed = ("--package-suffixes=.csv,.json", *words)
    code, output = check(tmp_path, *packed, script=script, decorators=remote)
    assert (code, "leaves out" in output) == (0, False), output
    code, output = check(tmp_path, script=script)
    assert (code, "leaves out" in output) == (0, False), output


def test_a_missing_program_and_one_of_two_paths_are_left_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nvcc").mkdir()
    (tmp_path / "model.tmp").touch()
    attempts = [
        lambda: subprocess.run(["nvcc-of-nobody"], check=False),
        lambda: os.replace("model.tmp", "out/model.pt"),
    ]
    for attempt in attempts:
        with pytest.raises(FileNotFoundError) as raised:
            attempt()
        assert explain_missing_file(raised.value, tmp_path / "train.py") == ""


def test_an_exception_that_answers_any_attribute_is_described() -> None:
    class ApiError(Exception):
        def __getattr__(self, name: str) -> None:
            return None

    assert describe_exception(ApiError("refused")) == "ApiError: refused"


def test_a_relative_path_that_is_missing_is_told_with_its_folder_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.csv").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    told = []
    for name in ("beside.csv", "nowhere.csv", str(tmp_path / "absolute.csv")):
        with pytest.raises(FileNotFoundError) as raised:
            Path(name).read_text()
        note = explain_missing_file(raised.value, tmp_path / "train.py")
        if note:
            raised.value.add_note(note)
        told.append(describe_exception(raised.value))
    missing = "FileNotFoundError: [Errno 2] No such file or directory: "
    place = f"; relative to the working directory {tmp_path}/elsewhere"
    assert told == [
        f"{missing}'beside.csv'{place}; fix: read Path(__file__).parent / 'beside.csv', which exists",
        f"{missing}'nowhere.csv'{place}",
        f"{missing}'{tmp_path}/absolute.csv'",
    ]


def test_a_step_that_spin_runs_here_needs_no_store_for_containers(tmp_path: Path) -> None:
    code, output = check(tmp_path, "spin", "train", decorators="@kubernetes\n    @ebbflow")
    assert code == 1
    assert "is a folder, which the container does not keep" not in output
    assert "Ignoring Step decorator 'kubernetes'" in output


def test_num_parallel_against_cluster_nodes_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("cluster:\n  nodes: 3\n")
    code, output = check(
        tmp_path,
        called_with=", num_parallel=2",
        inputs=", inputs",
        training='current.ebbflow.train("job.yaml")',
    )
    assert code == 1
    assert re.search(
        r"2 nodes \(num_parallel\), and job.yaml:2 has cluster.nodes 3; fix: ", output
    ), output


def test_a_teams_budget_which_a_step_would_ignore_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("cost:\n  team_file: store\n")
    step = make_step(tmp_path)
    with pytest.raises(OwnFlowError, match=r"flow.py:9: job.yaml:2 has cost.team_file, .*; fix: "):
        make_settings(step, nodes=1, file=tmp_path / "job.yaml")


def test_a_gang_on_batch_whose_fixes_of_metaflow_are_refused_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = replace(make_step(tmp_path), backend="batch", is_gang=True)
    make_settings(gang, nodes=2, file=None)
    monkeypatch.setenv("EBBFLOW__BATCH__METADATA_FIXES", "refuse")
    with pytest.raises(
        OwnFlowError,
        match=r"flow.py:9: .*METADATA_FIXES has batch.metadata_fixes: refuse, .*; fix: ",
    ):
        check_configurations(gang)
    check_configurations(replace(gang, is_gang=False))
    with monkeypatch.context() as words:
        words.setattr("sys.argv", ["flow.py", "--metadata=service", "run"])
        check_configurations(gang)
    monkeypatch.setenv("METAFLOW_DEFAULT_METADATA", "service")
    check_configurations(gang)


def test_options_accept_units_and_texts_of_a_command_line() -> None:
    parsed = StepOptions.parse({"deadline": "90m", "budget": "2.5"})
    assert (parsed.deadline, parsed.budget) == (1.5, 2.5)
    assert StepOptions.parse({"deadline": "2d"}).deadline == 48
    assert StepOptions.parse({"deadline": 3}).deadline == 3
    for given in ({"ranks": 0}, {"ranks": True}, {"name": "a/b"}, {"deadline": "inf"}):
        with pytest.raises(OptionError, match="fix: "):
            StepOptions.parse(given)


def test_arguments_become_the_words_that_the_script_reads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--max-steps')\n"
        "parser.add_argument('--weight_decay')\n"
        "parser.add_argument('--quiet', action='store_true')\n"
        "parser.add_argument('--amp', action=argparse.BooleanOptionalAction)\n"
        "parser.parse_args()\n"
    )
    options = ScriptOptions.read(script)
    words = options.words(
        {"max_steps": 3, "weight_decay": 0.1, "quiet": False, "amp": False, "sizes": [1, 2]}
    )
    expected = "--max-steps=3 --weight_decay=0.1 --no-amp --sizes 1 2"
    assert words == expected.split()
    assert options.words({"quiet": True, "max_steps": None}) == ["--quiet"]
    assert options.find_unknown({"max_steps": 1, "sizes": 1}) == "sizes"
    script.write_text(script.read_text().replace("parse_args()", "parse_known_args()"))
    assert ScriptOptions.read(script).find_unknown({"sizes": 1}) is None


def test_each_kind_of_flag_gets_the_words_that_argparse_reads_as_meant(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--no-cache', action='store_false', dest='cache')\n"
        "parser.add_argument('--amp', type=bool, default=True)\n"
        "parser.add_argument('--note')\n"
        "parser.parse_args()\n"
    )
    options = ScriptOptions.read(script)

    assert options.words({"no_cache": True}) == ["--no-cache"]
    assert options.words({"no_cache": False}) == []
    assert options.words({"amp": False}) == ["--amp="]
    assert options.words({"amp": True}) == ["--amp=True"]
    assert options.words({"note": "-1"}) == ["--note=-1"]
    with pytest.raises(ArgumentError, match="word for False is unknown; fix: pass that word"):
        options.words({"bf16": False})


def test_gangs_of_one_step_have_ports_of_their_own() -> None:
    task = TaskName(flow="F", run="1", origin_run=None, step="train", task="2", attempt=0)

    ports = {task.rendezvous_port([trial]) for trial in range(8)}

    assert len(ports) == 8 and all(1024 < port < 32768 for port in ports)


def test_nodes_of_a_local_gang_share_out_the_gpus_of_their_machine() -> None:
    gpus = ["0", "1", "2", "3", "4"]

    assert [share_gpus(gpus, node, 2) for node in range(2)] == [["0", "1"], ["2", "3"]]
    assert [share_gpus(["GPU-a"], node, 3) for node in range(3)] == [["GPU-a"]] * 3
    assert share_gpus([], 0, 2) == []


def test_a_parser_that_other_code_extends_accepts_any_option(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, lib\n"
        "parser = argparse.ArgumentParser()\n"
        "lib.add_options(parser)\n"
        "parser.add_argument('--lr')\n"
        "parser.parse_args()\n"
    )
    assert ScriptOptions.read(script).find_unknown({"anything": 1}) is None


def test_metaflow_imports_no_more_than_the_decorator_and_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, metaflow; own = sorted(name for name in sys.modules if "
        "name.startswith('ebbflow')); heavy = {'torch', 'pydantic', 'obstore', 'boto3', 'numpy'}; "
        "print(own, heavy & sys.modules.keys())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    expected = [
        "ebbflow",
        "ebbflow.core",
        "ebbflow.core.renamed_modules",
        "ebbflow.flows",
        "ebbflow.flows.own_flow",
        "ebbflow.flows.own_flow.step_mutator",
        "ebbflow.flows.own_flow.task_decorator",
    ]
    assert done.stdout.strip() == f"{expected} set()", done.stdout + done.stderr


def test_metaflow_works_where_a_code_package_has_the_registration_and_not_ebbflow(
    tmp_path: Path,
) -> None:
    # Other tests may compile the file meanwhile
    shutil.copytree(
        ROOT / "metaflow_extensions",
        tmp_path / "metaflow_extensions",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    code = (
        "import sys; from pathlib import Path\n"
        "sys.path = [p for p in sys.path if p and not Path(p, 'ebbflow').is_dir()]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import metaflow; from metaflow import FlowSpec, retry, step\n"
        "print('ebbflow' in sys.modules, hasattr(metaflow, 'ebbflow'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Metaflow finds the registration of an editable installation too, and refuses to have it twice
    environment["METAFLOW_EXTENSIONS_SEARCH_DIRS"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("False False", ""), done.stdout + done.stderr


def test_the_packages_of_ebbflow_are_added_to_pypi_and_named_for_conda() -> None:
    from metaflow.plugins.pypi.conda_decorator import CondaStepDecorator
    from metaflow.plugins.pypi.pypi_decorator import PyPIStepDecorator

    pypi = PyPIStepDecorator({"packages": {"Torch": "2.9.0", "ruamel_yaml": ">=0.19"}}, True)
    add_requirements([pypi], "flow.py:3")
    packages = pypi.attributes["packages"]
    assert packages["Torch"] == "2.9.0"
    assert packages["obstore"].startswith(">=")
    assert packages.keys().isdisjoint({"torch", "ruamel.yaml", "metaflow"})
    conda = CondaStepDecorator({"packages": {"pytorch": "2.9.0"}}, True)
    with pytest.raises(OwnFlowError, match=r"flow.py:3: @conda lacks .*obstore.*; fix: "):
        add_requirements([conda], "flow.py:3")


def test_a_trained_model_of_an_other_version_can_be_read() -> None:
    model = TrainedModel(
        job="job",
        store="s3://bucket/prefix",
        outcome="completed",
        commit="commits/1/2/3.json",
        best=None,
        steps=3,
        weights_sha256=None,
        usd=1.0,
        price_kind="simulated",
        hours=1.0,
        interruptions=0,
        report={},
    )
    make, (data,) = model.__reduce__()
    assert make({**data, "of_a_later_version": 1}) == model
    assert model.uri == "s3://bucket/prefix/jobs/job/commits/1/2/3.json"
    assert model.best_uri is None

"""Where each value comes from, the environment as one of the places, and names of a user's own in
workload_options.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.config import ConfigError, LoadedConfig, RunConfig, load_config
from ebbflow.core.config.load import render_sources, values_with_sources
from ebbflow.core.events import CONFIGURED
from ebbflow.core.program import DEFAULT_CONFIG
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.render_text import render as render_text
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows import options
from ebbflow.flows.command_line import CommandLine
from tests.support.timelines import event

ROOT = Path(__file__).resolve().parents[2]


def load(folder: Path, text: str, *overrides: str, **environment: str) -> LoadedConfig:
    (folder / "job.yaml").write_text(text)
    project = folder / "project"
    return load_config(
        "job.yaml", overrides, project_root=project, cwd=folder, environment=environment
    )


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(tmp_path: Path) -> None:
    text = "model:\n  num_heads: 2\n  num_layers: 2\n  hidden_size: 64\n"
    loaded = load(
        tmp_path,
        text,
        "model.num_layers=6",
        EBBFLOW__MODEL__NUM_LAYERS="5",
        EBBFLOW__MODEL__NUM_HEADS="8",
        EBBFLOW__TRAINING__SCHEDULER="{type: wsd}",
        EBBFLOW__COST__BUDGET_USD="null",
        EBBFLOW_RUNS="/elsewhere",  # one underscore: another matter
    )
    model = loaded.config.model
    assert (model.num_heads, model.num_layers, model.hidden_size) == (8, 6, 64)
    assert loaded.config.training.scheduler.type == "wsd"
    assert loaded.sources["model.num_layers"] == "--set"
    assert loaded.sources["model.num_heads"] == "environment EBBFLOW__MODEL__NUM_HEADS"
    assert (
        loaded.sources["training.scheduler.type"]
        == "environment EBBFLOW__TRAINING__SCHEDULER__TYPE"
    )
    assert loaded.sources["model.hidden_size"] == "job.yaml:4"
    assert loaded.sources["model.vocab_size"] == "default"


def test_the_environment_is_that_of_the_process_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW__TRAINING__SEED", "7")
    (tmp_path / "job.yaml").write_text("")
    assert load_config(tmp_path / "job.yaml", project_root=tmp_path).config.training.seed == 7
    monkeypatch.setenv("EBBFLOW__TRAINING__SED", "7")
    with pytest.raises(ConfigError, match="environment EBBFLOW__TRAINING__SED:1:1: unknown key"):
        load_config(tmp_path / "job.yaml", project_root=tmp_path)


def test_a_rule_names_the_last_source_of_a_value(tmp_path: Path) -> None:
    for environment, overrides, blamed in (
        ({}, [], "job.yaml:1:22"),
        ({"EBBFLOW__MODEL__NUM_HEADS": "9"}, [], "environment EBBFLOW__MODEL__NUM_HEADS:1:27"),
        (
            {"EBBFLOW__MODEL__NUM_HEADS": "9"},
            ["model.hidden_size=100"],
            "--set model.hidden_size=100:1:19",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, "model: {hidden_size: 770, num_heads: 12}", *overrides, **environment)
        assert [str(problem.place) for problem in caught.value.problems] == [blamed]


def test_paths_from_the_environment_are_relative_to_the_working_directory(tmp_path: Path) -> None:
    text = "store: results\ntraining: {initial_weights: w.safetensors}\ndata: {tokenizer: t.json}\n"
    config = load(tmp_path, text, EBBFLOW__STORE="here", EBBFLOW__COST__PRICES="p.json").config
    assert config.store == str(tmp_path / "here")
    assert config.cost.prices == str(tmp_path / "p.json")
    assert config.data.tokenizer == str(tmp_path / "project" / "t.json")
    assert config.training.initial_weights == str(tmp_path / "project" / "w.safetensors")


def test_options_of_a_workload_are_of_any_name_and_merge_key_by_key(tmp_path: Path) -> None:
    text = (
        "workload: mine:Own\nworkload_options:\n  width: 32\n  rate: 1.0\n  fast: true\n  name: "
        "x\n  code: '3'\n"
    )
    loaded = load(
        tmp_path,
        text,
        "workload_options.width=64",
        "workload_options={depth: 2}",
        EBBFLOW__WORKLOAD_OPTIONS__RATE="2",
    )
    assert loaded.config.workload_options == {
        "width": 64,
        "rate": 2,
        "fast": True,
        "name": "x",
        "code": "3",
        "depth": 2,
    }
    assert loaded.sources["workload_options.width"] == "--set"
    assert loaded.sources["workload_options.fast"] == "job.yaml:5"
    assert "workload_options" not in loaded.sources
    again = RunConfig.model_validate_json(json.dumps(loaded.config.model_dump(mode="json")))
    assert again == loaded.config
    kinds = {name: type(value) for name, value in again.workload_options.items()}
    assert (kinds["rate"], kinds["fast"], kinds["code"]) == (int, bool, str)


def test_every_value_is_shown_with_its_source(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, "workload: mine:Own\nworkload_options: {width: 3}\n", "data.suffixes=[.txt]"
    )
    rows = values_with_sources(loaded.config.model_dump(mode="json"), loaded.sources)
    told = {row["key"]: (row["value"], row["source"]) for row in rows}
    assert told["workload_options.width"] == (3, "job.yaml:2")
    assert told["data.suffixes"] == ([".txt"], "--set")
    assert told["cost.deadline_hours"] == (None, "default")
    short = render_sources(rows, defaults=False)
    assert short.splitlines()[0].split() == ["workload", "mine:Own", "job.yaml:1"]
    assert short.splitlines()[-1] == f"… and {len(rows) - 3} defaults"
    assert len(render_sources(rows).splitlines()) == len(rows)


def test_the_report_keeps_them_and_the_page_folds_defaults_away() -> None:
    settings = [
        {"key": "store", "value": "runs", "source": "default"},
        {"key": "data.path", "value": "<script>alert(1)</script>", "source": "--set"},
    ]
    report = build_report([event(CONFIGURED, 1.0, settings=settings)])
    assert report.configuration == settings
    assert RunReport.from_json(json.loads(json.dumps(report.to_json()))).configuration == settings
    page = render_html(report)
    folded = page[page.index('<details id="defaults">') : page.index("</details>")]
    assert ">1 default<" in folded and "store" in folded and "data.path" not in folded
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page
    assert "data.path" not in render_text(report)  # the terminal shows them on request
    before = {name: value for name, value in report.to_json().items() if name != "configuration"}
    assert RunReport.from_json(before).configuration == []


def test_the_command_shows_values_and_sources(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "infra",
        "config",
        str(ROOT / "ebbflow/configs" / "laptop.yaml"),
        "--changed",
    ]
    done = subprocess.run(
        [*command, "--set", "model.num_layers=6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stderr
    assert lines["model.num_layers"] == ["6", "--set"]
    assert lines["model.num_heads"][1].startswith("ebbflow/configs/laptop.yaml:")


def test_a_password_in_an_address_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "", "metrics.push_url=http://me:s3cret@host")
    assert "must not hold a user or password" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_an_old_key_is_accepted_with_one_warning_that_names_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for _ in range(2):
        loaded = load(tmp_path, "cluster:\n  backend: local")
    assert (loaded.config.cluster.plan_for, loaded.sources["cluster.plan_for"]) == (
        "local",
        "job.yaml:2",
    )
    warning = "job.yaml:2:12: cluster.backend has a new name: write cluster.plan_for"
    assert capsys.readouterr().err == f"warning: {warning}\n"
    assert load(tmp_path, "", "cluster.backend=local").config.cluster.plan_for == "local"
    assert load(tmp_path, "", EBBFLOW__CLUSTER__BACKEND="local").config.cluster.plan_for == "local"
    assert capsys.readouterr().err.count("write cluster.plan_for") == 2
    with pytest.raises(
        ConfigError, match=r"cluster\.plan_for is given twice; the first is at job\.yaml:2:3"
    ):
        load(tmp_path, "cluster:\n  backend: local\n  plan_for: batch")


def test_a_job_stored_with_the_old_key_loads() -> None:
    stored = RunConfig().model_dump(mode="json")
    del stored["cluster"]["plan_for"]
    stored["cluster"]["backend"] = "kubernetes"
    loaded = [RunConfig.model_validate_json(json.dumps(stored)), RunConfig.model_validate(stored)]
    assert [config.cluster.plan_for for config in loaded] == ["kubernetes"] * 2
    assert "backend" not in loaded[0].model_dump()["cluster"]


def test_a_short_job_shortens_the_defaults_of_its_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_config(
        DEFAULT_CONFIG, ["training.max_steps=12"], project_root=tmp_path, cwd=tmp_path
    )
    assert loaded.config.checkpoint.interval_steps == 3
    assert loaded.config.training.evaluation_interval_steps == 6
    assert loaded.config.training.scheduler.warmup_steps == 1
    source = loaded.sources["checkpoint.interval_steps"]
    assert source == "60 shortened for training.max_steps"
    assert "checkpoint.interval_steps 60 → 3" in capsys.readouterr().err
    own = load(tmp_path, "training: {max_steps: 30}\n")
    assert own.config.checkpoint.interval_steps == 7
    assert own.config.training.scheduler.warmup_steps == 20


@pytest.mark.parametrize(
    "text",
    [
        "training: {max_steps: 30}\ncheckpoint: {interval_steps: 31}\n",
        "training: {max_steps: 30, scheduler: {warmup_steps: 31}}\n",
    ],
)
def test_an_interval_that_the_user_wrote_is_refused_and_not_shortened(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        load(tmp_path, text)


def test_the_default_configuration_itself_shortens_nothing(tmp_path: Path) -> None:
    loaded = load_config(DEFAULT_CONFIG, project_root=tmp_path, cwd=tmp_path, environment={})
    assert not any("shortened" in source for source in loaded.sources.values())


@pytest.mark.parametrize(
    "name",
    [
        "EBBFLOW_TRAINING__MAX_STEPS",
        "EBBFLOW_TRAINING_MAX_STEPS",
        "EBBFLOW__TRAINING_MAX_STEPS",
        "ebbflow__training__max_steps",
        "EBBFLOW_TRAINING_MAXSTEP",
    ],
)
def test_a_mistyped_variable_is_refused_with_the_right_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "", **{name: "7"})
    (problem,) = caught.value.problems
    assert problem.message == f"the environment variable {name} sets nothing"
    assert problem.hint == "write EBBFLOW__TRAINING__MAX_STEPS"


@pytest.mark.parametrize("name", ["EBBFLOW_DATA_DIR", "EBBFLOW_JOB", "EBBFLOW_RUNS", "MAX_STEPS"])
def test_a_variable_with_another_purpose_is_left_alone(tmp_path: Path, name: str) -> None:
    load(tmp_path, "", **{name: "7"})


def test_variables_in_paths_are_expanded(tmp_path: Path) -> None:
    text = "store: s3://$BUCKET/${TEAM}\ndata: {path: $DATA/texts}\n"
    loaded = load(tmp_path, text, BUCKET="mine", TEAM="blue", DATA="/data")
    assert loaded.config.store == "s3://mine/blue"
    assert loaded.config.data.path == "/data/texts"


def test_an_unset_variable_in_a_path_is_refused_at_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, 'store: runs\ndata: {path: "${DATA}/texts"}\n')
    (problem,) = caught.value.problems
    assert problem.message == "data.path: the environment variable DATA is not set"
    assert problem.place is not None
    assert (problem.place.source, problem.place.line) == ("job.yaml", 2)


def test_a_merge_key_and_names_of_other_tools_get_a_sentence(tmp_path: Path) -> None:
    text = "data: &d {seed: 1}\ntraining:\n  <<: *d\n  lr: 0.1\n"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    hints = {problem.message: problem.hint for problem in caught.value.problems}
    assert hints["training.<<: YAML's merge key << is not read"] == (
        "write the keys of the anchor here"
    )
    assert hints["unknown key training.lr"] == "did you mean training.learning_rate?"


def test_a_local_run_of_a_default_takes_the_gpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The laptop's two nodes become one with a rank on each GPU, unless the user wrote otherwise."""

    def ranks_of(*words: str, gpus: int) -> tuple[object, object]:
        files = [f"/dev/nvidia{number}" for number in range(gpus)]
        monkeypatch.setattr("ebbflow.infra.checks.gpu.gpu_files", lambda: files)
        line = CommandLine.parse(["train_flow.py", "run", *words])
        known, _ = options._parse_run_options(line.arguments)
        cluster = options._load(known, line).config.cluster
        return cluster.nodes, cluster.processes_per_node

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ranks_of(gpus=0) == (2, 1)
    assert capsys.readouterr().out == ""
    assert ranks_of(gpus=1) == (1, 1)
    told = "cluster.nodes=1, cluster.processes_per_node=1: one rank on each GPU of this machine\n"
    assert capsys.readouterr().out == told
    assert ranks_of(gpus=2) == (2, 1), "one GPU for each rank"
    assert ranks_of("--set", "cluster.processes_per_node=4", gpus=5) == (1, 4), "16 samples"
    for kept in ("cluster.nodes=2", "cluster.device=cpu"):
        assert ranks_of("--set", kept, gpus=1) == (2, 1)

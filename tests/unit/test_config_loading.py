"""The loader of a configuration: files that cannot be read, ranges, paths, order of problems and
rendering.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config import ConfigError, LoadedConfig, RunConfig, load_config
from ebbflow.core.config.load import render_sources, value_text, values_with_sources

# Paths

PATHS = {
    "store": ("folder", "s3://bucket/x"),
    "script": ("train.py", None),
    "data.path": ("texts", None),
    "data.tokenizer": ("t.json", "bytes"),
    "training.initial_weights": ("w.safetensors", None),
    "cost.prices": ("p.json", "live"),
}


def load(folder: Path, text: str | bytes, *overrides: str, **environment: str) -> LoadedConfig:
    """Load job.yaml of a folder whose subfolder `project` is the project's root."""
    (folder / "job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(
        "job.yaml", overrides, project_root=folder / "project", cwd=folder, environment=environment
    )


def problems_of(
    folder: Path, text: str | bytes, *overrides: str, **environment: str
) -> list[tuple[str, str | None]]:
    """The messages and hints of the problems, in their order."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides, **environment)
    return [(problem.message, problem.hint) for problem in caught.value.problems]


# Files


def test_a_file_of_more_than_a_mebibyte_is_no_configuration(tmp_path: Path) -> None:
    (read, _), *_ = problems_of(tmp_path, b"\0" * (1 << 20))
    assert read == "character U+0000 is not allowed in YAML"
    too_large = "job.yaml: is larger than 1 MiB; expected a configuration file"
    assert problems_of(tmp_path, b"\0" * ((1 << 20) + 1)) == [(too_large, None)]


def test_a_named_pipe_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError) as caught:
        load_config("pipe", project_root=tmp_path, cwd=tmp_path, environment={})
    (problem,) = caught.value.problems
    assert (problem.message, problem.key, problem.place, problem.hint) == (
        "pipe: is not a regular file",
        "",
        None,
        None,
    )


def test_the_hint_for_a_missing_file_lists_those_of_three_folders_and_the_most_similar(
    tmp_path: Path,
) -> None:
    project = tmp_path / "project"
    elsewhere = tmp_path / "elsewhere"
    paths = [project / "configs" / "a.yaml"]
    paths += [elsewhere / f"{name}.yaml" for name in ("d", "bench", "anvil", "c")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (project / "configs" / "a.yml").touch()

    def hint(name: str) -> str | None:
        with pytest.raises(ConfigError) as caught:
            load_config(name, project_root=project, cwd=tmp_path, environment={})
        return caught.value.problems[0].hint

    there = (
        "configurations that exist: elsewhere/anvil.yaml, elsewhere/bench.yaml, "
        "elsewhere/c.yaml, elsewhere/d.yaml, project/configs/a.yaml"
    )
    assert hint("elsewhere/beach.yaml") == f"did you mean elsewhere/bench.yaml? {there}"
    assert hint("elsewhere/zzzzz.txt") == there
    assert hint("elsewhere") == there
    assert hint("x.yaml") == "configurations that exist: project/configs/a.yaml"
    assert (
        hint("n" * 300) == f"write one; there is no *.yaml in {tmp_path} or {project / 'configs'}"
    )
    (project / "configs" / "a.yaml").unlink()
    assert hint("x.yaml") == f"write one; there is no *.yaml in {tmp_path} or {project / 'configs'}"


def test_loading_distinguishes_a_folder_from_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, message in {
        "folder": "folder: is a folder, not a configuration file",
        "missing.yaml": f"missing.yaml: there is no such file (looked in {tmp_path})",
        "nul\0.yaml": "nul\0.yaml: cannot be read: embedded null byte",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(name, project_root=tmp_path, cwd=tmp_path, environment={})
        assert [problem.message for problem in caught.value.problems] == [message]


def test_a_byte_that_is_no_text_is_shown_in_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "ä: 1\nb: ".encode() + b"\xfe: c")
    (problem,) = caught.value.problems
    assert problem.message == "not UTF-8 text: byte 0xfe at offset 9"
    assert problem.place is not None
    assert (str(problem.place), problem.place.length, problem.place.text) == (
        "job.yaml:2:4",
        1,
        "b: \ufffd",
    )


def test_a_configuration_may_be_json_in_the_command_or_nothing_at_all(tmp_path: Path) -> None:
    inline = load_config(
        ' {"model": {"num_layers": 8}}', project_root=tmp_path, cwd=tmp_path, environment={}
    )
    assert inline.config.model.num_layers == 8
    assert inline.sources["model.num_layers"] == "--config:1"
    assert inline.path == tmp_path
    with pytest.raises(
        ConfigError, match=r"--config:1:26: model\.num_layers must be at least 1, not 0"
    ):
        load_config(
            '{"model": {"num_layers": 0}}', project_root=tmp_path, cwd=tmp_path, environment={}
        )
    nothing = load_config(None, project_root=tmp_path, cwd=tmp_path, environment={})
    assert (nothing.path, set(nothing.sources.values())) == (tmp_path, {"default"})
    assert nothing.config == RunConfig(store=str(tmp_path / "runs"))


def test_the_path_of_a_file_is_absolute_and_shown_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "job.yaml").write_text("model: {num_layers: 3}")
    above = load_config("../job.yaml", project_root=tmp_path, cwd=tmp_path / "here", environment={})
    assert (above.path, above.sources["model.num_layers"]) == (
        tmp_path / "job.yaml",
        f"{tmp_path / 'job.yaml'}:1",
    )
    below = load_config(tmp_path / "job.yaml", project_root=tmp_path, cwd=tmp_path, environment={})
    assert (below.path, below.sources["model.num_layers"]) == (tmp_path / "job.yaml", "job.yaml:1")
    with pytest.raises(dataclasses.FrozenInstanceError):
        below.path = tmp_path  # type: ignore[misc]


# Ranges


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "training: {batch_size: 0}",
            "training.batch_size must be at least 1, not 0",
            "the default is 32",
        ),
        (
            "training: {learning_rate: 0}",
            "training.learning_rate must be greater than 0, not 0",
            "the default is 0.001",
        ),
        ("training: {ema: 1}", "training.ema must be less than 1, not 1", "the default is null"),
        (
            "training: {scheduler: {final_ratio: 1.5}}",
            "training.scheduler.final_ratio must be at most 1, not 1.5",
            "the default is 0.1",
        ),
        ("cluster: {nodes: 0}", "cluster.nodes must be at least 1, not 0", "the default is 2"),
        (
            "cluster: {processes_per_node: -1}",
            "cluster.processes_per_node must be at least 1, not -1",
            "the default is 1",
        ),
        (
            "metrics: {port: 65536}",
            "metrics.port must be at most 65535, not 65536",
            "the default is null",
        ),
        (
            "batch: {queues: [{name: a, market: spot}], tags: {a: b}, shared_memory_mib: 0}",
            "batch.shared_memory_mib must be at least 1, not 0",
            "the default is 4096",
        ),
        (
            "cost: {reservations: [{id: a, instance_type: p5.48xlarge, region: us-west-2, "
            "instances: 0}]}",
            "cost.reservations: Input should be greater than or equal to 1",
            None,
        ),
    ],
)
def test_a_value_out_of_its_range_is_shown_with_the_limit_and_the_default(
    tmp_path: Path, text: str, message: str, hint: str | None
) -> None:
    assert problems_of(tmp_path, f"{text}\n", "cluster.plan_for=kubernetes") == [(message, hint)]


# Rules


def test_a_rule_blames_the_key_of_the_last_source_and_of_several_the_first(tmp_path: Path) -> None:
    def blamed(text: str, *overrides: str, **environment: str) -> tuple[str, str]:
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, text, *overrides, **environment)
        (problem,) = caught.value.problems
        return problem.key, str(problem.place)

    file = "model: {hidden_size: 770, num_heads: 12}"
    heads = {"EBBFLOW__MODEL__NUM_HEADS": "13"}
    assert blamed(file) == ("model.hidden_size", "job.yaml:1:22")
    assert blamed("model: {num_heads: 12}") == ("model.num_heads", "job.yaml:1:20")
    assert blamed(file, **heads) == (
        "model.num_heads",
        "environment EBBFLOW__MODEL__NUM_HEADS:1:27",
    )
    assert blamed(file, "model.hidden_size=771", **heads) == (
        "model.hidden_size",
        "--set model.hidden_size=771:1:19",
    )
    both = {**heads, "EBBFLOW__MODEL__HIDDEN_SIZE": "771"}
    assert blamed(file, **both) == (
        "model.hidden_size",
        "environment EBBFLOW__MODEL__HIDDEN_SIZE:1:29",
    )
    last = blamed(file, "model.num_heads=13", EBBFLOW__MODEL__HIDDEN_SIZE="771")
    assert last == ("model.num_heads", "--set model.num_heads=13:1:17")
    options = "workload_options: {width: 3, depth: 4}"
    assert blamed(options) == ("workload_options", "job.yaml:1:27")


def test_rules_are_not_checked_for_a_key_with_a_problem_of_its_own(tmp_path: Path) -> None:
    wrong = [
        ("model: {hidden_size: 770, num_heads: 0}", "model.num_heads must be at least 1, not 0"),
        (
            "model: {hidden_size: 770, num_heads: x}",
            "model.num_heads must be a whole number, not the text 'x'",
        ),
        ("model: {hidden_size: 770, num_heds: 5}", "unknown key model.num_heds"),
    ]
    for text, message in wrong[:2]:
        assert [problem for problem, _ in problems_of(tmp_path, text)] == [message]
    # A key that does not exist leaves the others known.
    assert [problem for problem, _ in problems_of(tmp_path, wrong[2][0])] == [
        "model.hidden_size must be divisible by model.num_heads: 770 = 4 × 192 + 2",
        wrong[2][1],
    ]
    # A section that could not be read hides its keys, but for those that are given elsewhere.
    assert [
        problem
        for problem, _ in problems_of(tmp_path, "model: 3", "checkpoint.interval_steps=1000")
    ][1:] == [
        "commits of the job must be at least 1, or an interruption loses everything: "
        "training.max_steps / checkpoint.interval_steps = 300 / 1000 = 0.3"
    ]
    assert len(problems_of(tmp_path, "model: 3", "model.num_heads=7")) == 1
    assert (
        len(
            problems_of(
                tmp_path,
                "model: 3",
                "model.num_heads=7",
                "model.hidden_size=8",
                "model.head_size=null",
            )
        )
        == 2
    )
    # A file that could not be read hides every key, but for those that are given elsewhere.
    assert len(problems_of(tmp_path, "a: [", "model.num_heads=7")) == 1
    assert (
        len(
            problems_of(
                tmp_path, "a: [", "model.num_heads=7", "model.hidden_size=8", "model.head_size=null"
            )
        )
        == 2
    )


def test_problems_are_in_the_order_of_file_environment_and_overrides(tmp_path: Path) -> None:
    overrides = ("model.num_layers=0", "training.seed=-1", "b=1")
    environment = {"EBBFLOW__TRAINING__MAX_STEPS": "0", "EBBFLOW__A": "1"}
    found = problems_of(
        tmp_path, "c: 1\nd: 2\nmodel: {e: 1, sequence_length: 0}", *overrides, **environment
    )
    assert [message for message, _ in found] == [
        "unknown key c",
        "unknown key d",
        "unknown key model.e",
        "model.sequence_length must be at least 2, not 0",
        "unknown key a",
        "training.max_steps must be at least 1, not 0",
        "model.num_layers must be at least 1, not 0",
        "training.seed must be at least 0, not -1",
        "unknown key b",
    ]


@pytest.mark.parametrize("key", PATHS)
def test_a_relative_path_starts_at_the_project_in_a_file_and_else_at_the_current_folder(
    tmp_path: Path, key: str
) -> None:
    def read(loaded: LoadedConfig) -> Any:
        (row,) = values_with_sources(loaded.config.model_dump(mode="json"), {key: ""})
        return row["value"]

    relative, word = PATHS[key]
    nested = ": {".join(key.split(".")) + f": {relative}" + "}" * key.count(".")
    text = nested + "\ncluster: {nodes: 1}"
    variable = {f"EBBFLOW__{key.upper().replace('.', '__')}": relative}
    assert read(load(tmp_path, text)) == str(tmp_path / "project" / relative)
    assert read(load(tmp_path, "", f"{key}={relative}", "cluster.nodes=1")) == str(
        tmp_path / relative
    )
    assert read(load(tmp_path, "cluster: {nodes: 1}", **variable)) == str(tmp_path / relative)
    assert read(load(tmp_path, "cluster: {nodes: 1}", f"{key}=../up/{relative}")) == str(
        tmp_path.parent / "up" / relative
    )
    assert (
        read(load(tmp_path, "cluster: {nodes: 1}", f"{key}=/abs/{relative}")) == f"/abs/{relative}"
    )
    home = os.path.expanduser("~")
    assert (
        read(load(tmp_path, "cluster: {nodes: 1}", f"{key}=~/{relative}")) == f"{home}/{relative}"
    )
    if word is not None:
        assert read(load(tmp_path, "", f"{key}={word}")) == word


def test_only_a_store_may_be_an_address_of_a_file(tmp_path: Path) -> None:
    assert load(tmp_path, "store: file:///abs/folder").config.store == "/abs/folder"
    assert load(tmp_path, "store: file://folder").config.store == str(
        tmp_path / "project" / "folder"
    )
    assert load(tmp_path, "").config.store == str(tmp_path / "project" / "runs")
    assert [message for message, _ in problems_of(tmp_path, "data: {path: 'file:///texts'}")] == [
        "data.path must be a path on this machine, not 'file:///texts'"
    ]
    assert [
        message for message, _ in problems_of(tmp_path, "cost: {prices: markt}\nstore: ' '\n")
    ] == [
        "cost.prices must be static, live, or a file with an ending, not 'markt'",
        "store must not be empty",
    ]


# Sources


def test_a_script_saves_by_cost_unless_an_interval_is_chosen(tmp_path: Path) -> None:
    def interval(text: str) -> str:
        return load(tmp_path, f"script: train.py\ncluster: {{nodes: 1}}\n{text}").script_settings()[
            "checkpoint"
        ]["interval"]

    assert interval("") == "auto"
    assert interval("checkpoint: {keep_last: 2}") == "auto"
    assert interval("checkpoint: {interval: steps}") == "steps"
    assert interval("checkpoint: {interval_steps: 50}") == "steps"
    assert interval("checkpoint: {interval_seconds: 9.0}") == "steps"
    settings = load(tmp_path, "script: train.py\ncluster: {nodes: 1}").script_settings()
    assert settings["training"] == RunConfig().training.model_dump(mode="json")


def test_sources_are_rendered_in_columns_of_at_most_60_characters() -> None:
    rows = [
        {"key": "a", "value": [1, 2], "source": "--set"},
        {"key": "long.key", "value": None, "source": "default"},
        {"key": "b", "value": "x" * 61, "source": "job.yaml:1"},
    ]
    assert render_sources(rows, defaults=False).splitlines() == [
        f"a  {'[1, 2]':<60}  --set",
        f"b  {'x' * 61}  job.yaml:1",
        "… and 1 defaults",
    ]
    assert render_sources(rows[:2]).splitlines() == [
        "a         [1, 2]  --set",
        "long.key  null    default",
    ]
    assert render_sources([]) == ""
    assert render_sources(rows[1:2], defaults=False) == "… and 1 defaults"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("auto", "auto"),
        ("", '""'),
        (None, "null"),
        (True, "true"),
        (0.001, "0.001"),
        (["ä"], '["ä"]'),
    ],
)
def test_a_value_is_rendered_as_yaml(value: Any, text: str) -> None:
    assert value_text(value) == text


def test_a_value_of_a_missing_section_is_none() -> None:
    sources = {"a.b": "default", "a.c": "--set", "d.e": "default", "f.g": "default"}
    assert values_with_sources({"a": {"b": 1}, "f": 3}, sources) == [
        {"key": "a.b", "value": 1, "source": "default"},
        {"key": "a.c", "value": None, "source": "--set"},
        {"key": "d.e", "value": None, "source": "default"},
        {"key": "f.g", "value": None, "source": "default"},
    ]


def test_names_of_a_free_mapping_have_a_source_each(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "workload: 'mine:Own'\nworkload_options: {a: 1}\nbatch: {tags: {t: x}}",
        "workload_options.b=2",
    )
    assert loaded.sources["workload_options.a"] == "job.yaml:2"
    assert loaded.sources["workload_options.b"] == "--set"
    assert loaded.sources["batch.tags.t"] == "job.yaml:3"
    assert not {"workload_options", "batch.tags"} & loaded.sources.keys()
    options = load(tmp_path, "workload: 'mine:Own'\nworkload_options: {a: 1}")
    assert {"workload_options.a", "batch.tags"} <= options.sources.keys()
    empty = load(tmp_path, "")
    assert (empty.sources["workload_options"], empty.sources["batch.tags"]) == (
        "default",
        "default",
    )
    assert list(empty.sources)[:3] == ["store", "script", "script_args"]

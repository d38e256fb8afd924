"""Overrides of the command line: who wins, where paths count from, and what is said of a wrong one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.core.config import ConfigError, LoadedConfig, load_config

OVERRIDES = {
    "type": (
        "model.num_heads=many",
        """\
--set model.num_heads=many:1:17: model.num_heads must be a whole number, not the text 'many'
     1 | model.num_heads=many
       |                 ^^^^
  hint: the default is 4""",
    ),
    "misspelt section": (
        "modle.num_heads=8",
        """\
--set modle.num_heads=8:1:1: unknown key modle.num_heads
     1 | modle.num_heads=8
       | ^^^^^^^^^^^^^^^
  hint: did you mean model.num_heads?""",
    ),
    "rule": (
        "model.num_heads=7",
        """\
--set model.num_heads=7:1:17: model.hidden_size must be divisible by model.num_heads: 128 = 7 × 18 + 2
     1 | model.num_heads=7
       |                 ^
  hint: set model.num_heads to 4 or 8, or model.hidden_size to 126 or 133""",
    ),
    "no equals sign": (
        "model.num_heads",
        """\
--set model.num_heads:1:1: an override is written key=value
     1 | model.num_heads
       | ^^^^^^^^^^^^^^^
  hint: for example model.num_heads=8""",
    ),
    "not YAML": (
        "data.suffixes=[.py",
        """\
--set data.suffixes=[.py:1:19: not valid YAML: expected ',' or ']', but got '<stream end>' while parsing a flow \
sequence
     1 | data.suffixes=[.py
       |                   ^
  hint: a quote or bracket is not closed""",
    ),
}


def load(folder: Path, text: str, *overrides: str) -> LoadedConfig:
    (folder / "job.yaml").write_text(text)
    return load_config("job.yaml", overrides, project_root=folder / "project", cwd=folder)


def complaint(folder: Path, override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, "model: {hidden_size: 128, num_heads: 4}", override)
    return str(caught.value)


def test_overrides_win_over_the_file_and_the_last_of_them_over_the_others(tmp_path: Path) -> None:
    text = "model:\n  num_heads: 2\n  num_layers: 3\n"
    loaded = load(
        tmp_path,
        text,
        "model.num_heads=4",
        "model={num_heads: 8, hidden_size: 64}",
        "cost.budget_usd=null",
    )
    assert (
        loaded.config.model.num_heads,
        loaded.config.model.hidden_size,
        loaded.config.model.num_layers,
    ) == (
        8,
        64,
        3,
    )
    assert loaded.sources["model.num_heads"] == "--set"
    assert loaded.sources["model.num_layers"] == "job.yaml:3"
    assert loaded.sources["model.vocab_size"] == "default"
    assert set(loaded.sources) >= {"store", "training.scheduler.type", "cost.deadline_hours"}


def test_an_override_mends_a_wrong_value_of_the_file(tmp_path: Path) -> None:
    assert (
        load(tmp_path, "model: {num_heads: many}", "model.num_heads=2").config.model.num_heads == 2
    )


def test_paths_count_from_the_project_in_a_file_and_from_here_on_the_command_line(
    tmp_path: Path,
) -> None:
    text = "store: results\ndata: {path: texts/*.md}\n"
    loaded = load(tmp_path, text)
    assert loaded.config.store == str(tmp_path / "project" / "results")
    assert loaded.config.data.path == str(tmp_path / "project" / "texts" / "*.md")
    loaded = load(tmp_path, text, "store=../other", "data.path=mine")
    assert loaded.config.store == str(tmp_path.parent / "other")
    assert loaded.config.data.path == str(tmp_path / "mine")
    for store in ("s3://bucket/prefix", "/absolute/folder"):
        assert load(tmp_path, f"store: {store}").config.store == store
    assert load(tmp_path, "store: file:///absolute/folder").config.store == "/absolute/folder"


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_bad_override_gets_this_message(tmp_path: Path, name: str) -> None:
    override, expected = OVERRIDES[name]
    assert complaint(tmp_path, override) == expected


def test_all_problems_come_at_once_from_top_to_bottom_and_overrides_last(tmp_path: Path) -> None:
    text = "model: {num_heads: 0}\ntraning: {}\ntraining:\n  learning_rate: fast\n  max_steps: 10\n"
    text += "checkpoint: {interval_steps: 50}\n"  # longer than the job
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, "z=1", "cost.budget_usd=-1", "parallel.mode=zero")
    assert [
        (problem.key, problem.place.source, problem.place.line) for problem in caught.value.problems
    ] == [
        ("model.num_heads", "job.yaml", 1),
        ("traning", "job.yaml", 2),
        ("training.learning_rate", "job.yaml", 4),
        ("training.max_steps", "job.yaml", 5),
        ("z", "--set z=1", 1),
        ("cost.budget_usd", "--set cost.budget_usd=-1", 1),
        ("parallel.mode", "--set parallel.mode=zero", 1),
    ]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    override=st.one_of(
        st.text(max_size=30), st.builds("training.{}={}".format, st.text(max_size=8), st.text())
    )
)
def test_no_override_and_no_variable_crashes_the_loader(tmp_path: Path, override: str) -> None:
    with contextlib.suppress(ConfigError):
        load(tmp_path, "", override)
    key, _, value = override.partition("=")
    name = f"EBBFLOW__{key.replace('.', '__')}"
    try:
        load_config("job.yaml", project_root=tmp_path, cwd=tmp_path, environment={name: value})
    except ConfigError as error:
        assert f"environment {name}:1:" in str(error) or not name.isprintable()

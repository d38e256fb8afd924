"""Reading a configuration: what is accepted, where values come from, and that nothing crashes the
loader.
"""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.core.config import ConfigError, LoadedConfig, RunConfig, load_config, violations

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "ebbflow/configs" / "laptop.yaml"
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            "auto",
            "1e-3",
            "yes",
            "012",
            "1:30",
            "9" * 5000,
            "*",
            "${x}",
            "2024-01-01",
            ".nan",
            "a: b",
        ]
    ),
    st.lists(st.text(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def load(folder: Path, text: str, *overrides: str) -> LoadedConfig:
    (folder / "job.yaml").write_text(text)
    return load_config("job.yaml", overrides, project_root=folder / "project", cwd=folder)


def test_the_default_job_is_valid_and_commits_at_least_three_times(tmp_path: Path) -> None:
    loaded = load_config(LAPTOP, project_root=ROOT, cwd=tmp_path)
    config = loaded.config
    assert config.training.max_steps // config.checkpoint.interval_steps >= 3
    assert (config.cluster.nodes, config.cluster.processes_per_node, config.parallel.mode) == (
        2,
        1,
        "fsdp2",
    )
    assert config.store == str(ROOT / "runs")
    assert loaded.path == LAPTOP
    assert not violations(config)


@pytest.mark.parametrize(
    "text",
    ["", "# only a comment\n", "---\n", "model:\ntraining:\n  scheduler:\n", "\ufeffmodel:\n"],
)
def test_omitted_keys_have_their_defaults(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, text).config
    assert config == RunConfig(store=str(tmp_path / "project" / "runs"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1e-3", 1e-3),
        ("1E+0", 1.0),
        (".5", 0.5),
        ("3", 3.0),
        ("1_0.5", 10.5),
        ("0x10", 16.0),
        ("0o17", 15.0),
    ],
)
def test_a_number_is_what_it_looks_like(tmp_path: Path, written: str, read: float) -> None:
    for loaded in (
        load(tmp_path, f"training: {{learning_rate: {written}}}"),
        load(tmp_path, "", f"training.learning_rate={written}"),
    ):
        assert loaded.config.training.learning_rate == read
        assert isinstance(loaded.config.training.learning_rate, float)


@pytest.mark.parametrize(
    ("written", "read"), [("yes", True), ("On", True), ("no", False), ("FALSE", False)]
)
def test_the_booleans_of_yaml_1_1_are_booleans_where_one_is_expected(
    tmp_path: Path, written: str, read: bool
) -> None:
    assert (
        load(tmp_path, f"fsdp: {{use_mixed_precision: {written}}}").config.fsdp.use_mixed_precision
        is read
    )
    # … and names where a name is: a folder called "no" is no boolean.
    assert load(tmp_path, f"data: {{path: {written}x}}").config.data.path == str(
        tmp_path / "project" / f"{written}x"
    )
    with (
        pytest.raises(ConfigError, match="remove the quotes")
        if written == "FALSE"
        else pytest.raises(ConfigError)
    ):
        load(tmp_path, f"fsdp: {{use_mixed_precision: '{written}'}}")


@pytest.mark.parametrize(
    "given_path", ["configs/labtop.yaml", "configs", "nul\0name.yaml", "missing/dir/x.yaml"]
)
def test_a_file_that_cannot_be_read_names_those_that_can(tmp_path: Path, given_path: str) -> None:
    project = tmp_path / "project"
    (project / "configs").mkdir(parents=True)
    (project / "configs" / "laptop.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(given_path, ["model.num_heads=x"], project_root=project, cwd=project)
    first, second = caught.value.problems  # the override is checked all the same
    assert "configs/laptop.yaml" in first.hint
    assert second.key == "model.num_heads"
    if "labtop" in given_path:
        assert f"there is no such file (looked in {project})" in first.message
        assert "did you mean configs/laptop.yaml?" in first.hint


def test_rules_do_not_check_unreadable_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "training: {max_steps: [}", "checkpoint.interval_steps=4000")
    assert len(caught.value.problems) == 1
    assert "not valid YAML" in caught.value.problems[0].message


def test_a_line_cannot_steer_the_terminal_nor_flood_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "data: {path: x, " + "y" * 5000 + ': 1, "a\u202eb": 2, nötig広い: 3}')
    text = str(caught.value)
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) < 300


def test_an_error_survives_a_process_boundary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "model: {num_heads: 7}")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.problems == caught.value.problems


@st.composite
def mutated_jobs(draw: st.DrawFn) -> Any:
    """The default job with some keys dropped, renamed, moved or given another value."""
    job = copy.deepcopy(yaml.safe_load(LAPTOP.read_text()))
    for _ in range(draw(st.integers(1, 4))):
        section = job
        while True:
            if section:
                key = draw(st.sampled_from(sorted(section, key=str)))
            else:
                key = None
            if not (key and isinstance(section[key], dict) and draw(st.booleans())):
                break
            section = section[key]
        if key is None:
            continue
        match draw(st.sampled_from(["drop", "rename", "retype", "move"])):
            case "drop":
                del section[key]
            case "rename":
                section[draw(st.text(max_size=12))] = section.pop(key)
            case "retype":
                section[key] = draw(VALUES)
            case "move":
                job[key] = section.pop(key)
    return job


def check_loader(folder: Path, text: str) -> None:
    """A configuration, or problems whose places are really in the file."""
    try:
        loaded = load(folder, text)
    except ConfigError as error:
        assert error.problems
        assert str(error)
        for problem in error.problems:
            assert problem.message
            if problem.place is not None:
                assert problem.place.source == "job.yaml"
                assert problem.place.text in text.replace("\ufeff", "")
                assert 1 <= problem.place.line <= text.count("\n") + text.count("\r") + 1
                assert 1 <= problem.place.column <= len(problem.place.text) + 1
                assert problem.place.length >= 1
    else:
        assert RunConfig.model_validate(loaded.config.model_dump(mode="json")) == loaded.config
        assert not violations(loaded.config)


@FUZZ
@given(job=mutated_jobs(), flow_style=st.sampled_from([None, True, False]))
@pytest.mark.slow
def test_no_mutation_of_a_valid_file_crashes_the_loader(
    tmp_path: Path, job: Any, flow_style: bool | None
) -> None:
    check_loader(tmp_path, yaml.safe_dump(job, default_flow_style=flow_style, allow_unicode=True))


@pytest.mark.slow
@FUZZ
@given(data=st.data())
def test_no_slip_of_the_keyboard_crashes_the_loader(tmp_path: Path, data: st.DataObject) -> None:
    text = LAPTOP.read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        typed = data.draw(
            st.one_of(
                st.sampled_from(list("\t\n:-[]{}&*!|>'\"%@`#?, \r\x85\u2028\0")),
                st.text(max_size=4),
            )
        )
        text = text[:at] + typed + text[at + data.draw(st.integers(0, 3)) :]
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    check_loader(tmp_path, text)


def test_the_warm_up_that_a_hint_proposes_is_a_warm_up_and_fits() -> None:
    for steps in (*range(1, 30), 100, 1005):
        config = RunConfig.model_validate(
            {
                "training": {"max_steps": steps, "scheduler": {"warmup_steps": steps + 1}},
                "checkpoint": {"interval_steps": 1},
            }
        )
        (violation,) = violations(config)
        proposed = int(re.search(r"warmup_steps to (\d+)", violation.hint or "")[1])
        scheduler = config.training.scheduler.model_copy(update={"warmup_steps": proposed})
        training = config.training.model_copy(update={"scheduler": scheduler})
        assert proposed >= 1 and not violations(config.model_copy(update={"training": training}))


def test_nesting_and_anchors_do_no_harm(tmp_path: Path) -> None:
    for text in ("[" * 50_000, "model: &a {num_heads: *a}", "{" * 3000 + "}" * 3000):
        with pytest.raises(ConfigError):
            load(tmp_path, text)
    assert load(tmp_path, "model: {num_heads: &n 8, num_layers: *n}").config.model.num_layers == 8

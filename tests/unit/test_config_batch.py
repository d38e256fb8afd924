"""The section `batch`: what is accepted, and where and how it is said to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.core.config import ConfigError, LoadedConfig, load_config
from ebbflow.core.config.schema import RunConfig

QUEUES = """
batch:
  queues:
    - name: spot-g5
      market: spot
      instance_types: [g5]
    - {name: gang, market: on_demand, multi_node: yes}
"""


def load(folder: Path, text: str, *overrides: str) -> LoadedConfig:
    (folder / "job.yaml").write_text(text)
    return load_config("job.yaml", overrides, project_root=folder, cwd=folder, environment={})


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_queues_are_a_list_of_sections_and_come_back_from_json(tmp_path: Path) -> None:
    loaded = load(tmp_path, QUEUES, "batch.tags.team=vision", "batch.light_queue=small")
    batch = loaded.config.batch
    assert [(queue.name, queue.market, queue.multi_node) for queue in batch.queues] == [
        ("spot-g5", "spot", False),
        ("gang", "on_demand", True),
    ]
    assert (batch.queues[0].instance_types, batch.tags, batch.light_queue) == (
        ["g5"],
        {"team": "vision"},
        "small",
    )
    assert (
        loaded.sources["batch.queues"] == "job.yaml:4"
        and loaded.sources["batch.tags.team"] == "--set"
    )
    assert RunConfig.model_validate_json(loaded.config.model_dump_json()) == loaded.config
    override = load(
        tmp_path, QUEUES, "batch.queues=[{name: other, market: on_demand, multi_node: true}]"
    )
    assert [queue.name for queue in override.config.batch.queues] == ["other"]


@pytest.mark.parametrize(
    ("queue", "says"),
    [
        (
            "{name: a, market: spott}",
            "batch.queues item 1 market must be one of spot, on_demand, not the text 'spott'",
        ),
        ("{name: a, markt: spot}", "did you mean market?"),
        ("{name: a}", "batch.queues item 1 lacks market"),
        ("{name: a, name: b, market: spot}", "gives name twice"),
        ("{name: a, market: spot, instance_types: g5}", "hint: write [g5]"),
        ("a", "must be a section of 'key: value' lines, not the text 'a'"),
        ("{name: 'a b', market: spot}", "'a b' is no name of a job queue"),
        (
            "{name: a, market: spot, multi_node: true}",
            "AWS Batch runs no job of several nodes on Spot",
        ),
        (
            "{name: a, market: spot, instance_types: [G5]}",
            "'G5' is no instance type nor the beginning of one",
        ),
    ],
)
def test_a_bad_queue_is_pointed_at(tmp_path: Path, queue: str, says: str) -> None:
    text = refused(tmp_path, f"cluster: {{nodes: 1}}\nbatch:\n  queues:\n    - {queue}\n")
    assert says in text and "job.yaml:4:" in text


def test_an_error_in_a_list_points_at_its_element(tmp_path: Path) -> None:
    assert "job.yaml:8:25: batch.queues item 3 market" in refused(
        tmp_path, QUEUES + "    - {name: c, market: sp}\n"
    )


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            "{queues: [{name: a, market: spot}, {name: a, market: spot}]}",
            "batch.queues names a 2 times",
        ),
        ("{light_queue: 'x y'}", "batch.light_queue must be the name of a job queue"),
        ("{region: us-east}", "batch.region must be the name of an AWS region"),
        ("{image: 'a b'}", "batch.image must be the address of an image"),
        ("{job_role: admin}", "batch.job_role must be the ARN of a role"),
        ("{runnable_minutes: 0}", "must be greater than 0"),
        ("{tags: {team: 3}}", 'put it in quotes: "3"'),
        (
            "{tags: {team: a=b}}",
            "job.yaml:2:22: batch.tags: team: 'a=b' has '=' in it: Metaflow hands tags on",
        ),
        ("{tags: {team: 'AWS:x'}}", "begins with AWS:, which AWS keeps to itself"),
        ("{tags: {team: 'a;b'}}", "has ';' in it, which AWS does not take"),
        ("{metadata_fixes: never}", "one of auto, refuse"),
    ],
)
def test_a_bad_value_gets_its_fix(tmp_path: Path, section: str, says: str) -> None:
    assert says in refused(tmp_path, f"cluster: {{nodes: 1}}\nbatch: {section}\n")


def test_queues_must_be_able_to_take_the_gang(tmp_path: Path) -> None:
    text = "batch: {queues: [{name: a, market: spot}]}\ncluster: {nodes: 2}\n"
    assert "cluster.nodes 2: none of batch.queues (a: spot) is multi_node" in refused(
        tmp_path, text
    )
    load(tmp_path, text, "cluster.plan_for=kubernetes")
    load(tmp_path, text, "cluster.nodes=auto")
    assert "none of batch.queues (a: spot) is on_demand" in refused(
        tmp_path, text, "cluster.nodes=1", "cluster.market=on_demand"
    )

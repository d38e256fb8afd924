"""What is shipped in configs/: every file loads, plans and agrees with the schema that editors
check it by.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ebbflow.core.config import ConfigError, load_config
from ebbflow.core.config.json_schema import json_schema, schema_text
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.cost.plan.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "ebbflow/configs").glob("*.yaml"))
EDITOR_LINE = "# yaml-language-server: $schema=schema.json"


def described(node: dict[str, Any], path: str = "") -> list[str]:
    """The dotted keys of a schema that say nothing about themselves."""
    silent = []
    for name, field in node.get("properties", {}).items():
        if not field.get("description"):
            silent += [path + name]
        silent += described(field, f"{path}{name}.")
    return silent


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
@pytest.mark.slow
def test_a_shipped_configuration_loads_and_plans(path: Path) -> None:
    assert path.read_text().splitlines()[0] == EDITOR_LINE
    config = load_config(path, project_root=ROOT, environment={}).config
    plan = make_plan(config, now_utc=time.time())
    assert plan.refusal is None and plan.chosen is not None
    jsonschema.validate(config.model_dump(mode="json"), json_schema())


def test_the_gpt_configuration_has_its_stated_size_and_fits_batch() -> None:
    config = load_config(
        ROOT / "ebbflow/configs" / "gpt-124m-spot.yaml", project_root=ROOT, environment={}
    ).config
    assert round(causal_lm_shape(config.model).parameters / 1e6) == 124
    plan = make_plan(config, now_utc=time.time())
    assert (plan.chosen.market, plan.chosen.nodes) == ("spot", 1)
    assert any(candidate.ranks > 1 for candidate in plan.ranked), (
        "the cheapest may be a machine with a single GPU"
    )
    tokens = config.training.max_steps * config.training.batch_size * config.model.sequence_length
    assert 18 <= tokens / 124.5e6 <= 22  # what its comment says of tokens


def test_the_schema_is_current_and_describes_every_key() -> None:
    fresh = "run: ebbflow schema --write"
    assert (ROOT / "ebbflow/configs" / "schema.json").read_text() == schema_text(), fresh
    assert described(json_schema()) == []
    jsonschema.Draft7Validator.check_schema(json_schema())
    assert "$ref" not in schema_text()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("", True),
        ("model:\ntraining: {scheduler: }", True),
        (
            "cluster: {nodes: auto}\ncost: {budget_usd: null}\nworkload_options: {width: 3, "
            "fast: true}",
            True,
        ),
        ("model: {hiden_size: 64}", False),
        ("training: {max_steps: many}", False),
        ("training: {learning_rate: 0}", False),
        ("parallel: {mode: fsdp}", False),
        ("cluster: {nodes: 0}", False),
        ("data: {suffixes: .py}", False),
        ("workload_options: {a: {b: 1}}", False),
        ("workload_options: {a.b: 1}", False),
        (
            "batch: {queues: [{name: a, market: spot, instance_types: [g5]}], tags: {team: "
            "x}}\ncluster: {nodes: 1}",
            True,
        ),
        ("batch: {queues: [{name: a}]}", False),
        ("batch: {queues: [{name: a, market: spot, markt: spot}]}", False),
        ("batch: {queues: [a]}", False),
        ("batch: {queues: [null]}", False),
        ("batch: {tags: {team: 3}}", False),
        ("cluster: {backend: kubernetes}", True),
        ("cluster: {backend: k8s}", False),
    ],
)
def test_the_schema_and_the_loader_agree_on_keys_types_and_ranges(
    tmp_path: Path, text: str, good: bool
) -> None:
    (tmp_path / "job.yaml").write_text(
        text if "options" not in text else f"{text}\nworkload: mine:Own"
    )
    document = yaml.safe_load((tmp_path / "job.yaml").read_text()) or {}
    assert (
        jsonschema.Draft7Validator(json_schema()).is_valid(json.loads(json.dumps(document))) is good
    )
    try:
        load_config(tmp_path / "job.yaml", project_root=tmp_path, environment={})
    except ConfigError as error:
        assert not good, error
    else:
        assert good

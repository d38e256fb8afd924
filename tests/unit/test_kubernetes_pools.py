"""`kubernetes.pools`: nodes of any cluster as pools of a plan, and as pods that select them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config import ConfigError
from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.capacity import AttemptHistory, Placement, choose_placement
from ebbflow.cost.errors import CatalogueError
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.source import open_prices
from ebbflow.flows.attempts.order import AttemptOrder
from ebbflow.flows.pods import POD_VARIABLES, apply_to_pod, pod_markets
from tests.support.capacity import batch_config

NOW = 1_800_000_000.0
SPARE = {
    "name": "spare",
    "gpu": "L4",
    "node_selector": {"cloud.google.com/gke-nodepool": "l4-spot"},
    "usd_per_node_hour": 0.25,
    "preemptible": True,
}
OWNED = {
    "name": "owned",
    "gpu": "l4:2",
    "node_selector": {"example.org/rack": "a"},
    "usd_per_node_hour": 1.5,
    "cpus": 24,
    "memory_gib": 96,
}


def config_of(*pools: dict[str, Any], **batch: Any) -> RunConfig:
    config = batch_config("cluster.plan_for=kubernetes", "cluster.processes_per_node=1")
    document = config.model_dump()
    document["kubernetes"]["pools"] = list(pools)
    document["batch"] |= batch
    return RunConfig.model_validate(document)


def placed(config: RunConfig) -> tuple[Plan, Placement]:
    plan = make_plan(config, now_utc=NOW, prices=open_prices(config, NOW))
    history = AttemptHistory()
    chosen = choose_placement(config, plan=plan, history=history, queues=pod_markets(), now_utc=NOW)
    return plan, chosen


def test_a_plan_chooses_among_the_pools_at_their_prices_and_in_their_markets() -> None:
    plan, chosen = placed(config_of(SPARE, OWNED))
    found = {
        candidate.instance_type: (candidate.market, str(candidate.price.usd_per_hour))
        for candidate in plan.ranked
    }
    assert found == {"spare": ("spot", "0.25"), "owned": ("on_demand", "1.5")}
    assert {candidate.place for candidate in plan.ranked} == {""}, "they are nowhere in AWS"
    assert (chosen.instance_type, chosen.market) == ("spare", "spot")
    assert "stated in kubernetes.pools" in chosen.price.kind
    again = Placement.from_json(json.loads(json.dumps(chosen.to_json())))
    assert again.node_selector == SPARE["node_selector"]


def test_a_pod_selects_its_pool_and_keeps_what_the_user_gave() -> None:
    config = config_of(OWNED, image="ebbflow:1")
    _, chosen = placed(config)
    mine = {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}
    cli: Any = SimpleNamespace(
        env={},
        command_options={
            "node_selector": ["disk=nvme", "example.org/rack=b"],
            "tolerations": json.dumps([mine]),
            "labels": json.dumps({"cost-center": "7"}),
            "extended_resources": json.dumps({"rdma/ib": "1"}),
            "persistent_volume_claims": json.dumps({"data": "/data"}),
            "service_account": "mine",
            "image": "mine:2",
            "num-parallel": "1",
        },
    )
    apply_to_pod(cli, AttemptOrder(placement=chosen), chosen, config)
    options = cli.command_options
    assert options["node_selector"] == ["disk=nvme", "example.org/rack=a"]
    assert json.loads(options["tolerations"])[0] == mine
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in json.loads(
        options["tolerations"]
    )
    assert json.loads(options["labels"])["cost-center"] == "7"
    assert json.loads(options["extended_resources"]) == {"rdma/ib": "1"}
    assert json.loads(options["persistent_volume_claims"]) == {"data": "/data"}
    assert (options["service_account"], options["image"]) == ("mine", "mine:2")
    assert (options["cpu"], options["gpu"]) == ("23", "1")
    assert json.loads(cli.env[POD_VARIABLES]) == {
        "EBBFLOW_INSTANCE_TYPE": "owned",
        "EBBFLOW_MARKET": "on_demand",
    }


def test_pools_are_read_from_yaml() -> None:
    texts = "{name: a, gpu: 'L4:2', node_selector: {x/y: 'true'}, usd_per_node_hour: 1.5}"
    config = batch_config("cluster.plan_for=kubernetes", f"kubernetes.pools=[{texts}]")
    [pool] = config.kubernetes.pools
    assert (pool.gpu, pool.node_selector) == ("L4:2", {"x/y": "true"})
    with pytest.raises(ConfigError, match="must be names with texts"):
        batch_config(f"kubernetes.pools=[{texts.replace(chr(39) + 'true' + chr(39), '[1]')}]")


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([{**SPARE, "gpu": "H1000:8"}], r"kubernetes\.pools\.0\.gpu: H1000:8: unknown GPU; known"),
        ([SPARE, {**OWNED, "gpu": "L4:x"}], r"kubernetes\.pools\.1\.gpu: L4:x: must be MODEL"),
        ([SPARE, SPARE], r"kubernetes\.pools\.1\.name: there are two pools spare"),
    ],
)
def test_a_pool_that_cannot_be_planned_is_one_line(
    pools: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(CatalogueError, match=message):
        make_plan(config_of(*pools), now_utc=NOW)

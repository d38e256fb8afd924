"""Prices while a job runs: how often they are asked, what the launcher records, what an agent reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import BATCH_SUBMITTED, NODE_STARTED, PLAN, PRICES, read_events
from ebbflow.core.terms import PriceWatch, RankPrice
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.recorded import RecordedPrices
from ebbflow.flows import gang, price_watch
from ebbflow.flows.job import Job
from ebbflow.flows.own_flow.step_checks import CheckedStep
from ebbflow.flows.own_flow.step_options import StepOptions
from ebbflow.flows.own_flow.training_plan import prepare_training
from ebbflow.flows.own_flow.training_settings import make_settings
from ebbflow.infra.instance import VARIABLES
from tests.support.flow import wait_until
from tests.support.timelines import WALL, event

VOLUME_USD = 100 * 0.08 / 730  # of `cost.volume_gib_per_node` in us-east-1, per hour
POOL = {"name": "a", "gpu": "A100", "node_selector": {"pool": "a"}}


def test_a_price_is_asked_a_hundred_times_per_budget_and_every_three_minutes() -> None:
    assert PriceWatch.of(RunConfig()).seconds == 0.0
    config = RunConfig.model_validate({"cost": {"prices": "live", "budget_usd": 0.5}})
    watch = PriceWatch.of(config)
    assert watch.look_seconds(0.5) == 36.0
    assert watch.look_seconds(0.01) == config.cost.price_seconds == 180.0
    assert watch.look_seconds(1000.0) == 2.0
    assert PriceWatch(180.0).look_seconds(1000.0) == 180.0
    assert watch.rise_usd(0.5, 26.0) == pytest.approx(2 * 0.5 * 100 / 3600)


def test_a_plan_reserves_for_a_rise_of_the_price_only_where_it_is_watched(tmp_path: Path) -> None:
    recorded = tmp_path / "prices.json"
    record(recorded, ("use1-az4", 3600.0, 0.4))
    now = time.time()
    prices = RecordedPrices.read(recorded, now)

    def reserve(plan_for: str, **cost: object) -> tuple[float, float]:
        cluster = {"instance_types": ["g5.xlarge"], "market": "spot", "nodes": 1}
        config = RunConfig.model_validate(
            {
                "cluster": {**cluster, "plan_for": plan_for},
                "cost": {"prices": str(recorded), **cost},
            }
        )
        plan = make_plan(config, now_utc=now, prices=prices)
        return plan.reserve_usd, plan.terms().price_look_seconds

    watched = reserve("batch")
    assert watched[1] == 180.0
    # On a cluster of EC2's machines, and of a run here that is planned for one
    usd, look_seconds = reserve("kubernetes")
    assert look_seconds == 180.0
    # AWS Batch keeps the machine for 5 min, at a price that may triple before the ranks know
    assert watched[0] == pytest.approx(usd + 3 * (0.4 + VOLUME_USD) * 300 / 3600)
    usd, look_seconds = reserve("kubernetes", prices="static")
    assert look_seconds == 0.0 and usd < watched[0] / 2


@pytest.mark.parametrize(
    "stated",
    [
        {
            "cluster": {"plan_for": "kubernetes"},
            "kubernetes": {"pools": [{**POOL, "usd_per_node_hour": 3.0}]},
        },
        {"cluster": {"plan_for": "slurm"}},
    ],
)
def test_stated_prices_are_not_watched(stated: dict) -> None:
    config = RunConfig.model_validate({"cost": {"prices": "live"}, **stated})
    assert PriceWatch.of(config).seconds == 0.0


def test_a_step_of_an_own_flow_reserves_for_no_rise_of_the_price(tmp_path: Path) -> None:
    record(tmp_path / "prices.json", ("use1-az4", 3600.0, 0.4))
    file = tmp_path / "job.yaml"
    file.write_text(
        "cost: {prices: prices.json}\ncluster: {instance_types: [g5.xlarge], market: spot}\n"
    )
    step = CheckedStep(
        name="train",
        place="flow.py:9",
        options=StepOptions(budget=5.0),
        store=str(tmp_path / "store"),
        datastore="local",
        flow_folder=tmp_path,
        is_gang=False,
        is_caught=False,
        backend=None,
        nodes=1,
        calls=(),
        files=(),
    )
    settings = make_settings(step, nodes=1, file=file, is_own_loop=True)
    job = Job(name="j", run="1", config=settings.config)
    _, terms = prepare_training(job, settings, step.options)
    assert terms is not None and terms.price_look_seconds == 0.0
    end_seconds = settings.config.checkpoint.deadline_seconds + 300.0  # and idle machines
    assert terms.reserve_usd == pytest.approx((0.4 + VOLUME_USD) * end_seconds / 3600)


def test_a_price_costs_what_it_was_at_each_time() -> None:
    price = RankPrice(1.0, [(10.0, 3.0), (20.0, 2.0)])
    assert price.cost(5.0, 25.0) == 5.0 + 30.0 + 10.0
    assert price.cost(12.0, 12.0) == 0.0
    assert [price.price_at(at) for at in (9.9, 10.0, 20.0)] == [1.0, 3.0, 2.0]
    assert price.shifted(10.0).cost(-5.0, 15.0) == 45.0


def record(path: Path, *changes: tuple[str, float, float]) -> None:
    """changes: (zone id, seconds ago, dollars per hour)."""
    told = [
        {
            "InstanceType": "g5.xlarge",
            "AvailabilityZone": {"use1-az4": "us-east-1a", "use1-az6": "us-east-1b"}[zone],
            "AvailabilityZoneId": zone,
            "Timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - ago)),
            "SpotPrice": f"{usd:.4f}",
        }
        for zone, ago, usd in changes
    ]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"SpotPriceHistory": told}))
    fresh.replace(path)


def test_an_agent_reads_its_own_zones_price_from_what_the_launcher_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(price_watch, "_FIRST_LOOK_SECONDS", 0.02)
    prices = tmp_path / "prices.json"
    record(prices, ("use1-az4", 3600.0, 0.4), ("use1-az6", 3600.0, 0.5))
    config = RunConfig.model_validate(
        {
            "store": str(tmp_path / "store"),
            "cluster": {"instance_types": ["g5.xlarge"], "plan_for": "batch", "nodes": 1},
            "cost": {"prices": str(prices), "price_seconds": 1},
        }
    )
    now = time.time()
    plan = make_plan(config, now_utc=now, prices=RecordedPrices.read(prices, now))
    assert plan.chosen is not None and plan.chosen.zone == "use1-az4"
    job = Job(name="job", run="1", config=config)
    with job.events("plan") as log:
        log.emit(PLAN, **plan.brief().to_json())
    (tmp_path / "run-id").write_text("1")
    said: list[str] = []
    watch = price_watch.LauncherPrices("job", config, tmp_path / "run-id", said.append)

    def told() -> list[dict[str, Any]]:
        return [told.data for told in read_events(job.store) if told.name == PRICES]

    watch.start()
    try:
        wait_until("prices", told, 20)
        # Batch has chosen a dearer zone than planned
        monkeypatch.setattr(gang, "in_container", lambda: True)
        monkeypatch.setattr(gang, "training_backend", lambda _flow: "batch")
        monkeypatch.setenv(VARIABLES["instance_id"], "i-1")
        monkeypatch.setenv(VARIABLES["instance_type"], "g5.xlarge")
        monkeypatch.setenv(VARIABLES["zone_id"], "use1-az6")
        monkeypatch.setenv(VARIABLES["market"], "spot")
        flow = cast(Any, SimpleNamespace(capacity=plan.to_json()))
        order = cast(Any, SimpleNamespace(plan=plan, nodes=1, processes_per_node=1))
        held = gang._HeldPrice(flow, job, order)
        # With its root volume
        assert held.read().price_at(time.time()) == pytest.approx((0.5 + VOLUME_USD) / 3600)
        # Its boot counts against the budget, unless an earlier attempt or another job has paid it
        assert held.boot_seconds([]) in (0.0, held._uptime_seconds) and held._uptime_seconds > 0
        held._uptime_seconds = 300.0
        assert held.boot_seconds([]) == 300.0
        assert held.boot_seconds([event(NODE_STARTED, 0.0, ranks=[0], instance_id="i-1")]) == 0.0
        order_event = event(
            BATCH_SUBMITTED, time.time() - 1000.0 - WALL, job_id="j-1", job_name="train"
        )
        held._job_id = "j-1"
        assert held.boot_seconds([order_event]) == 300.0
        held._uptime_seconds = 601.0
        assert held.boot_seconds([]) == 0.0
        record(prices, ("use1-az4", 3600.0, 0.4), ("use1-az6", 3600.0, 0.5), ("use1-az6", 0.0, 1.5))
        wait_until("a new price", lambda: len(told()) == 2, 20)
        dearer = held.read().price_at(time.time() + 1.0)
        assert dearer == pytest.approx((1.5 + VOLUME_USD) / 3600)
        prices.unlink()
        wait_until("silence", lambda: said, 20)
        assert said[0].startswith("prices: those of 0 min ago apply, since ")
    finally:
        watch.end()
    assert told()[-1]["problem"] and held.read().price_at(time.time() + 1.0) == dearer

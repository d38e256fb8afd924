"""A real run whose price triples: it ends with exit code 4, says what it cost, and by which line it
can go on.
"""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import read_events
from ebbflow.core.store import Store
from ebbflow.cost.plan.candidates import read_progress
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.recorded import RecordedPrices
from tests.support.flow import FlowRunner, assert_ledger_adds_up, wait_until

pytestmark = pytest.mark.flow
USD_PER_HOUR = 0.4
BUDGET_USD = 0.06


def record(path: Path, changes: list[tuple[float, float]]) -> None:
    """A recording of one pool's price, as EC2 tells it. changes: (Unix time, dollars per hour)."""
    pool = {
        "InstanceType": "g5.xlarge",
        "AvailabilityZone": "us-east-1a",
        "AvailabilityZoneId": "use1-az4",
    }
    told = [
        {
            **pool,
            "Timestamp": datetime.fromtimestamp(at, UTC).isoformat(),
            "SpotPrice": f"{usd:.4f}",
        }
        for at, usd in changes
    ]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"SpotPriceHistory": told}))
    fresh.replace(path)


def test_a_price_that_triples_at_the_first_commit_ends_the_job_within_its_budget(
    tmp_path: Path,
) -> None:
    prices = tmp_path / "prices.json"
    long_ago = time.time() - 3600
    record(prices, [(long_ago, USD_PER_HOUR)])
    runner = FlowRunner(tmp_path)
    money = {
        "cost__prices": prices,
        "cost__budget_usd": BUDGET_USD,
        "checkpoint__deadline_seconds": 5,
        "cluster__expected_start_seconds": 5,
        "cluster__instance_types": ["g5.xlarge"],
        "cluster__market": "spot",
        "cost__confidence": 0.01,
    }
    # An option of the flow's decorators, as in docs/metaflow.md, does not disturb the launcher.
    process = runner.start(
        "--branch", "paper", "run", *runner.options(**money, training__max_steps=8_000)
    )

    def commits() -> list[dict]:
        return [event for event in runner.events() if event["name"] == "commit"]

    wait_until("a commit", lambda: commits() or process.poll() is not None, 180)
    if not commits():
        raise AssertionError(runner.finish(process, timeout=0).output)
    record(prices, [(long_ago, USD_PER_HOUR), (commits()[0]["t_wall"], 3 * USD_PER_HOUR)])
    broke = runner.finish(process, timeout=300)
    assert broke.exit_code == 4, broke.output
    assert (broke.report["outcome"], broke.report["exit_code"]) == ("budget", 4)
    assert 0.5 * BUDGET_USD < broke.report["total_usd"] <= BUDGET_USD, broke.report["total_usd"]
    assert_ledger_adds_up(broke.report)
    [pool] = broke.report["money"]["prices"]
    assert [usd for _, usd in pool["curve"]] == [USD_PER_HOUR, pytest.approx(3 * USD_PER_HOUR)]
    line = re.search(r"ebbflow (run --job \S+ --set cost.budget_usd=([\d.]+))", broke.output)
    assert line and float(line[2]) > broke.report["total_usd"] + BUDGET_USD, broke.output

    # What the line asks for is enough at the price that was planned: with it the plan of the rest is not refused, as it is
    # without.
    config = RunConfig.model_validate(
        json.loads((broke.folder / "config.json").read_text())["config"]
    )
    store = Store.open(str(broke.folder))
    record(prices, [(long_ago, USD_PER_HOUR)])
    known = {
        "progress": read_progress(read_events(store)),
        "prices": RecordedPrices.read(prices, time.time()),
    }
    for budget, outcome in ((BUDGET_USD, Outcome.BUDGET), (float(line[2]), None)):
        cost = config.cost.model_copy(update={"budget_usd": budget})
        plan = make_plan(config.model_copy(update={"cost": cost}), now_utc=time.time(), **known)
        assert (plan.refusal and plan.refusal.outcome) == outcome and plan.done_steps > 0

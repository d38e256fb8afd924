"""Root volumes of EC2 nodes: dollars without seconds in the ledger, in spending and in savings."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import BATCH_ATTEMPT, PLAN, PRICES, Event, LedgerClass
from ebbflow.core.terms import RankPrice, Terms
from ebbflow.cost.capacity.placement import Placement, batch_attempt_data
from ebbflow.cost.finance.bill import read_bill
from ebbflow.cost.finance.focus import focus_rows, spent_by_month, write_focus
from ebbflow.cost.finance.reconcile import Reconciliation, reconcile, render
from ebbflow.cost.finance.replay import replay
from ebbflow.cost.ledger.ledger import Ledger, compute_spent_usd, fold
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.quote import PoolPrice
from ebbflow.cost.report.figure_text import explain_figures, format_ledger_rows
from ebbflow.cost.report.figures import STEP_COLUMNS, list_step_figures
from ebbflow.cost.report.render_html import COLOURS
from ebbflow.cost.report.render_html import render as render_page
from ebbflow.cost.report.report import build_report
from ebbflow.flows import gang as gang_module
from ebbflow.flows.job import Job
from ebbflow.infra.batch.jobs import BatchAttempt
from ebbflow.training.limits import Limits, Stop
from tests.support.bills import Instance, rows_of, storage_row, write_report
from tests.support.timelines import WALL, GangLog, event, plan_event, prices_event, timelines

MACHINE = {"instance_type": "g5.xlarge", "market": "spot", "zone": "us-east-1a"}
# A node-second costs a tenth of a cent, and a hundredth of one for its volume
PLANNED = plan_event(3.6, on_demand=7.2, volume="0.36")
MICRO = 1_000_000


def killed_run(*, first_machine: str = "i-1", second_machine: str = "i-2") -> list[Event]:
    """100 s of one node with two ranks, of which 40 s are lost, and 100 s of another."""
    machine = {**MACHINE, "uptime_seconds": 60.0}
    first = GangLog(1, 0.0, [[0, 1]], machines=[{**machine, "instance_id": first_machine}])
    first.phase("startup", 20.0)
    first.steps(1, 6, useful_step=10.0)
    first.commit(4)
    first.ended("node_lost", 100.0)
    second = GangLog(
        2, 2000.0, [[0, 1]], parent=(4, 1), machines=[{**machine, "instance_id": second_machine}]
    )
    second.phase("startup", 20.0)
    second.steps(5, 10, useful_step=10.0)
    second.commit(10)
    second.outcome("completed")
    second.phase("shutdown", 20.0)
    second.ended("completed", 100.0)
    return [*first.events, *second.events]


def volumes_of(ledger: Ledger) -> Decimal:
    found = [line for line in ledger.lines if line.ledger_class is LedgerClass.VOLUMES]
    return sum((line.usd for line in found), Decimal(0))


def assert_adds_up(ledger: Ledger) -> None:
    for lines in (ledger.lines, ledger.causes):
        assert sum((line.usd for line in lines), Decimal(0)) == ledger.total_usd
        assert sum(line.rank_microseconds for line in lines) == ledger.paid_microseconds
    cells_usd = sum((usd for *_, usd in ledger.cells), Decimal(0))
    assert float(cells_usd) == pytest.approx(float(ledger.total_usd), abs=1e-6)
    assert sum(micros for *_, micros, _ in ledger.cells) == ledger.paid_microseconds


def test_volumes_are_a_line_of_dollars_without_seconds_in_total_spent_and_causes() -> None:
    events = [PLANNED, *killed_run()]
    ledger = fold(events)
    [line] = [line for line in ledger.lines if line.ledger_class is LedgerClass.VOLUMES]
    # Twice 100 s of a node and a minute of boot
    assert (line.rank_microseconds, line.usd, line.kind) == (0, Decimal("0.032"), "estimated")
    assert ledger.total_usd == Decimal("0.352") == Decimal(str(compute_spent_usd(events)))
    assert_adds_up(ledger)
    bare = fold([plan_event(3.6, on_demand=7.2), *killed_run()])
    assert ledger.paid_microseconds == bare.paid_microseconds
    assert ledger.lines[:-1] == bare.lines, "the other classes are as without volumes"
    # Each cause holds the volume of its time
    for cause, without in zip(ledger.causes, bare.causes, strict=True):
        assert cause.cause == without.cause
        assert float(cause.usd) == pytest.approx(1.1 * float(without.usd), abs=2e-6)


def test_a_plan_that_states_no_volume_has_no_line_of_volumes() -> None:
    old = fold([plan_event(3.6, on_demand=7.2), *killed_run()])
    stated = fold([plan_event(3.6, on_demand=7.2, volume="0"), *killed_run()])
    assert old == stated and old.total_usd == Decimal("0.32") and not volumes_of(old)


def test_the_same_machines_on_demand_have_the_same_volumes() -> None:
    usual = fold([plan_event(3.6, on_demand=7.2), *killed_run()]).same_on_demand_usd
    ledger = fold([PLANNED, *killed_run()])
    assert usual is not None and ledger.same_on_demand_usd is not None
    # A twentieth of the on-demand price, for the time that no interruption caused
    assert ledger.same_on_demand_usd == usual * Decimal("1.05")
    clean = GangLog(1, 0.0, [[0]])
    clean.steps(1, 10, useful_step=10.0)
    clean.outcome("completed")
    clean.ended("completed", 100.0)
    alike = fold([plan_event(3.6, on_demand=3.6, volume="0.36"), *clean.events])
    assert alike.same_on_demand_usd == alike.total_usd == Decimal("0.11"), "nothing is saved"


def test_every_second_that_ec2_bills_has_its_volume() -> None:
    """Also the minimum charge: EBS bills a volume for a minute at least."""
    brief = GangLog(1, 0.0, [[0]], machines=[{**MACHINE, "instance_id": "i-1"}])
    brief.steps(1, 1, useful_step=20.0)
    brief.ended("completed", 20.0)
    ledger = fold([PLANNED, *brief.events])
    assert ledger.total_usd == Decimal("0.066") and volumes_of(ledger) == Decimal("0.006")
    silent = event(
        BATCH_ATTEMPT,
        1e6,
        job_id="j",
        cause="reclaimed",
        started_utc=WALL,
        stopped_utc=WALL + 50.0,
        nodes=2,
        processes_per_node=2,
        instance_type="g5.xlarge",
        market="spot",
        usd_per_hour=3.6,
    )
    ledger = fold([PLANNED, silent])
    assert (ledger.total_usd, volumes_of(ledger)) == (Decimal("0.11"), Decimal("0.01"))
    assert_adds_up(ledger)
    elsewhere = {**silent.data, "region": "us-west-2", "volume_usd_per_hour": "0.72"}
    own = fold([PLANNED, replace(silent, data=elsewhere)])
    assert volumes_of(own) == Decimal("0.02"), "of the region in which the job was placed"
    assert_adds_up(own)


def test_nodes_on_one_instance_share_its_volume() -> None:
    machine = {**MACHINE, "instance_id": "i-1", "uptime_seconds": 0.0}
    both = GangLog(1, 0.0, [[0], [1]], machines=[machine, machine])
    both.steps(1, 10, useful_step=10.0)
    both.ended("completed", 100.0)
    ledger = fold([PLANNED, *both.events])
    assert (ledger.total_usd, volumes_of(ledger)) == (Decimal("0.11"), Decimal("0.01"))
    assert_adds_up(ledger)


@given(timelines(), st.lists(st.tuples(st.floats(0, 400), st.floats(0, 90)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_sums_are_exact_with_volumes_at_any_price(
    drawn: tuple[list[Event], int], changes: list[tuple[float, float]]
) -> None:
    plan, *rest = drawn[0]
    chosen = {**plan.data["chosen"], "volume_usd_per_hour": "0.010958904"}
    recorded = [prices_event([*changes])] if changes else []
    events = [replace(plan, data={**plan.data, "chosen": chosen}), *rest, *recorded]
    ledger = fold(events)
    assert_adds_up(ledger)
    hours = sum(bill.node.paid_micros for bill in ledger.nodes) / MICRO / 3600
    assert float(volumes_of(ledger)) == pytest.approx(0.010958904 * hours, abs=2e-6)
    assert compute_spent_usd(events) == pytest.approx(float(ledger.total_usd), abs=1e-6)


def make_priced_plan(tmp_path: Path, **cost: object) -> tuple[RunConfig, Plan]:
    config = RunConfig.model_validate(
        {
            "store": str(tmp_path / "store"),
            "cluster": {
                "instance_types": ["g5.12xlarge"],
                "plan_for": "batch",
                "nodes": 1,
                "processes_per_node": 2,
                "market": "on_demand",
            },
            "cost": {"volume_gib_per_node": 900.0, **cost},
        }
    )
    return config, make_plan(config, now_utc=WALL)


@pytest.mark.parametrize("changes", [(), ((60.0, "11.3"), (150.0, "4.9"))])
def test_live_spending_budget_stop_and_ledger_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[tuple[float, str], ...]
) -> None:
    """200 s of one node with two ranks: the terms of the ranks, which follow the agent's price, and
    the ledger that is made of the events afterwards.
    """
    config, plan = make_priced_plan(tmp_path)
    assert plan.chosen is not None and plan.chosen.price.volume_usd_per_hour > 0
    pool = {"instance_type": "g5.12xlarge", "market": "on_demand", "region": "us-east-1"}
    recorded = []
    if changes:
        history: list[tuple[float, float | str]] = [(0.0, "5.672"), *changes]
        recorded = [
            event(PRICES, 1e6, pools=[{**pool, "zone": None, "changes": _at_wall(history)}])
        ]
    made = event(PLAN, 0.0, **plan.brief().to_json())
    log = GangLog(1, 0.0, [[0, 1]])
    log.steps(1, 20, useful_step=10.0)
    log.ended("completed", 200.0)
    total = float(fold([made, *log.events, *recorded]).total_usd)
    machine_usd = float(fold([_without_volume(made), *log.events, *recorded]).total_usd)
    assert total - machine_usd == pytest.approx(900 * 0.08 / 730 * 200 / 3600, abs=2e-6)

    monkeypatch.setattr(gang_module, "training_backend", lambda _flow: "batch")
    flow = cast(Any, SimpleNamespace(capacity=plan.to_json()))
    order = cast(Any, SimpleNamespace(plan=plan, nodes=1, processes_per_node=2))
    job = Job(name="job", run="1", config=config)
    price = gang_module._HeldPrice(flow, job, order).read([made, *recorded])
    elapsed = SimpleNamespace(seconds=0.0)
    limits = _spend(plan.terms(), price, elapsed)
    assert limits.spent_usd == pytest.approx(total, abs=1e-6)
    # A budget of just these dollars stops the job; one that holds a step more does not
    step_usd = limits.next_step_usd
    for budget_usd, stop in ((total + 0.5 * step_usd, Stop.BUDGET), (total + 2 * step_usd, 0)):
        terms = replace(plan.terms(), budget_usd=budget_usd, reserve_usd=0.0)
        assert _spend(terms, price, elapsed).stop(steps_left=1) == stop


def test_a_placed_job_has_the_volume_of_its_own_pool() -> None:
    price = PoolPrice(usd_per_hour=Decimal("1.5"), volume_usd_per_hour=Decimal("0.25"))
    assert PoolPrice.from_json(cast(Any, price.to_json())) == price
    old = {key: text for key, text in price.to_json().items() if key != "volume_usd_per_hour"}
    assert PoolPrice.from_json(cast(Any, old)).volume_usd_per_hour == 0
    with pytest.raises(ValueError, match="-1 is not dollars per hour"):
        PoolPrice.from_json({"usd_per_hour": 1.5, "volume_usd_per_hour": "-1"})
    known = dict.fromkeys(Placement.__dataclass_fields__)
    placement = Placement(
        **{**known, "instance_type": "g5.xlarge", "market": "spot", "nodes": 2, "price": price}
    )
    assert placement.gang_usd_per_hour == 3.5
    attempt = BatchAttempt(
        job_id="j",
        job_name="train",
        queue="q",
        nodes=2,
        status="RUNNING",
        created_utc=None,
        started_utc=None,
        stopped_utc=None,
        exit_code=None,
        reason="",
        cause="ended",
    )
    data = batch_attempt_data(attempt, placement)
    assert data["volume_usd_per_hour"] == "0.25"


def test_prices_that_a_user_states_have_no_volume() -> None:
    pool = {"name": "a", "gpu": "A100", "node_selector": {"pool": "a"}, "usd_per_node_hour": 3.0}
    stated = RunConfig.model_validate(
        {"cluster": {"plan_for": "kubernetes"}, "kubernetes": {"pools": [pool]}}
    )
    chosen = make_plan(stated, now_utc=WALL).chosen
    assert chosen is not None and chosen.gang_usd_per_hour == 3.0 * chosen.nodes
    assert chosen.storage_usd == 0.0 and chosen.price.volume_usd_per_hour == 0


def test_a_charge_of_focus_is_storage_and_is_read_as_such(tmp_path: Path) -> None:
    events = [PLANNED, *killed_run()]
    rows = focus_rows(events)
    volumes = [row for row in rows if row["ServiceCategory"] == "Storage"]
    assert len(volumes) == len(rows) / 2 == 4
    billed = sum((Decimal(row["BilledCost"]) for row in volumes), Decimal(0))
    assert billed == pytest.approx(Decimal("0.032"))
    assert {row["ChargeCategory"] for row in volumes} == {"Usage"}
    assert {row["ListCost"] == row["BilledCost"] for row in volumes} == {True}
    assert {row["ResourceId"] for row in volumes} == {""}, "no event has the id of a volume"
    assert volumes[0]["ChargeDescription"] == "root volume of node 0 of start 1"
    assert sum(spent_by_month(rows).values()) == pytest.approx(fold(events).total_usd)
    path = tmp_path / "focus.csv"
    write_focus(path, rows)
    found = reconcile(events, read_bill(path))
    assert found.agrees and not found.findings, render(found)
    assert found.billed_volumes_usd == pytest.approx(Decimal("0.032"))
    laptop = focus_rows([plan_event(3.6, volume="0.36", simulated=True), *killed_run()])
    assert {row["BilledCost"] for row in laptop} == {"0"}


def month(tmp_path: Path, *rows: dict[str, str]) -> Reconciliation:
    """A job whose instances are on the bill to the second, and other lines."""
    lives = []
    for name, start in (("i-1", 0.0), ("i-2", 2000.0)):
        begin = WALL + start - 60.0
        life = Instance(
            instance_id=name,
            start=begin,
            end=WALL + start + 100.0,
            usd_per_hour=lambda _: 3.6,
        )
        lives += rows_of(life)
    report = write_report(tmp_path / "cur.csv", [*lives, *rows])
    return reconcile([PLANNED, *killed_run()], read_bill(report))


def test_a_bill_agrees_whether_its_volumes_are_tagged_or_not(tmp_path: Path) -> None:
    strangers = storage_row("vol-1", "EBS:VolumeUsage.gp3", "0.03", WALL)
    untagged = month(tmp_path, strangers)
    assert untagged.agrees and untagged.findings == () and untagged.other_usd == {}
    assert (untagged.metered_usd, untagged.volumes_usd) == (Decimal("0.2"), Decimal("0.032"))
    assert untagged.gap_usd == pytest.approx(Decimal("0.12")), "boots alone"
    shown = " ".join(render(untagged).split())
    assert "volumes: $0.0320 in the ledger, estimated: no EBS line has the tag ebbflow-job" in shown
    for usd in ("0.0311", "0.5"):  # a volume may be larger than configured
        own = storage_row("vol-1", "EBS:VolumeUsage.gp3", usd, WALL, ebbflow_job="demo")
        bucket = storage_row("bucket", "TimedStorage-ByteHrs", "0.25", WALL, ebbflow_job="demo")
        tagged = month(tmp_path, own, bucket)
        assert tagged.agrees and tagged.findings == ()
        assert tagged.billed_volumes_usd == Decimal(usd)
        shown = " ".join(render(tagged).split())
        assert f"${float(usd):.4f} of them of EBS, for which the ledger estimates $0.0320" in shown
        assert tagged.to_json()["volumes_usd"] == "0.032000"


def test_a_report_shows_volumes_without_seconds_and_says_how_they_are_estimated() -> None:
    report = build_report([PLANNED, *killed_run()])
    [row] = [row for row in format_ledger_rows(report) if row[0] == "volumes"]
    assert row == ("volumes", "n/a", "n/a", "$0.0320", "estimated")
    assert any("volumes: cost.volume_gib_per_node" in line for line in explain_figures(report))
    assert set(COLOURS) == set(LedgerClass)
    assert "volumes" in render_page(report)


def test_dollars_of_steps_regret_and_replay_have_the_volumes() -> None:
    events = [PLANNED, *killed_run()]
    bare = [plan_event(3.6, on_demand=7.2), *killed_run()]
    column = STEP_COLUMNS.index("usd")
    usd = [cast(float, row[column]) for row in list_step_figures(events)]
    assert usd == pytest.approx([1.1 * cast(float, row[column]) for row in list_step_figures(bare)])
    hindsight = cast(Any, build_report(events).money.get("hindsight"))
    without = cast(Any, build_report(bare).money.get("hindsight"))
    assert hindsight["usd"] == pytest.approx(1.1 * without["usd"])
    assert hindsight["regret_share"] == pytest.approx(without["regret_share"], rel=1e-3)
    errors = [replay(log)["predicted"]["error_share"] for log in (events, bare)]
    assert errors[0] == pytest.approx(errors[1], abs=1e-6)
    stated = replay(events, usd_per_hour=Decimal("3.6"))
    assert stated["what_if"]["usd"] == pytest.approx(stated["predicted"]["usd"])


def test_dollars_over_time_have_the_volumes() -> None:
    log = GangLog(1, 0.0, [[0]])
    log.steps(1, 10, useful_step=10.0)
    report = build_report([PLANNED, *log.events])
    spent = cast(Any, report.charts)["steps"]["usd"]
    assert spent[-1] == pytest.approx(0.11)


def _at_wall(history: list[tuple[float, float | str]]) -> list[list[float | str]]:
    return [[WALL + at, str(usd)] for at, usd in history]


def _spend(terms: Terms, price: RankPrice, elapsed: SimpleNamespace) -> Limits:
    """Let ranks follow the price for 200 s, as the coordinator does at each change."""
    elapsed.seconds = 0.0
    limits = Limits(terms, world_size=2, elapsed_seconds=lambda: elapsed.seconds)
    if price.changes:
        spent_usd = 2 * price.cost(WALL, WALL + 200.0)
        limits.terms = terms.at_price(price.price_at(WALL + 200.0), spent_usd=spent_usd)
        limits._terms_since = 200.0
    elapsed.seconds = 200.0
    return limits


def _without_volume(made: Event) -> Event:
    chosen = {
        key: value for key, value in made.data["chosen"].items() if key != "volume_usd_per_hour"
    }
    return replace(made, data={**made.data, "chosen": chosen})

"""Bills in other formats than the Cost and Usage Report: FOCUS, Cost Explorer's daily costs, and a
report that is too large for memory.
"""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.events import Event
from ebbflow.cost.errors import BillError
from ebbflow.cost.finance.bill import read_bill
from ebbflow.cost.finance.daily_costs import (
    compare_days,
    is_daily_costs,
    read_daily_costs,
    render_days,
)
from ebbflow.cost.finance.focus import focus_rows, spent_by_month, write_focus
from ebbflow.cost.finance.reconcile import reconcile, render
from tests.support.bills import Instance, rows_of, storage_row, write_report
from tests.support.timelines import WALL, GangLog, plan_event

HOUR = 3600.0
MACHINE = {
    "instance_id": "i-one",
    "instance_type": "g5.xlarge",
    "market": "spot",
    "region": "us-east-1",
    "zone": "us-east-1a",
    "uptime_seconds": 120.0,
}


def job(hours: float = 5.0) -> list[Event]:
    gang = GangLog(1, 0.0, [[0, 1]], machines=[MACHINE])
    gang.phase("startup", 60.0)
    gang.steps(1, 5, useful_step=(hours * HOUR - 90.0) / 5)
    gang.phase("shutdown", 30.0)
    gang.ended("completed", hours * HOUR)
    return [plan_event(3.6), *gang.events]


def lived(**changes) -> Instance:
    known = {
        "instance_id": "i-one",
        "start": WALL - 120.0,
        "end": WALL + 5 * HOUR + 30.0,
        "usd_per_hour": lambda at: 3.6,
    }
    return Instance(**{**known, **changes})


def aws_focus(path: Path, instances: Iterable[Instance]) -> Path:
    """Write the bill as AWS exports it in FOCUS 1.0."""
    rows = []
    for instance in instances:
        for row in rows_of(instance, tick=60.0):
            usage = row["lineItem/UsageType"]
            rows.append(
                {
                    "AvailabilityZone": row["lineItem/AvailabilityZone"],
                    "BilledCost": row["lineItem/UnblendedCost"],
                    "BillingCurrency": "USD",
                    "ChargeCategory": "Usage",
                    "ChargePeriodStart": row["lineItem/UsageStartDate"],
                    "ChargePeriodEnd": row["lineItem/UsageEndDate"],
                    "ConsumedQuantity": row["lineItem/UsageAmount"],
                    "ConsumedUnit": "Hrs",
                    "PricingCategory": "Dynamic" if "Spot" in usage else "Standard",
                    "ProviderName": "AWS",
                    "ResourceId": f"arn:aws:ec2:us-east-1:1:instance/{instance.instance_id}",
                    "ResourceType": "instance",
                    "ServiceCategory": "Compute",
                    "Tags": json.dumps(instance.tags),
                    "x_UsageType": f"USE1-{usage}",
                }
            )
    rows.append(
        {
            **rows[0],
            "ResourceId": "arn:aws:ec2:us-east-1:1:volume/vol-1",
            "ServiceCategory": "Storage",
            "x_UsageType": "USE1-EBS:VolumeUsage.gp3",
            "ConsumedUnit": "GB-Mo",
            "Tags": '{"ebbflow-job": "demo"}',
            "BilledCost": "0.25",
        }
    )
    rows.append({**rows[0], "ChargeCategory": "Tax", "BilledCost": "9.0"})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_focus_bill_of_aws_is_reconciled_like_a_cost_and_usage_report(tmp_path: Path) -> None:
    rows = write_report(tmp_path / "cur.csv", rows_of(lived(), tick=60.0))
    usual = reconcile(job(), read_bill(rows))
    found = reconcile(job(), read_bill(aws_focus(tmp_path / "focus.csv", [lived()])))
    assert found.agrees and found.findings == (), render(found)
    assert (found.billed_usd, found.gap_usd) == (usual.billed_usd, usual.gap_usd)
    assert found.other_usd == {"storage": Decimal("0.25")} | {"other": Decimal("9.0")}
    dear = lived(market="on_demand", zone="us-east-1d", instance_type="g5.2xlarge")
    wrong = reconcile(job(), read_bill(aws_focus(tmp_path / "wrong.csv", [dear])))
    kinds = [finding.kind for finding in wrong.findings]
    assert kinds == ["wrong zone", "wrong type", "wrong market"]


def test_the_focus_that_the_product_writes_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "focus.csv"
    write_focus(path, focus_rows(job()))
    found = reconcile(job(), read_bill(path))
    assert found.agrees, render(found)
    boot = [part for part in found.parts if part.cause == "boot time"]
    assert [part.usd for part in boot] == [pytest.approx(Decimal("0.12"))] == [found.gap_usd]


def test_nobody_is_billed_for_simulated_dollars_and_idle_time_has_its_list_price() -> None:
    simulated = [plan_event(3.6, simulated=True), *job()[1:]]
    rows = focus_rows(simulated)
    assert {row["BilledCost"] for row in rows} == {"0"} == {row["ListCost"] for row in rows}
    assert sum(Decimal(row["x_SimulatedCost"]) for row in rows) == pytest.approx(Decimal(18))
    assert not any(spent_by_month(rows).values()), "no month of a team pays for a laptop's run"
    real = focus_rows(job())
    assert {row["x_SimulatedCost"] for row in real} == {"0"} and len(real) == 2
    for row in real:
        assert Decimal(row["ListCost"]) == 2 * Decimal(row["BilledCost"]) > 0, (
            "also of the boot: on-demand is $7.20"
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"BillingCurrency": "EUR"}, "focus.csv:2: BillingCurrency is EUR; only USD is read"),
        ({"BilledCost": "dear"}, "focus.csv:2: billed_cost: 'dear'"),
        ({"ChargePeriodEnd": "soon"}, "focus.csv:2: charge_period_end: 'soon' is not a time"),
        ({"ConsumedQuantity": "-1"}, r"-1 hours of an instance .* never negative"),
    ],
)
def test_an_invalid_focus_line_is_refused_with_its_place(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    path = aws_focus(tmp_path / "focus.csv", [lived()])
    with path.open(newline="") as file:
        first = next(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(first))
        writer.writeheader()
        writer.writerow({**first, **changes})
    with pytest.raises(BillError, match=words):
        list(read_bill(path))


def daily(path: Path, head: str, *rows: str) -> Path:
    first = head.partition(",")[0].strip('"')
    zeros = ",".join('"0"' for _ in head.split(",")[1:])
    path.write_text("\n".join([head, f'"{first} total",{zeros}', *rows]) + "\n")
    return path


def utc_day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


@pytest.mark.parametrize(
    ("head", "billed", "faulty"),
    [
        ('"Usage type","USE1-SpotUsage:g5.xlarge($)","Total costs($)"', "18.2", False),
        ('"Usage type","USE1-SpotUsage:g5.xlarge($)","Total costs($)"', "700.0", False),
        ('"Usage type","USE1-SpotUsage:g5.xlarge($)","Total costs($)"', "12.0", True),
        ('"Instance type","g5.xlarge($)","Total costs($)"', "18.2", False),
        ('"Service","EC2-Instances($)","Total costs($)"', "12.0", True),
        ('"Tag","ebbflow-job$demo($)","Total costs($)"', "18.2", False),
        ('"Tag","ebbflow-job$demo($)","Total costs($)"', "30.0", True),
    ],
)
def test_cost_explorers_days_hold_what_the_job_metered(
    tmp_path: Path, head: str, billed: str, faulty: bool
) -> None:
    """5 h at $3.60, all on one day in UTC: $18.00."""
    assert utc_day(WALL) == utc_day(WALL + 5 * HOUR)
    path = daily(tmp_path / "costs.csv", head, f'"{utc_day(WALL)}","{billed}","999"')
    assert is_daily_costs(path)
    [day] = compare_days(job(), read_daily_costs(path), job_tag="ebbflow-job")
    assert day.metered_usd == pytest.approx(Decimal(18), abs=Decimal("0.01"))
    assert (day.fault is not None) is faulty


@pytest.mark.parametrize(("billed", "faulty"), [("95", False), ("110", True)])
def test_a_day_holds_the_volumes_of_that_day_alone(
    tmp_path: Path, billed: str, faulty: bool
) -> None:
    """$3.60 an hour, and $0.36 for the volume: at most $95.04 and an hour of boots on each day."""
    long = [plan_event(3.6, volume="0.36"), *job(100.0)[1:]]
    rows = [f'"{utc_day(WALL + day * 86400)}","{billed}","{billed}"' for day in range(6)]
    path = daily(tmp_path / "costs.csv", '"Tag","ebbflow-job$demo($)","Total costs($)"', *rows)
    days = compare_days(long, read_daily_costs(path), job_tag="ebbflow-job")
    whole = [day for day in days if day.metered_usd > 80]
    assert len(whole) >= 3
    assert {day.fault is not None for day in whole} == {faulty}


def test_a_job_over_midnight_is_divided_between_its_days(tmp_path: Path) -> None:
    head = '"Service","EC2-Instances($)","Total costs($)"'
    rows = [f'"{utc_day(WALL + day * 86400)}","90","90"' for day in range(3)]
    path = daily(tmp_path / "costs.csv", head, *rows)
    days = compare_days(job(40.0), read_daily_costs(path), job_tag="ebbflow-job")
    assert len(days) >= 2 and sum(day.metered_usd for day in days) == pytest.approx(Decimal(144))
    assert not any(day.fault for day in days)
    [*_, last] = days
    less = read_daily_costs(daily(tmp_path / "less.csv", head, *rows[: len(days) - 1]))
    [*covered, missing] = compare_days(job(40.0), less, job_tag="ebbflow-job")
    assert (missing.day, missing.billed_usd, missing.fault) == (last.day, None, None)
    assert all(day.billed_usd for day in covered)
    shown = render_days("demo", less, [missing])
    assert f"not in the export, which covers {utc_day(WALL)} to {covered[-1].day}" in shown
    gap = daily(tmp_path / "gap.csv", head, rows[0], f'"{utc_day(WALL + 5 * 86400)}","90","90"')
    [*_, free] = compare_days(job(40.0), read_daily_costs(gap), job_tag="ebbflow-job")
    assert free.billed_usd == 0 and free.fault is not None, "within the period: billed nothing"
    before = daily(tmp_path / "before.csv", head, f'"{utc_day(WALL - 9 * 86400)}","90","90"')
    with pytest.raises(BillError, match=r"covers .* fix: export these days"):
        compare_days(job(40.0), read_daily_costs(before), job_tag="ebbflow-job")


def test_daily_costs_that_cannot_hold_the_job_are_refused(tmp_path: Path) -> None:
    head = '"Usage type","USE1-BoxUsage:m5.large($)","Total costs($)"'
    path = daily(tmp_path / "costs.csv", head, f'"{utc_day(WALL)}","1","1"')
    with pytest.raises(BillError, match=r"SpotUsage:g5\.xlarge.*fix: group by"):
        compare_days(job(), read_daily_costs(path), job_tag="ebbflow-job")
    monthly = daily(tmp_path / "monthly.csv", head, '"November 2026","1","1"')
    with pytest.raises(BillError, match=r"monthly\.csv:3: .*daily granularity"):
        read_daily_costs(monthly)
    hours = daily(tmp_path / "hours.csv", '"Usage type","USE1-BoxUsage:m5.large(Hrs)"')
    with pytest.raises(BillError, match="is not in dollars"):
        read_daily_costs(hours)
    report = write_report(tmp_path / "cur.csv", rows_of(lived(), tick=60.0))
    assert not is_daily_costs(report)


@pytest.mark.slow
def test_the_lines_of_others_are_not_kept_in_memory(tmp_path: Path) -> None:
    """20,000 lines of untagged instances and volumes at the job's time."""
    others = []
    for number in range(4000):
        stranger = lived(instance_id=f"i-{number:017x}", tags={})
        others += rows_of(stranger, tick=3600.0)
        others.append(storage_row(f"vol-{number}", "EBS:VolumeUsage.gp3", "0.1", WALL))
    report = write_report(tmp_path / "cur.csv", [*others, *rows_of(lived(), tick=60.0)])
    others.clear()
    tracemalloc.start()
    found = reconcile(job(), read_bill(report))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.agrees and report.stat().st_size > 5_000_000
    assert peak < 4_000_000

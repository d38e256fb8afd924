"""A job's ledger against synthetic bills: it agrees within a percent, and what is wrong is called
by its name.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.events import Event
from ebbflow.core.layout import event_key
from ebbflow.core.store import Store
from ebbflow.cost.errors import BillError
from ebbflow.cost.finance.allocation import (
    compare_allocations,
    is_allocation,
    read_allocations,
    render_allocations,
)
from ebbflow.cost.finance.bill import read_bill
from ebbflow.cost.finance.reconcile import Reconciliation, reconcile, render
from tests.support.bills import Instance, rows_of, storage_row, total_usd, write_report
from tests.support.timelines import WALL, GangLog, plan_event, prices_event

ROOT = Path(__file__).parents[2]
TAG = {"ebbflow-job": "demo"}
BOOT = 150.0
ZONE = {"region": "us-east-1", "zone": "us-east-1a"}


def node(
    generation: int, start: float, seconds: float, instance: str, *, uptime: float = BOOT, **known
) -> list[Event]:
    """One generation of one node of two ranks, on an instance that had been up for so long."""
    machine = {
        "instance_id": instance,
        "instance_type": "g5.xlarge",
        "market": "spot",
        **ZONE,
        **known,
    }
    gang = GangLog(generation, start, [[0, 1]], machines=[{**machine, "uptime_seconds": uptime}])
    gang.phase("startup", 20.0)
    gang.steps(1, 5, useful_step=(seconds - 30.0) / 5)
    gang.phase("shutdown", 10.0)
    gang.ended("node_lost", seconds)
    return gang.events


def drifting(changes: list[tuple[float, float]], first: float):
    """The price at a Unix time, as the changes (seconds after WALL) have it."""

    def usd_per_hour(at: float) -> float:
        held = [usd for since, usd in sorted(changes) if since <= at - WALL]
        if held:
            return held[-1]
        return first

    return usd_per_hour


def two_instances() -> tuple[list[Event], list[Instance]]:
    """A job on two instances one after the other, the price changing under it, and how long each
    really lived.
    """
    changes = [(4000.0, 4.5), (9000.0, 2.7)]
    events = [plan_event(3.6), prices_event(changes, region=None, zone=None)]
    events += node(1, 1000.0, 7000.0, "i-one") + node(2, 8500.0, 6000.0, "i-two")
    price = drifting(changes, 3.6)
    lived = [("i-one", 1000.0, 8000.0), ("i-two", 8500.0, 14500.0)]
    return events, [
        Instance(
            instance_id=name,
            start=WALL + a - BOOT,
            end=WALL + b + 20.0,
            usd_per_hour=price,
            tags=TAG,
        )
        for name, a, b in lived
    ]


def reconciled(
    events: list[Event], instances: list[Instance], folder: Path, *extra: dict, **how
) -> Reconciliation:
    rows = []
    for instance in instances:
        rows.extend(rows_of(instance))
    return reconcile(events, read_bill(write_report(folder / "cur.csv", [*rows, *extra], **how)))


def kinds(found: Reconciliation) -> list[tuple[str, str]]:
    return [(finding.kind, finding.resource) for finding in found.findings]


@pytest.mark.parametrize("second_generation", [False, True])
def test_a_clean_job_agrees_and_its_gap_is_boot_time(
    tmp_path: Path, second_generation: bool
) -> None:
    events, instances = two_instances()
    found = reconciled(events, instances, tmp_path, second_generation=second_generation)
    assert found.agrees and found.findings == ()
    short = []
    for instance in instances:
        short += [{**row, "lineItem/UsageAmount": "1e-300"} for row in rows_of(instance)]
    assert not reconcile(events, read_bill(write_report(tmp_path / "short.csv", short))).agrees
    bill_rows = []
    for instance in instances:
        bill_rows += rows_of(instance)
    assert found.billed_usd == total_usd(bill_rows)
    assert sum(part.usd for part in found.parts) == pytest.approx(
        found.gap_usd, abs=Decimal("1e-12")
    )
    boot = sum(part.usd for part in found.parts if part.cause == "boot time")
    assert float(boot) == pytest.approx(2 * BOOT * 3.6 / 3600, rel=0.2)
    text = render(found)
    assert "synthetic bill" in text and "SIMULATED" not in text and "boot time" in text
    assert json.loads(json.dumps(found.to_json()))["bill"] == "synthetic bill"


def test_random_jobs_agree_within_a_percent(tmp_path: Path) -> None:
    """Random lives, boots and prices, the job's instances among those of others."""
    draw = random.Random(7)
    for _ in range(25):
        changes = [(draw.uniform(0, 40_000), draw.uniform(1, 6)) for _ in range(draw.randrange(4))]
        events = [plan_event(3.6), prices_event(changes)]
        instances = []
        t = 0.0
        for number in range(1, draw.randrange(2, 6)):
            t += draw.uniform(100, 3000)
            boot = draw.uniform(30, 300)
            seconds = draw.uniform(1800, 9000)
            name = f"i-{number}"
            events += node(number, t, seconds, name, uptime=boot)
            life = {"start": WALL + t - boot, "end": WALL + t + seconds + draw.uniform(0, 10)}
            instances.append(
                Instance(instance_id=name, usd_per_hour=drifting(changes, 3.6), tags=TAG, **life)
            )
            t += seconds
        stranger = replace(instances[0], instance_id="i-stranger", tags={"ebbflow-job": "another"})
        found = reconciled(events, [*instances, stranger], tmp_path)
        assert (
            found.findings == ()
            and found.unexplained_share is not None
            and found.unexplained_share < 0.01
        ), changes
        assert found.agrees


def test_planted_discrepancies_are_named(tmp_path: Path) -> None:
    events, [one, two] = two_instances()
    orphan = replace(one, instance_id="i-orphan", start=WALL + 500.0, end=WALL + 50_000.0)
    elsewhere = replace(two, zone="us-east-1d", usd_per_hour=lambda at: 5.4)
    found = reconciled(events, [replace(one, tags={}), elsewhere, orphan], tmp_path)
    assert kinds(found) == [
        ("orphan instance", "i-orphan"),
        ("wrong zone", "i-two"),
    ]
    assert "1 of 2 instances" in found.notes[0] and "no tag ebbflow-job" in found.notes[0]
    zone = [part for part in found.parts if part.cause == "other zone"]
    assert [part.instance_id for part in zone] == ["i-two"] and zone[0].usd > 0
    assert not found.agrees
    words = {finding.kind: finding.words for finding in found.findings}
    assert "is it still running?" in words["orphan instance"]
    assert words["wrong zone"] == "billed in us-east-1d, the events have us-east-1a"
    wrong = reconciled(
        events, [replace(one, market="on_demand", instance_type="g5.2xlarge"), two], tmp_path
    )
    assert kinds(wrong) == [("wrong type", "i-one"), ("wrong market", "i-one")]


def test_a_bill_at_another_price_does_not_agree(tmp_path: Path) -> None:
    events, [one, two] = two_instances()
    found = reconciled(events, [replace(one, usd_per_hour=lambda at: 7.2), two], tmp_path)
    assert kinds(found) == [("wrong price", "i-one")] and not found.agrees
    assert "at the prices on record it would be $" in found.findings[0].words
    pretended = [
        replace(event, data={**event.data, "simulated": True}) if event.name == "plan" else event
        for event in events
    ]
    found = reconciled(pretended, [replace(one, usd_per_hour=lambda at: 7.2), two], tmp_path)
    assert found.findings == () and "SIMULATED: the job was priced as if" in render(found)


def test_a_machine_that_was_up_for_hours_before_the_job_was_not_booting(tmp_path: Path) -> None:
    events = [plan_event(3.6), *node(1, 40_000.0, 7000.0, "i-one", uptime=36_000.0)]
    life = {"start": WALL + 4000.0, "end": WALL + 47_000.0}
    found = reconciled(
        events,
        [Instance(instance_id="i-one", usd_per_hour=lambda at: 3.6, tags=TAG, **life)],
        tmp_path,
    )
    boot = sum(part.usd for part in found.parts if part.cause == "boot time")
    assert boot <= Decimal("0.6") and found.billed["i-one"].elsewhere_usd > 30


def test_a_tag_with_an_apostrophe_hides_no_other(tmp_path: Path) -> None:
    events, instances = two_instances()
    named = [replace(instance, tags={"owner": "O'Brien", **TAG}) for instance in instances]
    assert reconciled(events, named, tmp_path, second_generation=True).findings == ()


def test_an_instance_that_lived_on_is_not_explained_away(tmp_path: Path) -> None:
    events, [one, two] = two_instances()
    found = reconciled(events, [one, replace(two, end=two.end + 1200.0)], tmp_path)
    assert not found.agrees and found.unexplained_share > 0.05
    assert any(
        "1,220 s billed while no agent of the job was there" in part.words for part in found.parts
    )


def test_an_instance_without_a_line_and_a_node_without_an_instance(tmp_path: Path) -> None:
    events, [one, _] = two_instances()
    found = reconciled(events, [one], tmp_path)
    assert kinds(found) == [("not billed", "i-two")]
    assert "the bill ends before it did" in found.findings[0].words
    nameless = [replace(event, data={**event.data, "instance_id": None}) for event in events]
    nothing = reconciled(nameless, [one], tmp_path)
    assert not nothing.agrees and "HttpPutResponseHopLimit" in render(nothing)
    assert kinds(nothing) == [("orphan instance", "i-one")]


def test_a_short_life_is_billed_a_minute(tmp_path: Path) -> None:
    events = [plan_event(3.6), *node(1, 1000.0, 40.0, "i-one", uptime=5.0)]
    short = Instance(
        instance_id="i-one",
        start=WALL + 995.0,
        end=WALL + 1040.0,
        usd_per_hour=lambda at: 3.6,
        tags=TAG,
    )
    found = reconciled(events, [short], tmp_path)
    assert found.billed_usd == Decimal("0.06") and found.agrees
    assert {part.cause for part in found.parts} == {"boot time"}, (
        "the ledger knows of the minute itself"
    )


def test_tagged_storage_is_shown_and_not_counted(tmp_path: Path) -> None:
    events, instances = two_instances()
    rows = [
        storage_row("vol-1", "EBS:VolumeUsage.gp3", "0.0123", WALL, ebbflow_job="demo"),
        storage_row("bucket", "TimedStorage-ByteHrs", "0.5", WALL, ebbflow_job="another"),
        storage_row("i-one", "DataTransfer-Out-Bytes", "0.02", WALL, ebbflow_job="demo"),
    ]
    [hour, *_] = rows_of(instances[0])
    credit = {**hour, "lineItem/LineItemType": "Credit", "lineItem/UnblendedCost": "-0.3"}
    found = reconciled(events, instances, tmp_path, *rows, credit)
    assert found.other_usd == {
        "storage": Decimal("0.0123"),
        "transfer": Decimal("0.02"),
        "other": Decimal("-0.3"),
    }
    assert found.agrees


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", "lacks line_item_resource_id"),
        ("", "lacks line_item_resource_id"),
        (
            "{header}\ni-1,yesterday,2026-01-01T01:00:00Z,AmazonEC2,SpotUsage:g5,1,1,USD\n",
            "cur.csv:2: line_item_usage",
        ),
        (
            "{header}\ni-1,2026-01-01,2026-01-01,AmazonEC2,SpotUsage:g5,1,dear,USD\n",
            "cost: 'dear' is not a nu",
        ),
        (
            "{header}\ni-1,2026-01-01,2026-01-01,AmazonEC2,SpotUsage:g5,1,1,EUR\n",
            "only bills in USD",
        ),
        (
            "{header}\ni-1,2026-01-01,2026-01-01,AmazonEC2,SpotUsage:g5,1e400,1,USD\n",
            "amount: '1e400' is not a number",
        ),
        (
            "{header}\ni-1,2026-01-02,2026-01-01,AmazonEC2,SpotUsage:g5,1,1,USD\n",
            "is before the start, 2026-01-02",
        ),
        (
            "{header}\ni-1,2026-01-01,2026-01-02,AmazonEC2,SpotUsage:g5,-1,1,USD\n",
            "cur.csv:2: -1 hours of an inst",
        ),
        (
            "{header}\ni-1,2026-01-01,2026-01-02,AmazonEC2,SpotUsage:g5,1,-1,USD\n",
            "a Usage line is never negative",
        ),
    ],
)
def test_an_invalid_bill_is_reported_with_its_place(
    tmp_path: Path, text: str, problem: str
) -> None:
    names = (
        "ResourceId",
        "UsageStartDate",
        "UsageEndDate",
        "ProductCode",
        "UsageType",
        "UsageAmount",
        "UnblendedCost",
    )
    header = ",".join(f"lineItem/{name}" for name in (*names, "CurrencyCode"))
    path = tmp_path / "cur.csv"
    path.write_text(text.replace("{header}", header))
    with pytest.raises(BillError, match=problem):
        list(read_bill(path))


def test_a_parquet_bill_is_read_or_needs_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "cur.parquet"
    _, instances = two_instances()
    rows = []
    for instance in instances:
        rows.extend(rows_of(instance))
    try:
        import pandas
        import pyarrow  # noqa: F401
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(BillError, match=r"needs pyarrow.*CSV"):
            list(read_bill(path))
        return
    pandas.DataFrame(rows).to_parquet(path)
    assert sum(line.usd for line in read_bill(path)) == total_usd(rows)


@pytest.mark.slow
def test_the_command_joins_a_job_and_a_bill(tmp_path: Path) -> None:
    events, instances = two_instances()
    job = Store.open(str(tmp_path / "store" / "jobs" / "demo"))
    job.put(
        event_key(1, 0, "test", "000000.a"), "\n".join(event.to_json() for event in events).encode()
    )
    bill_rows = []
    for instance in instances:
        bill_rows += rows_of(instance)
    bill = write_report(tmp_path / "cur.csv", bill_rows)
    command = [
        sys.executable,
        "-m",
        "cost",
        "reconcile",
        "demo",
        str(bill),
        "--store",
        str(tmp_path / "store"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "synthetic bill" in done.stdout and "unexplained: " in done.stdout
    missing = subprocess.run(
        [*command[:5], "no.csv", *command[6:]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (
        missing.returncode == 2
        and "no.csv: cannot be read" in missing.stderr
        and "Traceback" not in missing.stderr
    )


def test_nodes_that_shared_an_instance_agree_with_its_bill(tmp_path: Path) -> None:
    """Two pods on one machine: billed once, and metered once."""
    known = {
        "instance_id": "i-one",
        "instance_type": "g5.xlarge",
        "market": "spot",
        **ZONE,
        "uptime_seconds": BOOT,
    }
    gang = GangLog(1, 1000.0, [[0], [1]], machines=[known, known])
    gang.steps(1, 5, useful_step=1400.0)
    gang.ended("node_lost", 7000.0)
    life = {"start": WALL + 1000.0 - BOOT, "end": WALL + 8000.0}
    one = Instance(instance_id="i-one", usd_per_hour=lambda at: 3.6, tags=TAG, **life)
    found = reconciled([plan_event(3.6), *gang.events], [one], tmp_path)
    assert found.agrees and found.shared == ["i-one"] and found.joined_usd == Decimal("7")
    assert "ran on it at once and divided its price" in render(found)


@pytest.mark.parametrize("ids", ["the same", "others", "none"])
def test_a_delivery_that_is_given_twice_is_counted_once(tmp_path: Path, ids: str) -> None:
    """Ids are those of one delivery; the next has others, and a report may have none."""
    events, instances = two_instances()
    rows = []
    for instance in instances:
        rows += rows_of(instance)
    key = "identity/LineItemId"
    again = [
        {**row, key: {"the same": row[key], "others": f"x{n}", "none": ""}[ids]}
        for n, row in enumerate(rows)
    ]
    if ids == "none":
        kept = [{**row, key: ""} for row in rows]
    else:
        kept = rows
    # Two lines alike in one file are two.
    kept = [*kept, {**kept[0], key: kept[0][key] and "z"}]
    again = [*again, {**again[0], key: again[0][key] and "z"}]
    files = [
        write_report(tmp_path / "first.csv", kept),
        write_report(tmp_path / "second.csv", again),
    ]
    both = []
    for number, path in enumerate(files):
        both.extend(read_bill(path, delivery=number))
    once = reconcile(events, read_bill(files[0]))
    twice = reconcile(events, both)
    assert twice.billed_usd == once.billed_usd == total_usd(kept)
    assert (once.repeated_lines, twice.repeated_lines) == (0, len(kept))
    assert f"{len(kept)} lines were given twice" in render(twice) and twice.to_json()[
        "repeated_lines"
    ] == len(kept)


def test_deliveries_that_differ_are_refused_or_named(tmp_path: Path) -> None:
    events, instances = two_instances()
    rows = []
    for instance in instances:
        rows += rows_of(instance)
    first = write_report(tmp_path / "first.csv", rows)
    dearer = [{**row, "lineItem/UnblendedCost": "9"} for row in rows]
    newer = write_report(tmp_path / "newer.csv", dearer)
    with pytest.raises(BillError, match=r"newer.csv:2: .*pass only the newest one"):
        reconcile(events, [*read_bill(first), *read_bill(newer, delivery=1)])
    other = write_report(
        tmp_path / "ids.csv",
        [{**row, "identity/LineItemId": f"x{n}"} for n, row in enumerate(dearer)],
    )
    doubled = reconcile(events, [*read_bill(first), *read_bill(other, delivery=1)])
    assert not doubled.agrees and ("billed twice", "i-one") in kinds(doubled)


def test_a_delivery_that_corrects_a_part_of_an_hour_is_named(tmp_path: Path) -> None:
    events = [plan_event(3.6), *node(1, 0.0, 900.0, "i-one")]
    files = []
    # The newest hour of a delivery may be cut short
    for number, end in enumerate((WALL + 150.0, WALL + 900.0)):
        one = Instance(
            instance_id="i-one", start=WALL - BOOT, end=end, usd_per_hour=lambda at: 3.6, tags=TAG
        )
        rows = [{**row, "identity/LineItemId": f"{number}"} for row in rows_of(one)]
        files.append(write_report(tmp_path / f"{number}.csv", rows))
    assert reconcile(events, read_bill(files[1])).agrees
    bill_lines = []
    for n, path in enumerate(files):
        bill_lines += read_bill(path, delivery=n)
    both = reconcile(events, bill_lines)
    assert (
        kinds(both) == [("billed twice", "i-one")]
        and "in two files that differ" in both.findings[0].words
    )


def pod_attempt(name: str, nodes: list[tuple[float, float]]) -> Event:
    data = {
        "job_id": f"ebbflow/jobsets/{name}",
        "job_name": name,
        "queue": "kubernetes",
        "nodes": len(nodes),
        "status": "SUCCEEDED",
        "cause": "ended",
        "reason": "",
        "started_utc": nodes[0][0],
        "stopped_utc": nodes[0][1],
        "created_utc": nodes[0][0],
        "exit_code": 0,
        "node_times": nodes,
        "instance_type": "g5.xlarge",
        "market": "spot",
        "region": "us-east-1",
        "zone": "us-east-1a",
        "processes_per_node": 1,
        "usd_per_hour": 0.4,
        "quoted_usd_per_hour": "0.4",
        "price_kind": "estimated",
    }
    return Event(
        name="batch_attempt",
        job="demo",
        run="1",
        attempt=0,
        generation=0,
        node=-1,
        rank=-1,
        step=None,
        t_wall=nodes[0][1],
        t_mono=0.0,
        data=data,
    )


def test_allocations_of_a_cluster_are_compared_by_attempt(tmp_path: Path) -> None:
    """The shape of https://opencost.io/docs/integrations/api, aggregated by pod; two windows.

    OpenCost 1.x writes these fields for every pod, and null for a number that it does not know.
    """
    events = [
        pod_attempt("js-1", [(WALL, WALL + 3600), (WALL, WALL + 3000)]),
        pod_attempt("js-12", [(WALL, WALL + 60)]),
    ]

    window = {"start": "2026-11-22T00:00:00Z", "end": "2026-11-23T00:00:00Z"}
    costs = (
        "cpuCost",
        "gpuCost",
        "ramCost",
        "pvCost",
        "networkCost",
        "loadBalancerCost",
        "sharedCost",
        "externalCost",
    )
    amounts = (
        "cpuCores",
        "cpuCoreHours",
        "gpuCount",
        "gpuHours",
        "ramBytes",
        "ramByteHours",
        "pvBytes",
    )
    unknown = (
        "cpuEfficiency",
        "gpuEfficiency",
        "ramEfficiency",
        "totalEfficiency",
        "pvs",
        "lbAllocations",
    )

    def allocated(pod: str, minutes: float | None, usd: float) -> dict:
        known = {
            "cluster": "one",
            "node": "ip-10-0-0-1",
            "namespace": "ebbflow",
            "pod": pod,
            "container": "main",
            "controller": "js-1-worker-0",
            "controllerKind": "job",
            "providerID": "i-0",
            "labels": {"app": "x"},
        }
        return {
            "name": pod,
            "properties": known,
            "window": window,
            **window,
            **dict.fromkeys(costs, usd / 8),
            **dict.fromkeys(amounts, 1.0),
            **dict.fromkeys(unknown),
            "minutes": minutes,
            "totalCost": usd,
        }

    windows = [
        {
            "js-1-control-0-0-a": allocated("js-1-control-0-0-a", 40.0, 0.3),
            "__idle__": allocated("", 9.0, 9.0),
        },
        {
            "js-1-control-0-0-a": allocated("js-1-control-0-0-a", 20.0, 0.1),
            "js-1-worker-0-0-b": allocated("js-1-worker-0-0-b", 51.0, 0.35),
        },
    ]
    path = tmp_path / "allocation.json"
    path.write_text(json.dumps({"code": 200, "data": windows}))
    assert is_allocation(path)
    one, other = compare_allocations(events, read_allocations(path))
    assert (one.attempt, one.pods, one.seconds, one.usd) == (
        "js-1",
        2,
        111 * 60,
        Decimal("0.75"),
    ) and one.agrees
    assert (other.attempt, other.pods) == ("js-12", 0) and not other.agrees
    text = render_allocations(events, [one, other])
    assert (
        "js-1: 2 pods, 6,660 s (6,600 s by the cluster), $0.7500" in text
        and "! no pod found" in text
    )
    assert "$0.7500 allocated, $0.7400 metered" in text
    windows[1]["js-1-worker-0-0-b"]["minutes"] = 90.0
    path.write_text(json.dumps({"code": 200, "data": windows}))
    assert not compare_allocations(events, read_allocations(path))[0].agrees
    windows[1]["js-1-worker-0-0-b"]["minutes"] = None
    path.write_text(json.dumps({"code": 200, "data": windows}))
    [first, _] = compare_allocations(events, read_allocations(path))
    assert first.seconds is None and first.usd == Decimal("0.75")
    pod = '{"data": [{"allocation": {"minutes": MINUTES, "totalCost": 1}}]}'
    wrong = [pod.replace("MINUTES", minutes) for minutes in ('"x"', "-5", "1e400")]
    for content in ("{}", "no", '{"data": [{"a": {}}]}', *wrong):
        path.write_text(content)
        with pytest.raises(BillError, match="allocation"):
            read_allocations(path)
    export = tmp_path / "export.csv"
    export.write_text(
        "Date,Namespace,Pod,Container,TotalCost\n2026-11-23,ebbflow,js-1-control-0-0-a,main,0.5\n"
    )
    assert is_allocation(export)
    [row] = read_allocations(export)
    assert (row.pod, row.seconds, row.usd) == ("js-1-control-0-0-a", None, Decimal("0.5"))

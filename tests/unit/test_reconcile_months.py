"""Months of bills: ten of AWS Batch's normal life without an alarm, twenty with one planted fault
that is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.events import BATCH_ATTEMPT, NODE_ENDED, Event
from ebbflow.cost.finance.bill import read_bill
from ebbflow.cost.finance.reconcile import Reconciliation, reconcile, render
from tests.support.bills import Instance, rows_of, storage_row, tag_column, write_report
from tests.support.timelines import WALL, GangLog, event, plan_event, prices_event

HOUR = 3600.0
TAG = {"ebbflow-job": "demo"}
OTHER = {"ebbflow-job": "another"}
# What AWS Batch puts on the instances of a compute environment: AWS's own tags, and those of the
# environment. Nothing of a job.
BATCH = {
    "aws:batch:compute-environment": "ebbflow-spot-g5",
    "aws:autoscaling:groupName": "ebbflow-spot-g5-asg-7d1f",
    "aws:ec2launchtemplate:id": "lt-0123456789abcdef0",
    "AWSBatchServiceTag": "batch",
    "ebbflow-stack": "ebbflow",
}
CHANGES = [(9 * HOUR + 700, 4.5), (31 * HOUR + 1500, 2.7), (52 * HOUR, 3.3)]
MACHINE = {
    "instance_type": "g5.xlarge",
    "market": "spot",
    "region": "us-east-1",
    "zone": "us-east-1a",
}


@dataclass
class Month:
    """What the job recorded, how long its instances really lived, and what is done to the lines of
    the bill.
    """

    events: list[Event]
    lives: list[Instance]
    others: list[list[Event]] = field(default_factory=list)
    edit: Callable[[list[dict]], list[dict]] = lambda rows: rows

    def reconciled(self, folder: Path) -> Reconciliation:
        rows = []
        for life in self.lives:
            rows.extend(rows_of(life, tick=20.0))
        report = write_report(folder / "cur.csv", [*self.edit(rows), *account_rows()])
        return reconcile(self.events, read_bill(report), others=self.others)


def account_rows() -> list[dict[str, str]]:
    """What else is on the bill of such an account: a colleague's instance of the same type, another
    job's in the same compute environment, volumes, transfer, NAT and addresses, without a tag of a
    job.
    """
    rows = [
        *rows_of(life("i-colleague", 5 * HOUR, 30 * HOUR, tags={"Name": "notebook"}), tick=600.0),
        *rows_of(life("i-bare", 2 * HOUR, 50 * HOUR, tags={}), tick=600.0),
        *rows_of(life("i-neighbour", 20 * HOUR, 33 * HOUR, tags=BATCH), tick=600.0),
    ]
    for hour in range(60):
        at = WALL + hour * HOUR
        rows += [
            storage_row("vol-0a1", "EBS:VolumeUsage.gp3", "0.011", at),
            storage_row("i-one", "DataTransfer-Regional-Bytes", "0.002", at),
            storage_row("nat-0b2", "NatGateway-Hours", "0.045", at),
            storage_row("nat-0b2", "NatGateway-Bytes", "0.3", at),
            storage_row("eni-0c3", "PublicIPv4:InUseAddress", "0.005", at),
        ]
    return rows


def price(at: float) -> float:
    held = [usd for since, usd in CHANGES if since <= at - WALL]
    if held:
        return held[-1]
    return 3.6


def node(
    number: int, start: float, end: float, name: str, *, uptime: float = 150.0, clock: float = 0.0
) -> list[Event]:
    """One generation of one node, on a machine whose clock is ahead by `clock` seconds."""
    known = {**MACHINE, "instance_id": name, "uptime_seconds": uptime}
    gang = GangLog(number, start + clock, [[0, 1]], machines=[known])
    gang.phase("startup", 60.0)
    gang.steps(1, 5, useful_step=(end - start - 90.0) / 5)
    gang.phase("shutdown", 30.0)
    gang.ended("node_lost", end - start)
    return gang.events


def life(name: str, start: float, end: float, **known) -> Instance:
    given = {"tags": BATCH, "usd_per_hour": price, **known}
    return Instance(instance_id=name, start=WALL + start, end=WALL + end, **given)


def plain(
    *, clock: float = 0.0, uptime: float = 150.0, later: float = 5.0, twice: bool = False
) -> Month:
    """Three instances of 8 to 30 hours; the first two follow each other, the third ran twice with a
    pause of 400 s.
    """
    spans = [("i-one", 1.2, 9.3), ("i-two", 9.5, 39.7), ("i-three", 40.1, 58.6)]
    events = [plan_event(3.6), prices_event(CHANGES)]
    lives = []
    for number, (name, start, end) in enumerate(spans, start=1):
        middle = (start + end) / 2 * HOUR
        events += node(2 * number, start * HOUR, middle, name, uptime=uptime, clock=clock)
        begin = middle + 400.0
        events += node(
            2 * number + 1,
            begin,
            end * HOUR,
            name,
            uptime=uptime + begin - start * HOUR,
            clock=clock,
        )
        lives.append(life(name, start * HOUR - uptime, end * HOUR + later))
    return Month(
        events, lives, edit=(lambda rows: [*rows, *rows]) if twice else (lambda rows: rows)
    )


def shared(month: Month, *, after: bool, tagged: bool) -> Month:
    """Another job had the second instance before this one, or after it."""
    one, two, three = month.lives
    if after:
        longer = replace(two, end=two.end + 5 * HOUR)
        other = node(1, 39.7 * HOUR + 90, 44.7 * HOUR, "i-two", uptime=30 * HOUR)
        if tagged:
            edit = by_hour("i-two", range(40, 46), tags=OTHER)
        else:
            edit = month.edit
        return replace(
            month, lives=[one, longer, three], others=[] if tagged else [other], edit=edit
        )
    events = [
        replace(
            event, data={**event.data, "uptime_seconds": event.data["uptime_seconds"] + 4 * HOUR}
        )
        if event.data.get("instance_id") == "i-two"
        else event
        for event in month.events
    ]
    longer = replace(two, start=two.start - 4 * HOUR, tags=OTHER if tagged else BATCH)
    return replace(month, events=events, lives=[one, longer, three])


def by_hour(
    name: str,
    hours: range | list[int],
    *,
    tags: dict | None = None,
    drop: bool = False,
    factor: float = 1.0,
):
    """Edit the lines of an instance in some hours after WALL: another tag, none at all, another
    price.
    """

    def edit(rows: list[dict]) -> list[dict]:
        found = []
        for row in rows:
            hour = int(row["identity/LineItemId"].rpartition("-")[2]) - int(WALL // HOUR)
            if row["lineItem/ResourceId"] == name and hour in hours:
                if drop:
                    continue
                row = {
                    **row,
                    "lineItem/UnblendedCost": str(float(row["lineItem/UnblendedCost"]) * factor),
                }
                row |= {tag_column(key): value for key, value in (tags or {}).items()}
            found.append(row)
        return found

    return edit


def silent_node(month: Month) -> Month:
    """A Batch job was paid for two hours, and its machine died before an agent spoke."""
    ran = {
        "started_utc": WALL + 60 * HOUR,
        "stopped_utc": WALL + 62 * HOUR,
        "cause": "reclaimed",
        "nodes": 1,
    }
    chosen = {
        "instance_type": "g5.xlarge",
        "market": "spot",
        "usd_per_hour": 3.3,
        "price_kind": "recorded",
    }
    job = event(BATCH_ATTEMPT, 63 * HOUR, job_id="job-1", processes_per_node=2, **ran, **chosen)
    silent = life("i-four", 60 * HOUR - 200, 62 * HOUR + 60)
    return replace(month, events=[*month.events, job], lives=[*month.lives, silent])


def lost_ends(month: Month) -> Month:
    return replace(
        month,
        events=[
            event for event in month.events if event.name != NODE_ENDED or event.generation != 7
        ],
    )


NORMAL = {
    "plain": lambda: plain(),
    "instances end two minutes later": lambda: plain(later=120.0),
    "instances end nine minutes later": lambda: plain(later=540.0),
    "a slow boot": lambda: plain(uptime=590.0),
    "another job had the instance before": lambda: shared(plain(), after=False, tagged=True),
    "another job, without a tag, before": lambda: shared(plain(), after=False, tagged=False),
    "another job has the instance afterwards": lambda: shared(plain(), after=True, tagged=True),
    "another job's events show it afterwards": lambda: shared(plain(), after=True, tagged=False),
    "clocks four minutes ahead": lambda: plain(clock=240.0),
    "a node that never spoke, one that vanished": lambda: lost_ends(silent_node(plain())),
}


@pytest.mark.parametrize("name", NORMAL)
def test_a_normal_month_raises_no_alarm(name: str, tmp_path: Path) -> None:
    found = NORMAL[name]().reconciled(tmp_path)
    assert found.findings == () and found.agrees, render(found)
    assert float(sum(part.usd for part in found.parts)) == pytest.approx(
        float(found.gap_usd), abs=1e-9
    )
    clocks = [note for note in found.notes if "clock was about 2" in note]
    assert len(clocks) == (3 if name.startswith("clocks") else 0)
    assert all("ahead of the bill's" in note for note in clocks)
    text = "\n".join(found.notes)
    assert "have no tag ebbflow-job" in text and "i-neighbour" in text
    assert "i-colleague" not in text and "i-bare" not in text
    assert found.other_usd["transfer"] == pytest.approx(Decimal("0.12"))


def edited(edit: Callable, **known) -> Month:
    return replace(plain(**known), edit=edit)


def with_life(index: int, **changes) -> Month:
    month = plain()
    lives = list(month.lives)
    lives[index] = replace(
        lives[index],
        **{k: v(lives[index]) if callable(v) and k == "end" else v for k, v in changes.items()},
    )
    return replace(month, lives=lives)


def more(*lives: Instance) -> Month:
    month = plain()
    return replace(month, lives=[*month.lives, *lives])


def one_twice(rows: list[dict]) -> list[dict]:
    extra = [row for row in rows if row["lineItem/ResourceId"] == "i-two"][5]
    return [*rows, {**extra, "identity/LineItemId": "x", "lineItem/UsageAmount": "1.0"}]


def half(rows: list[dict]) -> list[dict]:
    target = [row for row in rows if row["lineItem/ResourceId"] == "i-two"][7]
    less = {
        "lineItem/UsageAmount": "0.5",
        "lineItem/UnblendedCost": str(float(target["lineItem/UnblendedCost"]) / 2),
    }
    return [{**row, **less} if row is target else row for row in rows]


def pause_of_hours() -> Month:
    """The third instance had no agent for four hours between its two nodes, and was billed
    throughout.
    """
    month = plain()
    third = node(20, 40.1 * HOUR, 45 * HOUR, "i-three") + node(
        21, 49 * HOUR, 58.6 * HOUR, "i-three", uptime=9 * HOUR
    )
    kept = [event for event in month.events if event.generation < 6]
    return replace(month, events=[*kept, *third])


def missing_and_zombie() -> Month:
    month = with_life(2, end=lambda one: one.end + HOUR + 300)
    return replace(month, edit=by_hour("i-three", [48], drop=True))


FAULTS: dict[str, tuple[Callable[[], Month], set[str]]] = {
    "an hour missing, and a zombie hour": (
        missing_and_zombie,
        {"hour not billed", "billed without use"},
    ),
    "a tagged orphan": (
        lambda: more(life("i-x", 5 * HOUR, 30 * HOUR, tags=TAG)),
        {"orphan instance"},
    ),
    "a short tagged orphan": (
        lambda: more(life("i-x", 5 * HOUR, 5 * HOUR + 700, tags=TAG)),
        {"orphan instance"},
    ),
    "a tagged orphan of another type, long after": (
        lambda: more(life("i-x", 90 * HOUR, 91 * HOUR, tags=TAG, instance_type="p4d.24xlarge")),
        {"orphan instance"},
    ),
    "another zone": (lambda: with_life(1, zone="us-east-1d"), {"wrong zone"}),
    "another type": (lambda: with_life(1, instance_type="g5.2xlarge"), {"wrong type"}),
    "on-demand": (lambda: with_life(1, market="on_demand"), {"wrong market"}),
    "twice the price": (
        lambda: with_life(1, usd_per_hour=lambda at: 2 * price(at)),
        {"wrong price"},
    ),
    "one hour at another price": (
        lambda: edited(by_hour("i-two", [20], factor=1.3)),
        {"wrong price"},
    ),
    "an instance missing": (
        lambda: edited(by_hour("i-one", range(0, 99), drop=True)),
        {"not billed"},
    ),
    "twenty minutes too long": (
        lambda: with_life(2, end=lambda one: one.end + 1200),
        {"billed without use"},
    ),
    "five hours too long": (
        lambda: with_life(2, end=lambda one: one.end + 5 * HOUR),
        {"billed without use"},
    ),
    "a day too long": (
        lambda: with_life(0, end=lambda one: one.end + 24 * HOUR),
        {"billed without use"},
    ),
    "an hour billed twice": (lambda: edited(one_twice), {"billed twice"}),
    "half an hour missing": (lambda: edited(half), {"hour not billed"}),
    "the first hour missing": (
        lambda: edited(by_hour("i-two", [9], drop=True)),
        {"hour not billed"},
    ),
    "the last hour missing": (
        lambda: edited(by_hour("i-two", [39], drop=True)),
        {"hour not billed"},
    ),
    "no agent for four hours": (pause_of_hours, {"billed without use"}),
    "Spot at the on-demand price": (
        lambda: with_life(1, usd_per_hour=lambda at: 10.0),
        {"wrong price"},
    ),
    "another job's tag on an instance of its own": (
        lambda: with_life(1, tags=OTHER),
        {"missed tag"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(name: str, tmp_path: Path) -> None:
    make, kinds = FAULTS[name]
    found = make().reconciled(tmp_path)
    assert not found.agrees and {finding.kind for finding in found.findings} == kinds, render(found)
    assert float(sum(part.usd for part in found.parts)) == pytest.approx(
        float(found.gap_usd), abs=1e-9
    )


def test_there_are_ten_normal_months_and_twenty_faults() -> None:
    assert (len(NORMAL), len(FAULTS)) == (10, 20)

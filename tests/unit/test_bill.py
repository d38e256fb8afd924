"""Bill lines: each field is read from its column, and each line of several deliveries counts once."""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.cost.errors import BillError
from ebbflow.cost.finance.bill import BillLine, RepeatFilter, normalise_tag, read_bill
from tests.support.records import is_frozen, takes_names_only

START = datetime(2026, 11, 20, 10, tzinfo=UTC).timestamp()
ROW = {
    "lineItem/ResourceId": "arn:aws:ec2:us-east-1:1:instance/i-one",
    "lineItem/UsageStartDate": "2026-11-20T10:00:00Z",
    "lineItem/UsageEndDate": "2026-11-20T11:00:00Z",
    "lineItem/ProductCode": "AmazonEC2",
    "lineItem/UsageType": "USE2-SpotUsage:g5.xlarge",
    "lineItem/UsageAmount": "0.5",
    "lineItem/UnblendedCost": "0.25",
    "lineItem/LineItemType": "DiscountedUsage",
    "lineItem/AvailabilityZone": "us-east-2a",
    "product/instanceType": "g5.2xlarge",
    "lineItem/CurrencyCode": "USD",
    "bill/InvoiceId": "synthetic",
    "identity/LineItemId": "line-7",
    "resourceTags/user:ebbflow-job": "demo",
}
REQUIRED = {
    "lineItem/ResourceId": "line_item_resource_id",
    "lineItem/UsageStartDate": "line_item_usage_start_date",
    "lineItem/UsageEndDate": "line_item_usage_end_date",
    "lineItem/ProductCode": "line_item_product_code",
    "lineItem/UsageType": "line_item_usage_type",
    "lineItem/UsageAmount": "line_item_usage_amount",
    "lineItem/UnblendedCost": "line_item_unblended_cost",
}
ONLY_REQUIRED = {name: ROW[name] for name in REQUIRED}

LINE = BillLine(
    resource_id="i-one",
    start=START,
    end=START + 3600,
    kind="instance",
    usage_type="SpotUsage:g5.xlarge",
    line_type="Usage",
    amount=Decimal("0.5"),
    usd=Decimal("0.25"),
    zone="",
    instance_type="g5.xlarge",
    market="spot",
    tags={},
    line_id="a",
    where="cur.csv:2",
)
# What tells two lines with one id apart: each difference makes another line.
OTHER_LINES = [
    {"resource_id": "i-two"},
    {"usage_type": "SpotUsage:g5.2xlarge"},
    {"line_type": "Credit"},
    {"start": START - 1},
    {"end": START + 3601},
]


def cell(text: str) -> str:
    escaped = text.replace('"', '""')
    return f'"{escaped}"'


def as_csv(*rows: dict[str, str]) -> str:
    """All rows have the columns of the first one."""
    listed = [list(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(",".join(map(cell, cells)) + "\r\n" for cells in listed)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., BillLine]:
    """Write one row as a report, and read it."""

    def read_row(row: dict[str, str]) -> BillLine:
        path = tmp_path / "cur.csv"
        path.write_text(as_csv(row), newline="")
        [line] = read_bill(path)
        return line

    return read_row


def test_a_bill_line_has_each_field_from_its_column(tmp_path: Path) -> None:
    path = tmp_path / "cur.csv"
    path.write_text(as_csv(ROW))
    [line] = read_bill(path, delivery=3)
    assert line == BillLine(
        resource_id="i-one",
        start=START,
        end=START + 3600,
        kind="instance",
        usage_type="USE2-SpotUsage:g5.xlarge",
        line_type="DiscountedUsage",
        amount=Decimal("0.5"),
        usd=Decimal("0.25"),
        zone="us-east-2a",
        instance_type="g5.2xlarge",
        market="spot",
        tags={"ebbflowjob": "demo"},
        synthetic=True,
        line_id="line-7",
        delivery=3,
        where=f"{path}:2",
    )
    assert line.seconds == 1800.0


def test_a_bill_line_without_the_optional_columns_has_defaults(
    read: Callable[..., BillLine], tmp_path: Path
) -> None:
    line = read(ONLY_REQUIRED)
    assert (line.line_type, line.zone, line.instance_type, line.line_id) == (
        "Usage",
        "",
        "g5.xlarge",
        "",
    )
    assert (line.tags, line.synthetic, line.delivery) == ({}, False, 0)
    bare = BillLine(
        **{
            name: value
            for name, value in vars(line).items()
            if name not in ("synthetic", "delivery")
        }
    )
    assert (bare.synthetic, bare.delivery) == (False, 0)


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_report_without_a_required_column_is_refused(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "cur.csv"
    path.write_text(
        as_csv({name: value for name, value in ONLY_REQUIRED.items() if name != missing})
    )
    with pytest.raises(BillError, match=f"it lacks {REQUIRED[missing]}; fix: create"):
        list(read_bill(path))


@pytest.mark.parametrize(
    ("line_type", "kind"),
    [
        ("", "instance"),
        ("Usage", "instance"),
        ("DiscountedUsage", "instance"),
        ("SavingsPlanCoveredUsage", "instance"),
        ("SavingsPlanNegation", "other"),
        ("Credit", "other"),
        ("Tax", "other"),
    ],
)
def test_only_lines_of_usage_are_time_of_an_instance(
    read: Callable[..., BillLine], line_type: str, kind: str
) -> None:
    line = read({**ROW, "lineItem/LineItemType": line_type})
    assert line.kind == kind
    assert line.seconds == (1800.0 if kind == "instance" else 0.0)
    assert line.market == ("spot" if kind == "instance" else "")


@pytest.mark.parametrize(
    ("product", "usage_type", "kind", "market", "instance_type"),
    [
        ("AmazonEC2", "SpotUsage:g5.xlarge", "instance", "spot", "g5.xlarge"),
        ("AmazonEC2", "EUC1-BoxUsage:m5.large", "instance", "on_demand", "m5.large"),
        ("AmazonEC2", "BoxUsage", "instance", "on_demand", ""),
        ("AmazonEC2", "DedicatedUsage:m5.large", "instance", "on_demand", "m5.large"),
        ("AmazonEC2", "HostBoxUsage:m5", "instance", "on_demand", "m5"),
        ("AmazonEC2", "ReservedBoxUsage:p4d.24xlarge", "instance", "on_demand", "p4d.24xlarge"),
        ("AmazonEC2", "UnusedBoxUsage:m5.large", "other", "", ""),
        ("AmazonEC2", "BoxUsageX:m5.large", "other", "", ""),
        ("AmazonEC2", "USE2-DataTransfer-Out", "transfer", "", ""),
        ("AmazonEC2", "NatGateway-Bytes", "transfer", "", ""),
        ("AmazonS3", "USE1-EUC1-AWS-Out-Bytes", "transfer", "", ""),
        ("AmazonEC2", "EBS:VolumeUsage.gp3", "storage", "", ""),
        ("AmazonS3", "TimedStorage-ByteHrs", "storage", "", ""),
        ("AmazonECR", "TimedStorage-ByteHrs", "other", "", ""),
    ],
)
def test_a_bill_line_has_its_kind_from_usage_type_and_product(
    read: Callable[..., BillLine],
    product: str,
    usage_type: str,
    kind: str,
    market: str,
    instance_type: str,
) -> None:
    line = read(
        {**ONLY_REQUIRED, "lineItem/ProductCode": product, "lineItem/UsageType": usage_type}
    )
    assert (line.kind, line.market, line.instance_type) == (kind, market, instance_type)


def test_billed_seconds_are_rounded_to_microseconds(read: Callable[..., BillLine]) -> None:
    assert read({**ROW, "lineItem/UsageAmount": "0.1000000001"}).seconds == 360.0
    assert read({**ROW, "lineItem/UsageAmount": "0.100000001"}).seconds == 360.000004


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lineItem/CurrencyCode": "EUR"}, "line_item_currency_code is EUR"),
        (
            {"lineItem/UsageStartDate": "yesterday"},
            "line_item_usage_start_date: 'yesterday' is not a time",
        ),
        ({"lineItem/UsageEndDate": "later"}, "line_item_usage_end_date: 'later' is not a time"),
        ({"lineItem/UsageAmount": "much"}, "line_item_usage_amount: 'much' is not a number"),
        ({"lineItem/UnblendedCost": "dear"}, "line_item_unblended_cost: 'dear' is not a number"),
        (
            {"lineItem/UsageEndDate": "2026-11-20T09:59:59Z"},
            "is before the start, 2026-11-20T10:00:00Z",
        ),
        (
            {"lineItem/UsageAmount": "-0.01"},
            "-0.01 hours of an instance for .0.25: a DiscountedUsage line is never",
        ),
        ({"lineItem/UnblendedCost": "-0.01"}, "0.5 hours of an instance for .-0.01"),
    ],
)
def test_an_invalid_bill_line_is_refused_with_its_place(
    read: Callable[..., BillLine], changes: dict[str, str], problem: str
) -> None:
    with pytest.raises(BillError, match=f"cur.csv:2: .*{problem}"):
        read({**ROW, **changes})


def test_a_bill_line_may_be_free_empty_and_without_duration(read: Callable[..., BillLine]) -> None:
    free = read({**ROW, "lineItem/UsageAmount": "0", "lineItem/UnblendedCost": "0"})
    assert (free.seconds, free.usd) == (0.0, 0)
    empty = read({**ROW, "lineItem/UsageAmount": "", "lineItem/UnblendedCost": " "})
    assert (empty.amount, empty.usd) == (0, 0)
    moment = read({**ROW, "lineItem/UsageEndDate": ROW["lineItem/UsageStartDate"]})
    assert moment.start == moment.end == START
    credit = read({**ROW, "lineItem/LineItemType": "Credit", "lineItem/UnblendedCost": "-0.3"})
    assert credit.usd == Decimal("-0.3")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2026-11-20T10:00:00", 0), ("2026-11-20T10:00:00Z", 0), ("2026-11-20T10:00:00+02:00", -7200)],
)
def test_a_time_without_a_zone_is_utc(
    read: Callable[..., BillLine], monkeypatch: pytest.MonkeyPatch, text: str, seconds: int
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "America/New_York")
        time.tzset()
        assert read({**ROW, "lineItem/UsageStartDate": text}).start == START + seconds
    time.tzset()


@pytest.mark.parametrize(
    ("key", "normalised"),
    [
        ("ebbflow-job", "ebbflowjob"),
        ("user:ebbflow-job", "ebbflowjob"),
        ("user_Ebbflow_Job", "ebbflowjob"),
        ("aws:createdBy", "createdby"),
        ("AWS_ebbflow.job2", "ebbflowjob2"),
        ("users:job", "usersjob"),
        ("my_user:job", "myuserjob"),
    ],
)
def test_spellings_of_a_tag_key_are_normalised_alike(key: str, normalised: str) -> None:
    assert normalise_tag(key) == normalised


@pytest.mark.parametrize(
    ("columns", "tags"),
    [
        (
            {"resourceTags/user:ebbflow-job": "a", "resourceTags/user:owner": ""},
            {"ebbflowjob": "a"},
        ),
        ({"resourceTags/user:EbbflowJob": "a"}, {"ebbflowjob": "a"}),
        (
            {"resourceTags/user:ebbflow-job": "a", "resourceTags/user:Ebbflow-Job": ""},
            {"ebbflowjob": "a"},
        ),
        ({"resource_tags_user_ebbflow_job": "a"}, {"ebbflowjob": "a"}),
        ({"resourceTags": '{"job": "a"}'}, {"job": "a"}),
        ({"resource_tags": '{"user_ebbflow_job": "a", "n": 3}'}, {"ebbflowjob": "a", "n": "3"}),
        ({"resource_tags": "{'user_ebbflow_job': 'a'}"}, {"ebbflowjob": "a"}),
        ({"resource_tags": '{"owner": "O\'Brien"}'}, {"owner": "O'Brien"}),
        ({"resource_tags": "{broken", "resourceTags/user:owner": "b"}, {"owner": "b"}),
        (
            {"resource_tags": '{"job": "a"}', "resourceTags/user:owner": "b"},
            {"job": "a", "owner": "b"},
        ),
        ({"resource_tags": "[('user_job', 'a'), ('empty', '')]"}, {"job": "a", "empty": ""}),
        (
            {"resource_tags": "[('job', 'a')]", "resourceTags/user:owner": "b"},
            {"job": "a", "owner": "b"},
        ),
        ({"resource_tags": "job=a"}, {}),
        ({"resource_tags": "{" * 100_000}, {}),
        ({"resourceTags/user:note": "one\r\ntwo"}, {"note": "one\r\ntwo"}),
    ],
)
def test_tags_are_read_in_the_form_of_each_report(
    read: Callable[..., BillLine], columns: dict[str, str], tags: dict[str, str]
) -> None:
    assert read({**ONLY_REQUIRED, **columns}).tags == tags


def test_rows_of_a_report_may_be_blank_short_or_long(tmp_path: Path) -> None:
    path = tmp_path / "cur.csv"
    header = ",".join([*ONLY_REQUIRED, "identity/LineItemId"])
    row = ",".join(ONLY_REQUIRED.values())
    path.write_text(f" {header} \n{row},x\n\n{row}\n{row},z,more\n")
    assert [(line.line_id, line.where) for line in read_bill(path)] == [
        ("x", f"{path}:2"),
        ("", f"{path}:4"),
        ("z", f"{path}:5"),
    ]


def test_a_compressed_report_is_read_like_a_plain_one(tmp_path: Path) -> None:
    row = {**ROW, "resourceTags/user:note": "one\r\ntwo"}
    plain = tmp_path / "cur.csv"
    packed = tmp_path / "cur.csv.gz"
    plain.write_text(as_csv(row), newline="")
    packed.write_bytes(gzip.compress(as_csv(row).encode()))
    [line] = read_bill(packed)
    assert [replace(line, where="")] == [replace(other, where="") for other in read_bill(plain)]


def damaged_stream() -> bytes:
    """A gzip header, and a block of a type that deflate does not have."""
    return gzip.compress(b"x")[:10] + b"\xff" * 20


UNREADABLE = {
    "missing.csv": None,
    "plain.csv.gz": as_csv(ROW).encode(),
    "cut.csv.gz": gzip.compress(as_csv(ROW).encode())[:-20],
    "damaged.csv.gz": damaged_stream(),
    "latin.csv": as_csv(ROW).encode() + b"\xff\n",
    "long.csv": as_csv({**ROW, "resourceTags/user:note": "x" * 200_000}).encode(),
    "missing.parquet": None,
    "damaged.parquet": b"PAR1",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_report_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = UNREADABLE[name]
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
        pytest.importorskip("pandas")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BillError, match=f"{name}: cannot be read: "):
        list(read_bill(path))


def test_a_parquet_report_is_read_by_column_and_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    start, end = (
        datetime.fromisoformat(ROW[f"lineItem/Usage{edge}Date"])
        .astimezone(UTC)
        .replace(tzinfo=None)
        for edge in ("Start", "End")
    )
    row = {
        **{name: ROW[given] for given, name in REQUIRED.items()},
        "line_item_usage_start_date": start,
        "line_item_usage_end_date": end,
        "line_item_usage_amount": 0.5,
        "product_instance_type": None,
        "identity_line_item_id": None,
        "resource_tags": [("user_ebbflow_job", "O'Brien"), ("user_none", None)],
        "resource_tags_user_number": 3,
        "a column of no use": "x",
    }
    text = pyarrow.string()
    types = {"resource_tags": pyarrow.map_(text, text), "product_instance_type": text}
    columns = {
        name: pyarrow.array(
            [value, "dear" if name == "line_item_unblended_cost" else value], types.get(name)
        )
        for name, value in row.items()
    }
    path = tmp_path / "cur.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    lines = read_bill(path, delivery=2)
    line = next(lines)
    assert (line.resource_id, line.start, line.end, line.seconds) == (
        "i-one",
        START,
        START + 3600,
        1800.0,
    )
    assert (line.instance_type, line.line_id, line.tags) == (
        "g5.xlarge",
        "",
        {"ebbflowjob": "O'Brien", "number": "3"},
    )
    assert (line.where, line.delivery) == (f"{path}: row 1", 2)
    with pytest.raises(BillError, match="row 2: line_item_unblended_cost: 'dear'"):
        next(lines)
    del columns["line_item_usage_type"]
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(BillError, match="it lacks line_item_usage_type"):
        next(read_bill(path))
    path.write_bytes(b"PAR1")
    with pytest.raises(BillError, match="cannot be read"):
        next(read_bill(path))


def test_a_parquet_bill_without_pyarrow_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BillError, match=r"needs pyarrow.*CSV"):
        list(read_bill(tmp_path / "cur.parquet"))


def repeats(*lines: BillLine) -> list[bool]:
    known = RepeatFilter()
    return [known.is_repeat(line) for line in lines]


@pytest.mark.parametrize("changes", OTHER_LINES, ids=lambda changes: next(iter(changes)))
def test_a_line_that_differs_in_use_is_no_repeat_whatever_its_id(changes: dict) -> None:
    other = replace(LINE, **changes)
    assert repeats(LINE, other, LINE, other) == [False, False, True, True]
    assert repeats(LINE, replace(other, line_id="b", delivery=1)) == [False, False]


@pytest.mark.parametrize("changes", [{"amount": Decimal("0.6")}, {"usd": Decimal("0.3")}])
def test_deliveries_with_one_line_id_and_other_numbers_are_refused(changes: dict) -> None:
    newer = replace(LINE, **changes, where="new.csv:9")
    words = (
        f"new.csv:9: an earlier line has 0.5 for .0.25, but this line has {newer.amount} for "
        f".{newer.usd}: two"
    )
    with pytest.raises(BillError, match=words):
        repeats(LINE, newer)
    assert repeats(replace(LINE, line_id=""), replace(newer, line_id="")) == [False, False]
    assert repeats(LINE, replace(newer, line_id="b", delivery=1)) == [False, False]


def test_a_line_with_a_known_id_is_a_repeat_within_one_file_and_across_files() -> None:
    assert repeats(LINE, LINE, replace(LINE, delivery=1)) == [False, True, True]


def test_equal_lines_repeat_only_as_often_as_another_file_has_them() -> None:
    """Equal lines without ids are as many as the file with the most of them has."""

    def lines(*deliveries: int) -> list[BillLine]:
        return [replace(LINE, line_id="", delivery=delivery) for delivery in deliveries]

    assert repeats(*lines(0, 0)) == [False, False]
    assert repeats(*lines(0, 1)) == [False, True]
    assert repeats(*lines(0, 0, 1, 1, 1)) == [False, False, True, True, False]
    assert repeats(*lines(0, 1, 1, 2, 2, 2)) == [False, True, False, True, True, False]


@given(st.lists(st.integers(0, 2), max_size=12))
def test_the_filter_keeps_as_many_equal_lines_as_the_fullest_file_has(
    deliveries: list[int],
) -> None:
    kept = repeats(
        *(replace(LINE, line_id="", delivery=delivery) for delivery in deliveries)
    ).count(False)
    assert kept == max((deliveries.count(delivery) for delivery in range(3)), default=0)


def test_a_bill_may_have_a_tag_as_json_of_any_type(read: Callable[..., BillLine]) -> None:
    assert read(
        {**ONLY_REQUIRED, "resource_tags": json.dumps({"Owner": None, "on": True})}
    ).tags == {"on": "True"}


def test_a_bill_line_takes_names_only_and_is_frozen() -> None:
    assert takes_names_only(BillLine) and is_frozen(BillLine)

"""Recorded prices as files: every shape that is read, what is wrong with a file in one line, and
the checks of both.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.preflight import CheckResult, PreflightContext, run_checks
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.checks import CHECKS
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.quote import Quote, format_age, is_zone_of
from ebbflow.cost.prices.recorded import (
    RecordedPrices,
    Recording,
    SpotRecord,
    prices_at,
    read_recording,
    write_recording,
)

ROOT = Path(__file__).parents[2]
SYNTHETIC = Path("tests/prices/synthetic.json")
NOW = 1_790_000_000.0
CSV = """Timestamp,InstanceType,AvailabilityZone,SpotPrice
2026-09-20 14:43:50+00:00,g5.xlarge,us-east-1a,0.4317
2026-09-21 07:00:00,g5.xlarge,us-east-1a,0.4182
2026-09-21 09:30:00+02:00,g5.xlarge,us-east-1a,0.4100
"""
RECORD = {
    "AvailabilityZone": "us-east-1a",
    "InstanceType": "g5.xlarge",
    "SpotPrice": "0.41",
    "Timestamp": "2026-09-21T07:00:00Z",
}

_changes = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from("ab"), st.integers(1, 9)), min_size=1, max_size=30
)

BAD_JSON: dict[str, tuple[Any, str]] = {
    "no list": ({"SpotPrices": []}, 'no list "SpotPriceHistory"'),
    "no record": ([RECORD, 3], "record 2: 3 is not a record"),
    "no price": ([{**RECORD, "SpotPrice": ""}], "record 1: SpotPrice: is missing"),
    "words": (
        [{**RECORD, "SpotPrice": "free"}],
        "record 1: SpotPrice: 'free' is not dollars per hour",
    ),
    "not a number": (
        [RECORD, {**RECORD, "SpotPrice": "NaN"}],
        "record 2: SpotPrice: 'NaN' is not dollars per hour",
    ),
    "nothing": ([{**RECORD, "SpotPrice": "0"}], "record 1: SpotPrice: '0' is not dollars per hour"),
    "a float": ([{**RECORD, "SpotPrice": 0.41}], "record 1: SpotPrice: 0.41 is not text"),
    "no zone": (
        [{**RECORD, "AvailabilityZone": "us-east-1"}],
        "AvailabilityZone: 'us-east-1' is no zone's name",
    ),
    "no time": (
        [{**RECORD, "Timestamp": "yesterday"}],
        "record 1: Timestamp: 'yesterday' is not a time",
    ),
    "no hour": ({"SpotPriceHistory": [RECORD], "RecordedAt": 7}, "RecordedAt: 7 is not a time"),
    "later": (
        {"SpotPriceHistory": [RECORD], "RecordedAt": "2026-09-20T00:00:00Z"},
        "record 1: Timestamp: '2026-09-21T07:00:00Z' is after the file's RecordedAt",
    ),
    "no ids": (
        {"SpotPriceHistory": [], "AvailabilityZones": {"us-east-1": 3}},
        "AvailabilityZones.us-east-1: not zone",
    ),
}


def quotes(path: Path, region: str = "us-east-1", now: float = NOW) -> list[Quote]:
    return list(RecordedPrices.read(path, now).spot(load_catalogue()["g5.xlarge"], region))


@pytest.mark.parametrize("packed", [False, True])
def test_json_as_the_command_line_prints_it_and_csv_gzipped_or_not(packed: bool, tmp_path: Path):
    path = tmp_path / "prices"
    for text in (CSV, json.dumps({"SpotPriceHistory": [RECORD]}, indent=4), json.dumps([RECORD])):
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        (quote,) = quotes(path)
        assert (quote.zone, quote.region) == ("us-east-1a", "us-east-1")
        assert str(quote.usd_per_hour) == ("0.4100" if text is CSV else "0.41"), (
            "09:30+02:00 is after 07:00 UTC"
        )
    path.write_text(CSV)
    (earlier,) = quotes(path, now=NOW - 10 * 3600)
    assert str(earlier.usd_per_hour) == "0.4317", "later changes are not known yet"
    assert quotes(path)[0].at == quotes(path)[0].observed, (
        "without more, a price was last seen when it last changed"
    )


@settings(deadline=None)  # a loaded machine is no failure
@given(_changes, st.integers(0, 45), st.randoms(use_true_random=False))
def test_the_last_price_change_before_a_moment_holds_in_any_order(changes, moment, random):
    records = [
        SpotRecord(
            instance_type="g5.xlarge",
            region="us-east-1",
            zone_name=f"us-east-1{zone}",
            zone_id="",
            usd_per_hour=Decimal(price),
            at=float(at),
        )
        for at, zone, price in changes
    ]
    random.shuffle(records)
    found = prices_at(
        records, now_utc=moment, observed={"us-east-1": 45.0}, kind="recorded", source=""
    )
    held: dict[str, tuple[int, int]] = {}
    for at, zone, price in sorted(changes):
        if at <= moment:
            held[f"us-east-1{zone}"] = at, price
    quotes_found = found.get(("g5.xlarge", "us-east-1"), ())
    assert {quote.zone: (quote.at, quote.usd_per_hour) for quote in quotes_found} == held
    assert all(quote.observed == moment for quote in quotes_found)


def test_a_recording_comes_back_as_it_was_written(tmp_path: Path):
    recording = read_recording(ROOT / SYNTHETIC)
    assert len(recording.records) == 9, "the price of Windows is another's"
    for name in ("prices.json", "prices.json.gz"):
        write_recording(tmp_path / name, recording)
        again = read_recording(tmp_path / name)
        assert set(again.records) == set(recording.records)
        assert (again.recorded_at, again.zone_ids) == (recording.recorded_at, recording.zone_ids)
        assert all(isinstance(record, SpotRecord) and record.zone_id for record in again.records)
    assert isinstance(again, Recording)


@pytest.mark.parametrize("name", BAD_JSON)
def test_a_bad_record_is_named(name: str, tmp_path: Path):
    content, message = BAD_JSON[name]
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PriceError) as error:
        read_recording(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path: Path):
    path = tmp_path / "prices.csv"
    for content, message in (
        (b'{"SpotPriceHistory": [\n  {"a" 3}]}', ":2:8: not JSON"),
        (CSV.replace("0.4182", "-1").encode(), ":3: SpotPrice: '-1' is not dollars per hour"),
        (CSV.replace("InstanceType", "Type").encode(), ":1: neither JSON nor CSV with the columns"),
        (b"", ":1: neither JSON nor CSV"),
        (f'{CSV}"{"x" * 140_000}"'.encode(), f":{CSV.count(chr(10)) + 1}: not CSV: field larger"),
        (b"[" * 100_000, ": not a price file: maximum recursion"),
        (b'{"SpotPrice": ' + b"9" * 5000 + b"}", ": not a price file: Exceeds the limit"),
        (b'\xef\xbb\xbf{"SpotPriceHistory": {}}', ': no list "SpotPriceHistory"'),
        (
            CSV.replace("0.4182", "1e999999999").encode(),
            ":3: SpotPrice: '1e999999999' is not dollars per hour",
        ),
        (gzip.compress(CSV.encode())[:40], ": cannot be read: "),
        (b"\xff\xfe", ": cannot be read: "),
    ):
        path.write_bytes(content)
        with pytest.raises(PriceError) as error:
            read_recording(path)
        assert str(error.value).startswith(f"{path}{message}"), error.value
    with pytest.raises(
        PriceError, match=r"no such file; cost\.prices is static, live or a file of recorded prices"
    ):
        read_recording(tmp_path / "missing.json")
    path.write_text(CSV)
    with pytest.raises(
        PriceError, match="first record is of 2026-09-20 14:43 UTC, after the time to plan for"
    ):
        RecordedPrices.read(path, NOW - 30 * 86400)


def test_zone_names_are_marked_as_specific_to_an_account(tmp_path: Path):
    path = tmp_path / "prices.csv"
    path.write_text(CSV)
    said = RecordedPrices.read(path, NOW).describe(
        now_utc=NOW, regions=["us-east-1"], max_age_hours=24.0
    )
    assert (
        "zones of us-east-1: by the names of the account that recorded them, since ids are missing"
        in said
    )
    assert is_zone_of("use1-az4", "us-east-1") and is_zone_of("apse2-az1", "ap-southeast-2")
    assert not is_zone_of("use1-az4", "us-east-2") and not is_zone_of("use1-az4", "use1")
    ages = {
        90: "2 min",
        4000: "1.1 h",
        5 * 86400: "5 days",
        120 * 86400: "4 months",
        2000 * 86400: "5.5 years",
    }
    assert {seconds: format_age(seconds) for seconds in ages} == ages


def checked(monkeypatch: pytest.MonkeyPatch, **cost: Any) -> dict[str, CheckResult]:
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    cluster = {"nodes": 1, "plan_for": "kubernetes", "instance_types": ["g5.xlarge"]}
    config = RunConfig.model_validate({"cluster": cluster, "cost": cost})
    results = run_checks(CHECKS, PreflightContext(config=config, project_root=ROOT))
    return {result.id: result for result in results}


def test_checks_of_table_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    static = checked(monkeypatch)
    assert static["prices"].status == "passed" and "savings of 2025-07" in static["prices"].detail
    assert (
        static["live-prices"].status == "skipped"
        and "cost.prices is not live" in static["live-prices"].detail
    )
    path = tmp_path / "prices.csv"
    path.write_text(CSV.replace("2026-", "2021-"))
    good = checked(monkeypatch, prices=str(path))
    assert good["prices"].status == "passed" and "recorded in prices.csv" in good["prices"].detail
    assert "years old): stale" in good["prices"].detail
    assert "price recorded 2021-09-21 07:30 UTC" in good["budget-deadline"].detail
    far = checked(monkeypatch, prices=str(path), regions=["eu-west-1"])["prices"]
    assert (
        far.status == "failed"
        and far.fix == "set cost.regions to [us-east-1], or record those regions"
    )
    bad = checked(monkeypatch, prices="tests/prices/missing.json")
    assert bad["prices"].status == "failed" and "no such file" in bad["prices"].detail
    for name in ("planned-memory", "budget-deadline"):
        assert bad[name].status == "skipped" and "see the check prices" in bad[name].detail


def test_quick_checks_of_live_prices_make_no_request(monkeypatch: pytest.MonkeyPatch):
    live = checked(monkeypatch, prices="live", regions=["eu-west-1"], budget_usd=5.0)
    assert (
        live["prices"].status == "skipped"
        and "asked when the plan is made" in live["prices"].detail
    )
    # The table knows no price of eu-west-1; that must not stop a job whose prices EC2 may tell.
    assert (
        live["planned-memory"].status == "skipped"
        and "no spot price" in live["planned-memory"].detail
    )
    assert live["live-prices"].status == "warning"
    words = live["live-prices"].detail
    assert (
        "the static table is used instead, because ec2:Describe" in words
        and "no AWS credentials" in words
    )
    poor = checked(monkeypatch, prices="live", budget_usd=0.0001)
    assert (
        poor["budget-deadline"].status == "skipped"
        and "cost.budget_usd" in poor["budget-deadline"].detail
    )
    assert checked(monkeypatch, budget_usd=0.0001)["budget-deadline"].status == "failed"
    assert {check.tier for check in CHECKS if check.id in ("prices", "budget-deadline")} == {
        "quick"
    }


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cost", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_commands_show_quotes_and_refuse_a_bad_file_in_one_line():
    static = run("prices", "show", "--set", "cluster.instance_types=[g5.xlarge]")
    assert static.returncode == 0, static.stderr
    spot, on_demand, count, source = static.stdout.splitlines()
    assert (
        "$0.41246/h" in spot
        and "estimated" in spot
        and "$1.006/h" in on_demand
        and "recorded 2026-07-20" in on_demand
    )
    assert count.startswith("2 quotes; 0 of 1 instance types") and source.startswith(
        "spot prices: static table"
    )
    bad = run("plan", "configs/laptop.yaml", "--set", "cost.prices=missing.json")
    assert bad.returncode == 2 and not bad.stdout
    assert bad.stderr.count("\n") == 1 and "missing.json: no such file" in bad.stderr

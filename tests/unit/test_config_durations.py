"""Durations in a configuration, with a unit of their own or in that of the key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.config import ConfigError, load_config
from ebbflow.core.config.durations import explain_moment, read_duration


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("1.5", 1.5),
        ("90m", 1.5),
        ("90 min", 1.5),
        ("1.5h", 1.5),
        ("1h30m", 1.5),
        ("1h 30m", 1.5),
        ("1:30", 1.5),
        ("1:30:00", 1.5),
        ("5400s", 1.5),
        ("2d", 48.0),
    ],
)
def test_a_deadline_is_read_as_people_write_it(tmp_path: Path, text: str, hours: float) -> None:
    for words in ([f"cost.deadline_hours={text}"], [f"cost.deadline_hours='{text}'"]):
        if text == "1.5" and "'" in words[0]:
            continue  # a text where a number belongs
        loaded = load_config(None, words, project_root=tmp_path, cwd=tmp_path, environment={})
        assert loaded.config.cost.deadline_hours == pytest.approx(hours)


def test_the_keys_own_unit_decides(tmp_path: Path) -> None:
    words = ["checkpoint.interval=seconds", "checkpoint.interval_seconds=10m"]
    loaded = load_config(None, words, project_root=tmp_path, cwd=tmp_path, environment={})
    assert loaded.config.checkpoint.interval_seconds == 600.0


@pytest.mark.parametrize("text", ["1:75", "30m 1h", "1h1h", "h", "1.5 hours ago", "-1h", "5x", ""])
def test_what_is_no_duration_is_refused_as_before(tmp_path: Path, text: str) -> None:
    assert read_duration("cost.deadline_hours", text) is None
    with pytest.raises(ConfigError):
        load_config(
            None, [f"cost.budget_usd='{text}'"], project_root=tmp_path, cwd=tmp_path, environment={}
        )


@given(hours=st.integers(0, 99), minutes=st.integers(0, 59), seconds=st.integers(0, 59))
def test_clock_and_units_agree(hours: int, minutes: int, seconds: int) -> None:
    clock = read_duration("a_seconds", f"{hours}:{minutes:02}:{seconds:02}")
    units = read_duration("a_seconds", f"{hours}h{minutes}m{seconds}s")
    assert clock == units == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("2030-03-31T02:00:00+02:00", "write 24.00 if"),
        ("2030-03-31 00:00Z", "write 24.00 if"),
        ("2030-03-31 01:30 Europe/Berlin", "write 24.50 if"),
        ("2030-03-31 03:30 Europe/Berlin", "write 25.50 if"),  # an hour is missing before it
        ("2030-03-30 19:00-0500", "write 24.00 if"),
        ("2030-03-31 02:30 Europe/Berlin", "there is no 02:30 on that day in Europe/Berlin"),
        (
            "2030-10-27 02:30 Europe/Berlin",
            "2030-10-27T02:30:00+02:00 or 2030-10-27T02:30:00+01:00",
        ),
        ("2030-03-31 14:00", "add a zone"),
        ("2030-03-31", "add a zone"),
        ("2029-03-31 14:00 UTC", "is past"),
    ],
)
def test_a_moment_is_refused_with_the_duration_until_it(text: str, hint: str) -> None:
    now = datetime(2030, 3, 30, tzinfo=UTC)
    assert hint in (explain_moment("cost.deadline_hours", text, now) or "")
    assert explain_moment("name", text, now) is None


@pytest.mark.parametrize(
    "text",
    [
        "2030-13-31 14:00Z",
        "tomorrow",
        "2030-03-31 14:00 Nowhere/Town",
        "9999-12-31 23:59 -05:00",
        "0001-01-01 00:00 Europe/Berlin",
    ],
)
def test_what_is_no_moment_gets_no_such_hint(text: str) -> None:
    assert explain_moment("cost.deadline_hours", text, datetime.now(UTC)) is None


def test_a_deadline_with_a_zone_names_the_hours(tmp_path: Path) -> None:
    moment = (datetime.now(UTC) + timedelta(hours=48)).isoformat(timespec="seconds")
    with pytest.raises(ConfigError, match=r"from the job's start: write (?:47\.99|48\.00) if"):
        load_config(None, [f"cost.deadline_hours='{moment}'"], project_root=tmp_path, cwd=tmp_path)


@given(st.text(alphabet="0123456789-:TZ +/EuropeBerlin", max_size=40))
def test_any_text_is_a_duration_a_moment_or_neither(text: str) -> None:
    explain_moment("cost.deadline_hours", text, datetime(2030, 1, 1, tzinfo=UTC))
    read_duration("cost.deadline_hours", text)

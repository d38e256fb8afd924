"""Durations in a configuration, with a unit of their own or in that of the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.config import ConfigError, load_config
from ebbflow.core.config.durations import read_duration


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

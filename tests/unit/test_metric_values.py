"""Metrics that users log: never fatal, never the tracker's own axis."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.training.metric_values import MetricGate


@pytest.mark.parametrize(
    "value",
    [2, 2.0, True, "2", Decimal(2), np.float32(2), np.int64(2), np.full(1, 2.0), torch.tensor(2.0)],
)
def test_every_kind_of_number_is_read(value: object) -> None:
    said: list[str] = []
    found = MetricGate(said.append).read({"a": value})
    assert found.finite == {"a": 1.0 if value is True else 2.0} and not said


@pytest.mark.parametrize(
    "value", [None, "fast", b"2", [1], {}, torch.ones(3), np.ones(2), object()]
)
def test_what_is_no_number_is_left_out_with_one_warning(value: object) -> None:
    said: list[str] = []
    gate = MetricGate(said.append)
    for _ in range(3):
        assert gate.read({"a": value, "b": 1.0}).finite == {"b": 1.0}
    assert said == [f"metric a is no number but a {type(value).__name__}: left out"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, torch.tensor(math.inf)])
def test_a_non_finite_metric_is_shown_and_said_once(value: object) -> None:
    said: list[str] = []
    gate = MetricGate(said.append)
    for _ in range(3):
        found = gate.read({"perplexity": value, "b": 1.0})
        assert found.finite == {"b": 1.0}
        assert found.non_finite == {"perplexity": str(float(value))}  # type: ignore[arg-type]
    assert len(said) == 1 and "left out of commits and trackers" in said[0]


@pytest.mark.parametrize("name", ["step", "time", "_step", "_timestamp"])
def test_a_reserved_name_is_renamed_with_one_warning(name: str) -> None:
    said: list[str] = []
    gate = MetricGate(said.append)
    for number in range(3):
        found = gate.read({name: number, "loss_scale": 2})
        assert found.finite == {f"logged_{name.lstrip('_')}": number, "loss_scale": 2}
    assert len(said) == 1 and name in said[0]


@given(
    values=st.dictionaries(
        st.text(max_size=8),
        st.one_of(
            st.floats(), st.integers(), st.text(max_size=5), st.none(), st.binary(max_size=3)
        ),
        max_size=6,
    )
)
def test_no_metric_is_an_error_and_all_that_passes_is_finite(values: dict[str, object]) -> None:
    found = MetricGate(lambda text: None).read(values)
    assert all(map(math.isfinite, found.finite.values()))
    assert not found.finite.keys() & {"step", "time"}

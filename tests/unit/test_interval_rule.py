"""The interval rule against the best fixed interval: the benchmark itself, on a part of its
scenarios.
"""

from __future__ import annotations

import pytest

from benchmarks.money.interval import compare, scenarios

SCENARIOS = {
    f"{scenario.name}, save {scenario.save_seconds:g} s": scenario
    for scenario in scenarios(4000.0)
    if scenario.save_seconds == 10.0
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rule_loses_at_most_two_percent_more_than_the_best_fixed_interval(name: str):
    result = compare(SCENARIOS[name], seed=3, total_hours=8000.0)
    assert result.interruptions > 500
    assert result.rule_loss <= 1.02 * result.best_fixed_loss
    assert 0.01 < result.best_fixed_loss < 0.1, (
        "neither free nor hopeless, or the comparison says nothing"
    )

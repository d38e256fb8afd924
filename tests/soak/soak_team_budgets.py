"""10,000 simulated months of 50 jobs in two projects: no project's budget is exceeded in any month."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tests.unit.test_team import months

MONTHS_EACH = 25


@pytest.mark.timeout(3600)
def test_ten_thousand_months_without_an_overrun() -> None:
    found = []
    for seed in range(400):
        found.extend(months(1000 + seed, MONTHS_EACH))
    shares = sorted(spent / budget for _, spent, budget in found)
    over = sum(share > 1 for share in shares)
    used = shares[len(shares) // 2]
    print(
        f"{len(found)} project-months, {over} over budget, median use {used:.0%}, most "
        f"{shares[-1]:.1%}"
    )
    assert len(found) >= 2 * 400 * (MONTHS_EACH - 1) and not over
    assert used > Decimal("0.5"), "budgets are used"

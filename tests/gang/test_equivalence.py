"""The promise "whatever the mode" as curves of 200 steps, in a few of the ways of
tests/soak/soak_equivalence.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak import soak_equivalence as every
from tests.support.curves import GOLDEN, REFERENCE, VARIANTS, Curve, train_curves

pytestmark = pytest.mark.timeout(600)  # the first test waits for all curves
FEW = [
    "tensor 2 on 2 ranks",
    "tensor 2 on 2 ranks, resumed",
    REFERENCE,
    "4 micro-batches",
]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    bases = [VARIANTS[name].goes_on for name in FEW]
    stopped = [base for base in bases if base]
    return train_curves(tmp_path_factory.mktemp("curves"), FEW + stopped)


@pytest.mark.parametrize("name", FEW)
def test_a_curve_is_that_of_a_single_process(curves: dict[str, Curve], name: str) -> None:
    every.test_every_step_has_the_loss_of_a_single_process(curves, name)
    every.test_every_step_has_the_loss_of_the_golden_curve(
        curves, json.loads(GOLDEN.read_text()), name
    )
    every.test_each_sample_is_seen_once_and_is_the_same_text(curves, name)


@pytest.mark.long
def test_the_curve_of_hsdp_is_that_of_a_single_process(tmp_path: Path) -> None:
    name = "HSDP 2×2"
    curves = train_curves(tmp_path, [name, REFERENCE])
    test_a_curve_is_that_of_a_single_process(curves, name)


def test_the_model_learns_and_a_resumed_tensor_group_changes_no_bit(
    curves: dict[str, Curve],
) -> None:
    every.test_all_of_this_is_no_triviality(curves, json.loads(GOLDEN.read_text()))
    every.test_a_resumed_tensor_group_changes_no_bit(curves)

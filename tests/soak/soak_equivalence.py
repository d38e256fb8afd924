"""The promise "whatever the mode" as curves: 200 steps in every mode beside one process, step by
step.

`pytest tests/soak/soak_equivalence.py -rP` shows the table that docs/benchmarks.md has. A few of
the ways are in tests/gang/test_equivalence.py.
"""

from __future__ import annotations

import json

import pytest

from ebbflow.core.footprint import causal_lm_shape
from tests.support.curves import (
    BATCH_SIZE,
    GOLDEN,
    MUON,
    REFERENCE,
    STEPS,
    VARIANTS,
    Curve,
    lost_and_repeated,
    make_config,
    table,
    train_curves,
)

TOLERANCE = 1e-5
# The first test waits for all curves; 300 s were too few beside other work
pytestmark = pytest.mark.timeout(600)
FINISHED = [name for name, variant in VARIANTS.items() if not variant.stops]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    return train_curves(tmp_path_factory.mktemp("curves"), list(VARIANTS))


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", FINISHED)
def test_every_step_has_the_loss_of_a_single_process(curves: dict[str, Curve], name: str) -> None:
    ours = curves[name]
    reference = curves[VARIANTS[name].reference]
    assert len(ours.losses) == STEPS
    assert ours.losses == pytest.approx(reference.losses, rel=TOLERANCE, abs=0)
    assert ours.held_out == pytest.approx(reference.held_out, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize(
    "name", [name for name in FINISHED if VARIANTS[name].reference == REFERENCE]
)
def test_every_step_has_the_loss_of_the_golden_curve(
    curves: dict[str, Curve], golden: dict, name: str
) -> None:
    assert curves[name].losses == pytest.approx(golden["losses"], rel=TOLERANCE, abs=0)
    assert curves[name].held_out == pytest.approx(golden["held_out"], rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("name", FINISHED)
def test_each_sample_is_seen_once_and_is_the_same_text(curves: dict[str, Curve], name: str) -> None:
    assert lost_and_repeated(curves[name]) == (0, 0)
    assert sorted(curves[name].seen) == sorted(curves[REFERENCE].seen)


def test_all_of_this_is_no_triviality(curves: dict[str, Curve], golden: dict) -> None:
    """The loss falls, samples differ, weights move: equal curves of a model that learns nothing
    would prove nothing.
    """
    reference = curves[REFERENCE]
    assert reference.losses[-1] < reference.losses[0] - 2
    assert reference.held_out == sorted(reference.held_out, reverse=True)
    assert len({checksum for _, checksum in reference.seen}) > 0.9 * STEPS * BATCH_SIZE / 2
    assert golden["training"]["max_steps"] == STEPS


def test_recomputing_and_replicas_change_no_bit(curves: dict[str, Curve]) -> None:
    """Where the same numbers are added in the same order, weights are equal and not only close."""
    for name in ("recompute full", "recompute selective"):
        assert curves[name].weights_sha256 == curves[REFERENCE].weights_sha256
    sharded = curves["FSDP2 on 2 ranks"]
    assert curves["FSDP2 on 2 ranks, recompute full"].weights_sha256 == sharded.weights_sha256


def test_a_resumed_tensor_group_changes_no_bit(curves: dict[str, Curve]) -> None:
    resumed = curves["tensor 2 on 2 ranks, resumed"]
    assert resumed.weights_sha256 == curves["tensor 2 on 2 ranks"].weights_sha256
    assert resumed.losses == curves["tensor 2 on 2 ranks"].losses


def test_replicas_write_a_commit_once(curves: dict[str, Curve]) -> None:
    """Weights and two moments of AdamW in float32, once, and little else: not once per copy of the
    model.
    """
    parameters = sum(weight.numel() for weight in curves[REFERENCE].weights.values())
    names = ("FSDP2 × tensor 2 on 4 ranks", "HSDP 2×2")
    sharded, replicated = (curves[f"{name}, to step 100"].committed_bytes for name in names)
    assert replicated == pytest.approx(sharded, rel=0.01)
    assert 12 * parameters <= replicated < 1.2 * 12 * parameters


def test_muon_keeps_one_momentum_of_hidden_matrices(curves: dict[str, Curve]) -> None:
    shape = causal_lm_shape(make_config(VARIANTS[MUON], "").model)
    adamw, muon = (
        curves[f"{prefix}HSDP 2×2, to step 100"].committed_bytes for prefix in ("", "Muon, ")
    )
    assert adamw - muon == pytest.approx(4 * shape.hidden_parameters, rel=0.05)
    assert curves[MUON].losses[-1] < curves[REFERENCE].losses[-1] < curves[MUON].losses[0] - 2


def test_the_table(curves: dict[str, Curve], golden: dict) -> None:
    lines = table(curves, golden)
    print(
        "\nlargest relative difference over 200 steps, float32, gloo; weights: largest absolute "
        "difference\n"
    )
    print(lines)
    assert len(lines.splitlines()) == len(FINISHED) + 2

"""Policy optimization: each formula beside a few lines of plain Python, and beside a case computed
by hand.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from torch import Tensor

from ebbflow.workloads.policy import policy_math as math_of

GROUP = 3
# Two prompts with three rollouts; a completion has between one and four tokens, after a prompt of
# two tokens.
LENGTHS = [3, 1, 4, 2, 2, 3]

MASK = torch.tensor(
    [[0.0] + [1.0] * length + [0.0] * (4 - length) for length in LENGTHS], dtype=torch.float64
)
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 1.0], dtype=torch.float64)


def table(seed: int, *, low: float = -2.0, high: float = -0.1) -> Tensor:
    """Return log-probabilities, or other numbers of tokens: `[6, 5]`, of which the first is the
    prompt's.
    """
    return torch.empty(6, 5, dtype=torch.float64).uniform_(
        low, high, generator=torch.Generator().manual_seed(seed)
    )


def draw(seed: int, low: float, high: float, count: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.uniform(low, high) for _ in range(count)]


def inside(values: Tensor) -> list[list[float]]:
    """Return the numbers of each completion's tokens."""
    return [row[1 : 1 + length] for row, length in zip(values.tolist(), LENGTHS, strict=True)]


@pytest.mark.parametrize("kind", math_of.KL_ESTIMATES)
def test_kl_estimates(kind: str) -> None:
    by_hand = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}
    policy, reference = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    assert float(math_of.estimate_kl(kind, policy, reference)) == pytest.approx(
        by_hand[kind], abs=1e-12
    )
    plain = {
        "k1": lambda p, q: p - q,
        "k2": lambda p, q: 0.5 * (q - p) ** 2,
        "k3": lambda p, q: math.exp(q) / math.exp(p) - 1 - (q - p),
    }[kind]
    a = table(1)
    b = table(2)
    expected = []
    for rows in zip(a.tolist(), b.tolist(), strict=True):
        expected.append([plain(p, q) for p, q in zip(*rows, strict=True)])
    assert torch.allclose(
        math_of.estimate_kl(kind, a, b), torch.tensor(expected).double(), atol=1e-12
    )


def test_k1_and_k3_are_the_divergence_in_the_mean() -> None:
    """The sum over all tokens of probability × estimate is the divergence itself; k2 is close to
    it.
    """
    p, q = (
        torch.randn(50, generator=torch.Generator().manual_seed(seed)).double().log_softmax(0)
        for seed in (1, 2)
    )
    exact = float((p.exp() * (p - q)).sum())
    for kind in ("k1", "k3"):
        assert float((p.exp() * math_of.estimate_kl(kind, p, q)).sum()) == pytest.approx(
            exact, abs=1e-12
        )
    near = p + 0.01 * q
    near = near.log_softmax(0)
    exact = float((p.exp() * (p - near)).sum())
    assert float((p.exp() * math_of.estimate_kl("k2", p, near)).sum()) == pytest.approx(
        exact, rel=0.05
    )


def test_group_advantages_of_grpo_and_cpgd() -> None:
    by_hand = [
        0.5 / 0.5,
        -0.5 / 0.5,
        0.0,
        -1 / 3 / math.sqrt(1 / 3),
        -1 / 3 / math.sqrt(1 / 3),
        2 / 3 / math.sqrt(1 / 3),
    ]
    assert math_of.group_advantages(REWARDS, GROUP, scaled=True).tolist() == pytest.approx(
        by_hand, abs=1e-5
    )
    rewards = draw(5, 0, 1, 6)
    for scaled in (True, False):
        expected = []
        for first in (0, 3):
            rows = rewards[first : first + 3]
            if scaled:
                scale = statistics.stdev(rows)
            else:
                scale = 1.0
            expected += [(reward - statistics.mean(rows)) / scale for reward in rows]
        found = math_of.group_advantages(
            torch.tensor(rewards, dtype=torch.float64), GROUP, scaled=scaled
        )
        assert found.tolist() == pytest.approx(expected, abs=1e-4)
    assert math_of.group_advantages(torch.ones(6), GROUP, scaled=True).abs().max() == 0, (
        "nothing to learn"
    )
    assert (
        math_of.accepted(torch.tensor([0.1, 0.1, 0.1, 0.0, 0.1, 0.0]), GROUP).tolist()
        == [False] * 3 + [True] * 3
    )


def test_leave_one_out_advantages() -> None:
    by_hand = [1 - 0.25, 0 - 0.75, 0.5 - 0.5, -0.5, -0.5, 1.0]
    assert math_of.leave_one_out_advantages(REWARDS, GROUP).tolist() == pytest.approx(
        by_hand, abs=1e-12
    )
    rewards = draw(6, -1, 1, 6)
    expected = []
    for place, reward in enumerate(rewards):
        group = range(place // 3 * 3, place // 3 * 3 + 3)
        expected.append(
            reward - statistics.mean(rewards[other] for other in group if other != place)
        )
    found = math_of.leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64), GROUP)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_token_rewards_and_rewards_to_go() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    found = math_of.token_rewards(
        torch.tensor([1.0]), torch.tensor([[9.0, 0.2, 0.4, 9.0]]), mask, 0.5
    )
    assert found[0].tolist() == pytest.approx([0, -0.1, 0.8, 0])
    assert math_of.rewards_to_go(found, mask)[0].tolist() == pytest.approx([0, 0.7, 0.8, 0])
    kl = table(3, low=0.0, high=1.0)
    each = math_of.token_rewards(REWARDS, kl, MASK, 0.1)
    for found_row, to_go, kls, reward in zip(
        inside(each),
        inside(math_of.rewards_to_go(each, MASK)),
        inside(kl),
        REWARDS.tolist(),
        strict=True,
    ):
        expected = [-0.1 * divergence for divergence in kls]
        expected[-1] += reward
        assert found_row == pytest.approx(expected, abs=1e-12)
        assert to_go == pytest.approx(
            [sum(expected[place:]) for place in range(len(expected))], abs=1e-12
        )
    assert (each[MASK == 0] == 0).all()


def test_normalisation_over_the_tokens_of_a_batch() -> None:
    values = table(4)
    every = []
    for row in inside(values):
        every += row
    expected = [(reward - statistics.fmean(every)) / statistics.pstdev(every) for reward in every]
    found = math_of.normalise_over_tokens(values, MASK)
    normalised = []
    for row in inside(found):
        normalised += row
    assert normalised == pytest.approx(expected, abs=1e-4)
    assert (found[MASK == 0] == 0).all()
    by_hand = math_of.normalise_over_tokens(
        torch.tensor([[3.0, 1.0, 7.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    )
    assert by_hand[0].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)


def test_generalised_advantages() -> None:
    """By hand, with γ = 0.5 and λ = 0.5: δ₂ = 1 - 0.4 = 0.6; δ₁ = 0.5·0.4 - 0.2 = 0; A₁ = 0 +
    0.25·0.6.
    """
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    values = torch.tensor([[5.0, 0.2, 0.4, 5.0]])
    advantages, returns = math_of.generalised_advantages(
        rewards, values, mask, discount=0.5, trace=0.5
    )
    assert advantages[0].tolist() == pytest.approx([0, 0.15, 0.6, 0])
    assert returns[0].tolist() == pytest.approx([0, 0.35, 1.0, 0])
    rewards = table(5) * MASK
    values = table(6)
    advantages, returns = math_of.generalised_advantages(
        rewards, values, MASK, discount=0.9, trace=0.8
    )
    for row, gained, ahead, worth in zip(
        *map(inside, (advantages, rewards, returns, values)), strict=True
    ):
        after = [*worth[1:], 0.0]
        errors = [r + 0.9 * n - v for r, n, v in zip(gained, after, worth, strict=True)]
        expected = []
        for place in range(len(errors)):
            expected.append(
                sum(
                    (0.9 * 0.8) ** (later - place) * errors[later]
                    for later in range(place, len(errors))
                )
            )
        assert row == pytest.approx(expected, abs=1e-12)
        assert ahead == pytest.approx(
            [a + v for a, v in zip(expected, worth, strict=True)], abs=1e-12
        )


def test_clipped_loss() -> None:
    log_two = torch.tensor([math.log(2.0), math.log(2.0), math.log(0.5), math.log(0.5)])
    found = math_of.clipped_loss(log_two, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2)
    assert found.tolist() == pytest.approx([-1.2, 2.0, -0.5, 0.8])
    new = table(7)
    old = table(8)
    gain = table(9, low=-1.0, high=1.0)
    for a, b, c, loss in zip(
        *(
            values.flatten().tolist()
            for values in (new, old, gain, math_of.clipped_loss(new, old, gain, 0.3))
        ),
        strict=True,
    ):
        ratio = math.exp(a - b)
        assert loss == pytest.approx(-min(ratio * c, min(max(ratio, 0.7), 1.3) * c), abs=1e-12)


def test_drift_loss_has_the_gradient_of_cpgd() -> None:
    """Gradient by ln(new): -advantage where the clip is not reached, plus coefficient · min(ratio -
    1, clip).
    """
    for log_ratio, advantage, slope in (
        (0.1, 2.0, -2.0),
        (0.3, 2.0, 0.0),
        (-0.5, 2.0, -2.0),
        (-0.5, -1.0, 0.0),
    ):
        new = torch.tensor(log_ratio - 1.0, dtype=torch.float64, requires_grad=True)
        math_of.drift_loss(
            new, torch.tensor(-1.0).double(), torch.tensor(advantage).double(), 0.2, 0.7
        ).backward()
        assert new.grad is not None
        expected = slope + 0.7 * min(math.exp(log_ratio) - 1, 0.2)
        assert float(new.grad) == pytest.approx(expected, abs=1e-9), log_ratio


def test_value_loss_is_the_larger_of_the_plain_and_the_clipped_error() -> None:
    found = math_of.value_loss(
        torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), 0.2
    )
    assert found.tolist() == pytest.approx([0.8**2 / 2, 0.9**2 / 2])


def test_the_loss_is_the_mean_over_the_tokens_of_each_rollout() -> None:
    values = table(10)
    expected = sum(statistics.fmean(row) for row in inside(values))
    assert float(math_of.sum_over_rollouts(values, MASK)) == pytest.approx(expected, abs=1e-12)


def test_the_kl_coefficient_follows_its_target() -> None:
    assert math_of.adapt_kl_coefficient(0.1, 0.03, 0.02, 256, 1024) == pytest.approx(
        0.1 * (1 + 0.2 * 0.25)
    )
    assert math_of.adapt_kl_coefficient(0.1, 0.021, 0.02, 256, 1024) == pytest.approx(
        0.1 * (1 + 0.05 * 0.25)
    )
    assert math_of.adapt_kl_coefficient(0.1, 0.0, 0.02, 1024, 1024) == pytest.approx(0.1 * 0.8)
    assert math_of.adapt_kl_coefficient(0.1, 0.0, 0.02, 8192, 1000) == pytest.approx(0.1 * 0.8), (
        "never negative"
    )


def test_running_moments_are_those_of_all_rewards_so_far() -> None:
    rewards = draw(7, -3, 5, 40)
    moments = math_of.RunningMoments()
    for first in range(0, 40, 8):
        moments = moments.add(torch.tensor(rewards[first : first + 8]))
        seen = rewards[: first + 8]
        assert moments.mean == pytest.approx(statistics.fmean(seen), abs=1e-6)
        assert moments.squares / moments.count == pytest.approx(
            statistics.pvariance(seen), rel=1e-5
        )
    equal = math_of.RunningMoments().add(torch.tensor([-1.0, -1.0]))
    assert equal.normalise(torch.tensor([-1.0]), minus_mean=False).tolist() == [-1.0]
    scaled = moments.normalise(torch.tensor([1.0]), minus_mean=False)
    centred = moments.normalise(torch.tensor([1.0]), minus_mean=True)
    deviation = statistics.pstdev(rewards)
    assert float(scaled) == pytest.approx(1 / deviation, rel=1e-5)
    assert float(centred) == pytest.approx(
        (1 - statistics.fmean(rewards)) / deviation, rel=1e-4, abs=1e-6
    )

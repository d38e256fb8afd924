"""Formulas of policy optimization (KL divergence, advantages, losses), each with its source.

Shapes: `[rollouts]` for rewards; `[rollouts, positions]` for everything about tokens. `mask` is 1
for the tokens of the completion and 0 elsewhere. Rollouts of one prompt are `group` consecutive
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ESTIMATORS = ("grpo", "cpgd", "reinforce++", "rloo", "ppo")
COMPARING = ("grpo", "cpgd", "rloo")  # they compare the rollouts of a prompt
KL_ESTIMATES = ("k1", "k2", "k3")
# The estimators that subtract the KL divergence from the rewards; the others add it to the loss.
KL_IN_REWARD = ("reinforce++", "rloo", "ppo")
_EPSILON = 1e-6


@dataclass
class RunningMoments:
    """Running mean and variance of all rewards so far.

    Source: Chan et al. 1979 (the parallel update).
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean

    def add(self, values: Tensor) -> RunningMoments:
        """Return the moments updated with further values."""
        count = len(values)
        mean = float(values.double().mean())
        squares = float((values.double() - mean).square().sum())
        total = self.count + count
        apart = mean - self.mean
        return RunningMoments(
            total,
            self.mean + apart * count / total,
            self.squares + squares + apart**2 * self.count * count / total,
        )

    def normalise(self, values: Tensor, *, minus_mean: bool) -> Tensor:
        """Divide values by the standard deviation; with `minus_mean`, subtract the mean first.

        While all values so far are equal, their deviation is 0, and they are not divided.
        """
        if self.count:
            deviation = math.sqrt(self.squares / self.count)
        else:
            deviation = 0.0
        return (values - self.mean if minus_mean else values) / (
            deviation + _EPSILON if deviation else 1.0
        )


def estimate_kl(kind: str, log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy ‖ reference) for each token, from tokens that the policy drew.

    k1 is -log r, k2 is (log r)² / 2 and k3 is r - 1 - log r, where r = reference / policy. Source:
    Schulman 2020, "Approximating KL Divergence". k3 is GRPO's (Shao et al. 2024, section 4.1.1).
    """
    log_ratio = reference - log_probs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


def adapt_kl_coefficient(
    coefficient: float, kl: float, target: float, rollouts: int, horizon: float
) -> float:
    """Return the KL coefficient after a step, moved so that the KL divergence approaches `target`.

    It is coefficient · (1 + error · rollouts / horizon), where the error is kl / target - 1,
    clipped to ±0.2. Source: Ziegler et al. 2019, section 2.2. More rollouts than the horizon count
    as the horizon; otherwise the coefficient could become negative.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(1.0, rollouts / horizon))


def group_advantages(rewards: Tensor, group: int, *, scaled: bool) -> Tensor:
    """Subtract the group's mean from each reward; if `scaled`, divide by the group's deviation.

    Source: GRPO, Shao et al. 2024, section 4.1.2. The deviation is that of the sample (n - 1).
    Without scaling it is the advantage of CPGD (Liu et al. 2025).
    """
    groups = rewards.view(-1, group)
    apart = groups - groups.mean(dim=1, keepdim=True)
    if scaled:
        apart = apart / (groups.std(dim=1, keepdim=True) + _EPSILON)
    return apart.flatten()


def accepted(rewards: Tensor, group: int) -> Tensor:
    """Return for each rollout whether the rewards in its group differ.

    If they are equal, no rollout of the group has an advantage.
    """
    groups = rewards.view(-1, group)
    return (groups.amax(dim=1) > groups.amin(dim=1)).repeat_interleave(group)


def leave_one_out_advantages(rewards: Tensor, group: int) -> Tensor:
    """Subtract from each reward the mean of the other rewards in its group.

    Source: RLOO, Ahmadian et al. 2024.
    """
    groups = rewards.view(-1, group)
    return (groups - (groups.sum(dim=1, keepdim=True) - groups) / (group - 1)).flatten()


def token_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """Return rewards per token: minus coefficient · KL, plus the rollout's reward at its last
    token.

    Source: Ziegler et al. 2019, section 2; REINFORCE++, Hu 2025.
    """
    last = mask * (mask.flip(1).cumsum(1).flip(1) == 1)
    return rewards[:, None] * last - coefficient * kl * mask


def rewards_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """Sum the rewards from each token to the end, without discount."""
    return (rewards * mask).flip(1).cumsum(1).flip(1) * mask


def normalise_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Normalise values to mean 0 and variance 1 over all tokens of the batch.

    Source: REINFORCE++, Hu 2025.
    """
    count = mask.sum().clamp(min=1)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) * (variance + _EPSILON).rsqrt() * mask


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantages (GAE) and returns for each token.

    The value after the last token counts as 0. Source: Schulman et al. 2016, equations 11 and 16.
    `trace` is its λ.
    """
    advantages = torch.zeros_like(rewards)
    after = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(after)
    for at in range(rewards.shape[1] - 1, -1, -1):
        inside = mask[:, at]
        error = rewards[:, at] + discount * next_value - values[:, at]
        after = (error + discount * trace * after) * inside
        next_value = values[:, at] * inside
        advantages[:, at] = after
    return advantages, (advantages + values) * mask


def clipped_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Compute PPO's clipped surrogate loss for each token.

    Source: PPO, Schulman et al. 2017, equation 7.
    """
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def drift_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float, coefficient: float
) -> Tensor:
    """Compute CPGD's loss for each token: a clipped policy gradient and a penalty of policy drift.

    The policy gradient is log r · advantage with log r clipped to log(1 ± clip), where r = new /
    old. The gradient of the drift KL(old ‖ new) is (r - 1) · ∇log(new), with r - 1 limited to
    `clip` from above. Source: Liu et al. 2025, "CPGD: Toward Stable Rule-based Reinforcement
    Learning for Language Models".
    """
    log_ratio = log_probs - old
    clipped = log_ratio.clamp(math.log1p(-clip), math.log1p(clip))
    gain = torch.minimum(log_ratio * advantages, clipped * advantages)
    drift = (log_ratio.detach().exp() - 1).clamp(max=clip) * log_ratio
    return -gain + coefficient * drift


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Compute the clipped squared error of the values for each token.

    Source: PPO's reference code; Huang et al. 2022.
    """
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


def sum_over_rollouts(per_token: Tensor, mask: Tensor) -> Tensor:
    """Average each rollout over its tokens, and sum the averages.

    Source: GRPO, Shao et al. 2024, equation 3.
    """
    return ((per_token * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()

"""A workload in one file: a language model is fine-tuned with rewards of its own completions."""

from collections.abc import Mapping
from typing import Any

from ebbflow.workloads import PolicyOptimization


class Example(PolicyOptimization):
    """The workload: override a method, such as `loss`, to change a step of the training."""


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return the reward of a completion. Replace it by a reward of your own.

    `row` is the prompt's row with all its columns. Here, the reward is the share of the
    completion's characters that are digits.
    """
    return sum(letter in "0123456789" for letter in completion) / max(len(completion), 1)

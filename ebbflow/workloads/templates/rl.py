"""A workload of one file: a language model is fine-tuned with a reward of its own completions."""

from collections.abc import Mapping
from typing import Any

from ebbflow.workloads import PolicyOptimization


class Example(PolicyOptimization):
    """Change a step of the training by overriding a method, such as `loss`."""


def reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Judge a completion.

    `row` is the prompt's row with all its columns. Replace it by a reward of your own.

    Here, the share of the completion's characters that are digits.
    """
    return sum(letter in "0123456789" for letter in completion) / max(len(completion), 1)

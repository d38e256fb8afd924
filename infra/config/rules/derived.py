"""Quantities that follow from several keys by division. Each must be at least 1, or there is nothing of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from ebbflow.infra.config.rules.arithmetic import product, set_to
from ebbflow.infra.config.rules.rule import Answer, Rule, ranks, value_of
from ebbflow.infra.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Derived:
    """name = top / (bottom × …), rounded down. why: what it means when nothing is left. applies: whether it exists.

    spare: offered instead of the bare minimum, in parts of the whole: an interval of a quarter makes four of them.
    """

    name: str
    top: tuple[str, ...]
    bottom: tuple[str, ...]
    why: str
    spare: int = 1
    applies: Callable[[RunConfig], bool] = lambda config: True

    def value(self, config: RunConfig) -> int:
        return self._product(config, self.top) // self._product(config, self.bottom)

    def formula(self, config: RunConfig) -> str:
        """Such as "training.batch_size / (cluster.nodes × …) = 4 / (2 × 4) = 0.5"; a part that is auto is left out."""
        top, bottom = self._known(config, self.top), self._known(config, self.bottom)
        exact = self._product(config, self.top) / self._product(config, self.bottom)
        numbers = (
            f"{product([value_of(config, key) for key in top])} / {product([value_of(config, key) for key in bottom])}"
        )
        return f"{product(top)} / {product(bottom)} = {numbers} = {exact:.4g}"

    def check(self, config: RunConfig) -> Answer:
        """The rule that every derived quantity is at least 1."""
        if not self.applies(config) or self.value(config) >= 1:
            return None
        return f"{self.name} must be at least 1, or {self.why}: {self.formula(config)}", self._hint(config)

    def _hint(self, config: RunConfig) -> str:
        whole, unit = self._product(config, self.top), self._product(config, self.bottom)
        offers: list[tuple[str, list[int]]] = []
        if len(self.top) == 1:
            offers.append((self.top[0], [unit * self.spare]))
        for key in self._known(config, self.bottom):
            own = value_of(config, key)
            largest = whole * own // unit  # what this divisor may be when the others stay
            if self.spare > 1:
                offers.append((key, [max(1, largest // self.spare)]))
            elif largest and whole % (unit // own * largest) == 0:
                offers.append((key, [largest]))
        return set_to(*offers)

    @staticmethod
    def _known(config: RunConfig, keys: tuple[str, ...]) -> list[str]:
        return [key for key in keys if isinstance(value_of(config, key), int)]

    def _product(self, config: RunConfig, keys: tuple[str, ...]) -> int:
        return prod(value_of(config, key) for key in self._known(config, keys))


DERIVED = (
    Derived(
        name="samples per micro-batch",
        top=("training.batch_size",),
        bottom=("training.gradient_accumulation_steps", "cluster.nodes", "cluster.processes_per_node"),
        why="ranks have nothing to compute",
    ),
    Derived(
        name="commits of the job",
        top=("training.max_steps",),
        bottom=("checkpoint.interval_steps",),
        why="an interruption loses everything",
        spare=4,
        applies=lambda config: config.checkpoint.interval == "steps",
    ),
    Derived(
        name="copies of the model",
        top=("cluster.nodes", "cluster.processes_per_node"),
        bottom=("parallel.shard_size",),
        why="no group of ranks holds the whole of it",
        applies=lambda config: bool(
            config.parallel.mode == "hsdp" and config.parallel.shard_size and ranks(config) is not None
        ),
    ),
    Derived(
        name="width of an attention head",
        top=("model.hidden_size",),
        bottom=("model.num_heads",),
        why="a head sees nothing",
        applies=lambda config: config.workload is None,
    ),
)

RULES = tuple(Rule((*one.top, *one.bottom), one.check) for one in DERIVED)

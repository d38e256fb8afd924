"""What a rule is, and what it says when it is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.config.schema import RunConfig

Answer = tuple[str, str | None] | None  # message and hint of a broken rule


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken rule. keys: those it is about, the one to blame first."""

    keys: tuple[str, ...]
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class Rule:
    """keys: those that `check` looks at, the one to blame first. check: message and hint, or None when it holds."""

    keys: tuple[str, ...]
    check: Callable[[RunConfig], Answer]


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def ranks(config: RunConfig) -> int | None:
    """The world size, or None where the plan is to choose it."""
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    return None if nodes == "auto" or processes == "auto" else nodes * processes

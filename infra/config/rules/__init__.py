"""Rules about several keys at once. Each shows its arithmetic and computes the nearest values that would do."""

from __future__ import annotations

from collections.abc import Collection

from ebbflow.infra.config.rules import batch, derived, model, names, parallel, survival
from ebbflow.infra.config.rules.rule import Violation
from ebbflow.infra.config.schema import RunConfig

__all__ = ["Violation", "violations"]

_RULES = (*model.RULES, *derived.RULES, *parallel.RULES, *names.RULES, *survival.RULES, *batch.RULES)


def violations(config: RunConfig, *, without: Collection[str] = ()) -> list[Violation]:
    """The rules that a configuration breaks. Rules about a key in `without` are left out."""
    broken = []
    for rule in _RULES:
        if any(key in without for key in rule.keys):
            continue
        found = rule.check(config)
        if found is not None:
            broken.append(Violation(keys=rule.keys, message=found[0], hint=found[1]))
    return broken

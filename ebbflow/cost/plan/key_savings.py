"""Find configuration keys whose values, if changed, would make a plan much cheaper."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ebbflow.core.config.device_settings import choose_loss_chunk
from ebbflow.core.config.rule_base import value_of
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.config.shape_rules import RULES
from ebbflow.cost.plan.candidates import PlanInputs, feasible_pools

# A smaller saving is within the errors of the estimates.
_LEAST_SHARE = 0.05
_LEAST_USD = 0.01
_MOST_EFA = 32  # as many as its type has, for each node
_ACCUMULATIONS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class KeySaving:
    """Another value of a configuration key, with the dollars that it would save."""

    key: str
    value: str  # as it is written in YAML
    usd: float  # expected dollars of the plan with it
    saved_usd: float  # expected dollars less than those of this plan


def find_key_savings(
    config: RunConfig,
    sources: PlanInputs,
    planned_usd: float,
    plan_usd: Callable[[RunConfig], float | None],
) -> tuple[KeySaving, ...]:
    """Find the best other value of each configuration key that would save more than 5 %.

    The largest saving comes first. The result is empty if a script ignores the keys.

    Args:
        planned_usd: expected dollars of the plan of `config`, as it shows them.
        plan_usd: returns the same for another configuration; None if no pool can run it. It takes
            longer than the estimate by which the values of a key are compared.
    """
    now = _cheapest_usd(config, sources)
    if now is None or config.script is not None:
        return ()
    best: dict[str, tuple[float, str, RunConfig]] = {}
    for key, value in _other_values(config):
        section, _, name = key.partition(".")
        changed = config.changed(section, **{name: value})
        if any(rule.check(changed) for rule in RULES):
            continue
        usd = _cheapest_usd(changed, sources)
        if usd is None or now - usd < max(_LEAST_USD, _LEAST_SHARE * now):
            continue
        if key not in best or usd < best[key][0]:
            best[key] = (usd, _write(value), changed)
    found = []
    for key, (_, text, changed) in best.items():
        usd = plan_usd(changed)
        if usd is None or planned_usd - usd < max(_LEAST_USD, _LEAST_SHARE * planned_usd):
            continue
        found.append(KeySaving(key=key, value=text, usd=usd, saved_usd=planned_usd - usd))
    return tuple(sorted(found, key=lambda saving: saving.usd))


def _cheapest_usd(config: RunConfig, sources: PlanInputs) -> float | None:
    pools = feasible_pools(config, sources)
    return min((pool.expected_usd for pool in pools), default=None)


def _other_values(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield keys with values that they do not have, such as ("training.tf32", True)."""
    values: dict[str, tuple[object, ...]] = {
        "fsdp.use_mixed_precision": (True,),
        "fsdp.cpu_offload": (False, True),
        "training.gradient_accumulation_steps": _ACCUMULATIONS,
        "parallel.mode": ("ddp", "fsdp2"),
        "parallel.recompute": ("none", "selective", "full"),
    }
    if config.parallel.compile:  # else fp8 saves no time
        values["fsdp.float8"] = ("on", "off")
    if config.fsdp.use_mixed_precision is False:  # else nothing is multiplied in float32
        values["training.tf32"] = (True,)
    if config.cluster.nodes != 1 and config.cluster.plan_for != "slurm":
        values["batch.efa_interfaces"] = (_MOST_EFA,)
    if config.user_code is None:
        values["training.loss_chunk_tokens"] = (choose_loss_chunk(config.model.vocab_size), None)
    for key, offered in values.items():
        written = value_of(config, key)
        yield from ((key, value) for value in offered if value != written)


def _write(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)

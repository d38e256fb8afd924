"""One job under one policy in its net: refused, or run to its end."""

from __future__ import annotations

from dataclasses import dataclass

from cost.policy.interface import PolicyFactory
from cost.policy.net import Refusal, SafetyNet, admission
from cost.simulate.engine import first_state, simulate
from cost.simulate.job import Job, Outcome, Reality
from cost.simulate.rules import Rules
from cost.simulate.world import World


@dataclass(frozen=True, slots=True)
class Result:
    """Exactly one of the two is None."""

    outcome: Outcome | None
    refusal: Refusal | None


def run_job(world: World, job: Job, rules: Rules, factory: PolicyFactory, *, reality: Reality | None = None) -> Result:
    """Admit the job, run it in the safety net, say what became of it."""
    refusal = admission(first_state(world, job, rules))
    if refusal is not None:
        return Result(None, refusal)
    net = SafetyNet(factory())
    outcome = simulate(world, job, rules, net, reality=reality)
    outcome.overruled = net.overruled
    return Result(outcome, None)

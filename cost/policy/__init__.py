"""Policies, which decide in which pool a job runs next, and the safety net that keeps deadline and budget.

`policies` imports the policies when it is called, because not every command needs them.
"""

from __future__ import annotations

from functools import partial

from ebbflow.cost.policy.interface import PolicyFactory


def policies() -> dict[str, PolicyFactory]:
    """Return the functions that make policies, by policy name."""
    from ebbflow.cost.policy.adaptive import Adaptive
    from ebbflow.cost.policy.interface import Adversary, Greedy, OnDemand, UniformProgress

    return {
        "adaptive": Adaptive,
        "greedy": Greedy,
        "uniform_progress": UniformProgress,
        "uniform_progress_leaving": partial(UniformProgress, leaves_at_once=True),
        "uniform_progress_regions": partial(UniformProgress, failover=True),
        "uniform_progress_staying": partial(UniformProgress, leaves_blind=False),
        "on_demand": OnDemand,
        "adversary": Adversary,
    }

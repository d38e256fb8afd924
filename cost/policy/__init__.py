"""Policies: where a job runs next. One interface, several answers, and a safety net that stands outside all of them.

The table of names is made on demand, so that importing the interface imports no policy.
"""

from __future__ import annotations

from functools import partial

from ebbflow.cost.policy.interface import PolicyFactory


def policies() -> dict[str, PolicyFactory]:
    """Name → factory of every policy that can be asked for by name."""
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

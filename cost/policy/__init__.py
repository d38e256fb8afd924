"""Policies: where a job runs next. One interface, several answers, and a safety net that stands outside all of them.

The table of names is made on demand, so that importing the interface imports no policy.
"""

from __future__ import annotations

from cost.policy.interface import PolicyFactory


def policies() -> dict[str, PolicyFactory]:
    """Name → factory of every policy that can be asked for by name."""
    return {}

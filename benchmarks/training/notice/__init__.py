"""`ebbflow bench notice`: from a notice to a durable commit, and the steps that are taken twice for
it.
"""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The command. 0 when everything was measured, else the exit code of what went wrong."""
    from benchmarks.training.notice.commands import main as run

    return run(arguments)

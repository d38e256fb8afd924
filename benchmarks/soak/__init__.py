"""`ebbflow soak`: the long proofs.

Jobs under kills, and the commits alone under all sorts of faults.
"""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The command. 0 when everything held."""
    from benchmarks.soak.commands import main as run

    return run(arguments)

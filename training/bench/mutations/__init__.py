"""`python -m training bench mutations`: what is found of single changes to what was stored, here and by DCP."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The command. 0 when nothing that was changed was loaded unnoticed by the commits' reader."""
    from training.bench.mutations.commands import main as run

    return run(arguments)

"""`ebbflow bench survival`: how soon faults are noticed, who is blamed, how soon the gang is back."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The command. 0 when every job ended with the weights of the quiet one and nothing waited
    beyond its limit.
    """
    from benchmarks.training.survival.commands import main as run

    return run(arguments)

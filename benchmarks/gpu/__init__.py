"""`ebbflow bench gpu`: prove on a machine with GPUs what was only ever shown on CPUs.

Importing it imports no torch.
"""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The command. 0 if every line came out as expected, 1 if one did not, 3 if there is no GPU to
    measure.
    """
    from benchmarks.gpu.commands import main as run

    return run(arguments)

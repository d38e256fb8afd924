"""`ebbflow bench gpu`: prove on a machine with GPUs what was only shown on CPUs.

Importing it imports no torch.
"""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """Run the command.

    Returns:
        0 if every line is as expected, 1 if one is not, 3 if there is no GPU.
    """
    from benchmarks.gpu.commands import main as run

    return run(arguments)

"""`ebbflow bench mutations`: what becomes of single changes to what was stored, here and with
torch's DCP.

`changes` makes and undoes them, `commits` and `dcp` are the two that are asked, each in processes
of its own (`asked` in them, `asking` here), `trials` counts, `commands` is the command. Only what
is asked imports torch.
"""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The command. 0 when every change to a commit was found: never loaded, and named by
    `checkpoints verify`.
    """
    from benchmarks.training.mutations.commands import main as run

    return run(arguments)

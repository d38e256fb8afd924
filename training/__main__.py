"""Entry point of `python -m ebbflow.training`.

If the first argument is one of `_COMMANDS`, run that command. Otherwise train: `torchrun -m ebbflow.training CONFIG`
trains without Metaflow.
"""

from __future__ import annotations

import os
import sys

from ebbflow.infra.program import begin_program
from ebbflow.infra.untrusted_text import guard_terminal

_COMMANDS = ("checkpoints", "examine", "soak", "bench", "certify", "run")


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names, or train if it names none.

    Each command's modules are imported only when it runs, because listing commits does not need torch.
    """
    if arguments and arguments[0] in _COMMANDS:  # ranks keep the raw bytes in their logs
        guard_terminal()
    if arguments[:1] == ["checkpoints"]:
        from ebbflow.training.checkpoint.commands import main as checkpoints

        sys.exit(checkpoints(arguments[1:]))
    if arguments[:1] == ["examine"]:
        from ebbflow.training.workloads.examine import main as examine

        sys.exit(examine(arguments[1:]))
    if arguments[:1] in (["soak"], ["bench"]):
        from ebbflow.infra.process import run_benchmarks

        run_benchmarks(["soak" if arguments[0] == "soak" else "training", *arguments[1:]])
    if arguments[:1] == ["run"]:
        from ebbflow.training.script import main as run

        sys.exit(run(arguments[1:]))
    if arguments[:1] == ["certify"]:
        from ebbflow.training.certify import main as certify

        sys.exit(certify(arguments[1:]))
    if arguments[:1] == ["--standby"]:
        from ebbflow.training.launch.workers import STANDBY_VARIABLE
        from ebbflow.training.standby import serve

        serve(int(os.environ[STANDBY_VARIABLE]))
        arguments = []  # `serve` returns in a forked rank, whose environment is now set
    else:
        _tie_to_parent()
    from ebbflow.training.worker import main as work

    work(arguments)


def _tie_to_parent() -> None:
    """Make this process die with its parent, even while it is still importing torch, which takes seconds."""
    from ebbflow.infra.process import die_with_parent

    die_with_parent()


if __name__ == "__main__":
    begin_program()
    main(sys.argv[1:])

"""Entry point of `python -m ebbflow.training`.

If the first argument names a command, run that command. Otherwise train:
`torchrun -m ebbflow.training CONFIG` trains without Metaflow.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ebbflow.core.process import die_with_parent, run_benchmarks, run_command
from ebbflow.core.program import begin_program
from ebbflow.core.untrusted_text import guard_terminal

if TYPE_CHECKING:
    from ebbflow.core.config.schema import RunConfig
    from ebbflow.training.workload import WorkloadContext

_BENCHMARKS = {"soak": "soak", "bench": "training"}


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names, or train."""
    name = arguments[0] if arguments else ""
    if name in _BENCHMARKS:
        guard_terminal()  # not for ranks, which keep the raw bytes in their logs
        run_benchmarks([_BENCHMARKS[name], *arguments[1:]])
    command = _load_command(name)
    if command is not None:
        guard_terminal()
        sys.exit(run_command(lambda: command(arguments[1:])))
    gc.disable()  # saves a quarter of the time of a rank's imports, whose objects are never freed
    if name == "--standby":
        from ebbflow.training.launch.workers import STANDBY_VARIABLE
        from ebbflow.training.standby import serve

        serve(int(os.environ[STANDBY_VARIABLE]))
        arguments = []  # `serve` returns in a forked rank, whose environment is now set
    else:
        die_with_parent()  # even while this process is still importing torch, which takes seconds
    from ebbflow.training.worker import main as work

    gc.enable()
    work(arguments, _try_workload)


def _load_command(name: str) -> Callable[[list[str]], int] | None:
    """Import the command of this name, and no other command; return None for any other name."""
    match name:
        case "checkpoints":
            from ebbflow.training.checkpoint.commands import main as command
        case "run":
            from ebbflow.training.attach.script import main as command
        case "examine" | "certify" | "compare" | "doctor":
            from ebbflow.tryout.__main__ import load_tool

            command = load_tool(name)
        case _:
            return None
    return command


def _try_workload(config: RunConfig, context: WorkloadContext) -> str:
    """Try a workload, and return the checks that it passed.

    A rank that an agent started does not call this.
    """
    from ebbflow.tryout.trial import try_workload

    return try_workload(config, context).text


if __name__ == "__main__":
    begin_program()
    main(sys.argv[1:])

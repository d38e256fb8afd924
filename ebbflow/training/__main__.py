"""Entry point of `python -m ebbflow.training`.

If the first argument is one of `_COMMANDS`, run that command. Otherwise train:
`torchrun -m ebbflow.training CONFIG` trains without Metaflow.
"""

import gc
import importlib
import os
import sys

from ebbflow.core.process import die_with_parent, run_benchmarks, run_command
from ebbflow.core.program import begin_program
from ebbflow.core.untrusted_text import guard_terminal

_COMMANDS = {
    "checkpoints": "ebbflow.training.checkpoint.commands",
    "examine": "ebbflow.tryout.examine",
    "certify": "ebbflow.tryout.certify",
    "compare": "ebbflow.tryout.compare",
    "run": "ebbflow.training.attach.script",
    "doctor": "ebbflow.tryout.doctor",
}
_BENCHMARKS = {"soak": "soak", "bench": "training"}


def main(arguments: list[str]) -> None:
    """Run the command that the first argument names, or train.

    Modules of other commands are not imported.
    """
    if arguments:
        command = arguments[0]
    else:
        command = ""
    if command in _COMMANDS or command in _BENCHMARKS:  # ranks keep the raw bytes in their logs
        guard_terminal()
    if command in _COMMANDS:
        module = importlib.import_module(_COMMANDS[command])
        sys.exit(run_command(lambda: module.main(arguments[1:])))
    if command in _BENCHMARKS:
        run_benchmarks([_BENCHMARKS[command], *arguments[1:]])
    gc.disable()  # saves a quarter of the time of a rank's imports, whose objects are never freed
    if command == "--standby":
        from ebbflow.training.launch.workers import STANDBY_VARIABLE
        from ebbflow.training.standby import serve

        serve(int(os.environ[STANDBY_VARIABLE]))
        arguments = []  # `serve` returns in a forked rank, whose environment is now set
    else:
        die_with_parent()  # even while this process is still importing torch, which takes seconds
    from ebbflow.training.worker import main as work

    gc.enable()
    work(arguments)


if __name__ == "__main__":
    begin_program()
    main(sys.argv[1:])

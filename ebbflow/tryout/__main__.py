"""Entry point of `python -m ebbflow.tryout examine|certify|compare|doctor`."""

import sys
from collections.abc import Callable

from ebbflow.core.process import run_command
from ebbflow.core.program import begin_program
from ebbflow.core.untrusted_text import guard_terminal


def main(arguments: list[str]) -> int:
    """Run the tool named by the first argument, and return its exit code."""
    guard_terminal()
    tool = load_tool(arguments[0])
    return run_command(lambda: tool(arguments[1:]))


def load_tool(name: str) -> Callable[[list[str]], int]:
    """Import a tool, and return its main function, which takes the command's arguments.

    The other tools are not imported, because some import torch.
    """
    match name:
        case "examine":
            from ebbflow.tryout.examine import main as tool
        case "certify":
            from ebbflow.tryout.certify import main as tool
        case "compare":
            from ebbflow.tryout.compare import main as tool
        case "doctor":
            from ebbflow.tryout.doctor import main as tool
        case _:
            sys.exit(f"ebbflow.tryout: there is no tool {name!r}")
    return tool


if __name__ == "__main__":
    begin_program()
    sys.exit(main(sys.argv[1:]))

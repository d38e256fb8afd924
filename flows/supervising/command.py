"""The command line of the supervisor."""

from __future__ import annotations

import sys

from ebbflow.flows.supervising.options import read_options
from ebbflow.flows.supervising.supervisor import Supervisor
from ebbflow.infra.config import ConfigError
from ebbflow.infra.errors import InfraError
from ebbflow.infra.foreign_text import guard_terminal
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.process import survive_lost_readers
from ebbflow.infra.program import PROJECT_ROOT


def main(arguments: list[str]) -> int:
    """Supervise one job; the exit code says how it ended."""
    survive_lost_readers()
    guard_terminal()
    try:
        options = read_options(arguments, project_root=PROJECT_ROOT)
        return Supervisor(options, _say).supervise()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Outcome.CONFIG.exit_code
    except InfraError as error:
        print(f"supervise: {error}", file=sys.stderr)
        return error.outcome.exit_code


def _say(text: str) -> None:
    print(f"supervise: {text}", flush=True)

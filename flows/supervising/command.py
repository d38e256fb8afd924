"""The command line of the supervisor."""

from __future__ import annotations

import sys

from flows.job import PROJECT_ROOT
from flows.supervising.options import read_options
from flows.supervising.supervisor import Supervisor
from infra.config import ConfigError
from infra.errors import InfraError
from infra.foreign_text import guard_terminal
from infra.outcome import Outcome
from infra.process import survive_lost_readers


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

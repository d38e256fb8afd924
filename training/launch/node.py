"""`python -m ebbflow.training.launch.node SPEC.json RESULT.json`: one node's agent as a process of its own.

Metaflow's task is a node's agent in the flow; this is the same without Metaflow, for several nodes on one machine.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from ebbflow.infra.errors import InfraError
from ebbflow.infra.foreign_text import guard_terminal
from ebbflow.infra.process import die_with_parent
from ebbflow.infra.program import begin_program
from ebbflow.training.errors import TrainingError
from ebbflow.training.launch.agent import run_gang
from ebbflow.training.launch.spec import GangSpec


def main(argv: list[str]) -> int:
    """Exit code 0 with the outcome in the result file, 1 with an "error" in it."""
    guard_terminal()
    spec_path, result_path = map(Path, argv)
    die_with_parent()
    spec = GangSpec(**json.loads(spec_path.read_text()))
    try:
        result: dict = asdict(run_gang(spec))
    except (TrainingError, InfraError) as error:
        curable = isinstance(error, InfraError) or error.curable  # a store that is away may be back
        result = {"error": str(error), "curable": curable, "outcome": error.outcome}
    result_path.write_text(json.dumps(result))
    return int("error" in result)


if __name__ == "__main__":
    begin_program()
    sys.exit(main(sys.argv[1:]))

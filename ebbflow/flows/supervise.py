"""Supervise a job until it is complete, or until a failure, the budget or the deadline ends it.

Run it with

    python flows/supervise.py CONFIG [--job NAME] [options of `run`, such as --set …, --with batch]

The supervisor starts the flow again under the same job name when Metaflow's five attempts are used
up, when the launcher was killed, or when there was no capacity. It keeps its state in the job's
store, so it can be killed and started again on any machine.
"""

import sys
from pathlib import Path

# In a checkout the package `ebbflow` is beside this file's folder; elsewhere Python finds it
# anyway.
_ROOT = Path(__file__).resolve().parents[2]
if (_ROOT / "ebbflow").is_dir():  # a checkout
    sys.path.insert(1, str(_ROOT))

if __name__ == "__main__":
    from ebbflow.core.program import begin_program

    begin_program()
    from ebbflow.core.process import exit_when_interrupted

    exit_when_interrupted()
    from ebbflow.flows.supervising.supervisor import main

    sys.exit(main(sys.argv[1:]))

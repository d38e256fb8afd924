"""Keeps a job going until it is done, or nothing but money is left to lose. Run it with

    python flows/supervise.py CONFIG [--job NAME] [options of `run`, such as --set …, --with batch]

It starts the flow again and again under the job's name: beyond Metaflow's five attempts, after a launcher that was
killed, and when there was no capacity. It keeps nothing on this machine: what it knows of the job lies in the job's
store, so that it can be killed itself and started again, here or elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The rooms are this file's siblings; in a code package they lie beside it.
_ROOT = Path(__file__).resolve().parents[1]
if (_ROOT / "ebbflow").is_dir():  # a checkout
    sys.path.insert(1, str(_ROOT))

if __name__ == "__main__":
    from ebbflow.infra.program import begin_program

    begin_program()
    from ebbflow.infra.process import exit_when_interrupted

    exit_when_interrupted()
    from ebbflow.flows.supervising.supervisor import main

    sys.exit(main(sys.argv[1:]))

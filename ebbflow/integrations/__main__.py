"""Command that runs a script as the only rank of a trial:

`python -m ebbflow.integrations SCRIPT.py ARGUMENTS`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ebbflow.integrations import switch_on

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    switch_on(trial=True)
    runpy.run_path(sys.argv[0], run_name="__main__")

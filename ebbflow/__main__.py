"""Entry point of `python -m ebbflow`, which does the same as the console command `ebbflow`."""

import sys

from ebbflow.command import main

sys.exit(main())

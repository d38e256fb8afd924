"""`python -m ebbflow`: the same as the console command."""

import sys

from ebbflow.command import main

sys.exit(main())

"""Compute something without Ebbflow, as a script that never attaches does."""

import sys
from pathlib import Path


def main() -> None:
    Path(sys.argv[1]).write_text(" ".join(sys.argv[2:]))


if __name__ == "__main__":
    main()

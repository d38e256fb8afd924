"""`python -m benchmarks training|gpu|soak|diagnose|recovery …`: measure what docs/benchmarks.md reports."""

from __future__ import annotations

import sys

_SUITES = ("training", "gpu", "soak", "diagnose", "recovery")


def main(arguments: list[str]) -> int:
    """Run one suite and return its exit code. Only the suite that is asked for is imported."""
    match arguments[:1]:
        case ["training"]:
            from benchmarks.training import main as run
        case ["gpu"]:
            from benchmarks.gpu import main as run
        case ["soak"]:
            from benchmarks.soak import main as run
        case ["diagnose"]:
            from benchmarks.diagnosis import main as run
        case ["recovery"]:
            from benchmarks.recovery import main as run
        case _:
            print(f"usage: python -m benchmarks {{{','.join(_SUITES)}}} …", file=sys.stderr)
            return 2
    return run(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

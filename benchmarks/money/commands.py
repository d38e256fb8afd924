"""`python -m benchmarks money …`: measurements and simulations of plans and policies."""

from __future__ import annotations

import argparse
import sys

from benchmarks.money import (
    capacity,
    figures,
    interval,
    placements,
    policy,
    safety,
    simulate,
    speed,
)
from ebbflow.core.errors import InfraError
from ebbflow.cost.errors import CostError


def main(arguments: list[str]) -> int:
    """Run one benchmark and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="ebbflow bench money",
        description="Measure plans and policies. Without BENCH: the figures of docs/money.md.",
    )
    figures.add_arguments(parser)
    parser.set_defaults(run=figures.run)
    benches = parser.add_subparsers(metavar="BENCH")
    for bench in (interval, capacity, policy, placements, safety, speed, simulate):
        bench.add_command(benches)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (CostError, InfraError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code

"""`python -m cost bench …`: measurements and simulations that back what the documentation says."""

from __future__ import annotations

from typing import Any

from cost.bench import capacity, interval, placements, policy, safety, speed


def add_commands(commands: Any) -> None:
    """Add `bench` with its commands to argparse's subparsers."""
    bench = commands.add_parser("bench", help="measure plans and policies, simulate intervals")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    interval.add_command(benches)
    capacity.add_command(benches)
    policy.add_command(benches)
    placements.add_command(benches)
    safety.add_command(benches)
    speed.add_command(benches)

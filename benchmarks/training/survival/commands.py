"""The command `ebbflow bench survival`: which faults are injected, how many, and the findings."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.chaos.fault import Aim, Fault
from benchmarks.chaos.kinds import FAULTS
from benchmarks.training.survival.campaign import Campaign, Planned
from benchmarks.training.survival.figures import survival_figures, survival_text
from benchmarks.training.survival.job import survival_config
from benchmarks.training.tables import machine_line
from ebbflow.core.errors import InfraError
from ebbflow.infra.instance import describe_machine
from ebbflow.training.errors import TrainingError


def main(arguments: list[str]) -> int:
    """Return 0, 1 if weights differ or a limit was exceeded, or the exit code of an error."""
    given = _parse(arguments)
    try:
        return _bench(given)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ebbflow bench survival",
        description="Inject faults into small gangs and judge what is said.",
    )
    parser.add_argument("--injections", type=int, default=60, help="how many in all (default 60)")
    parser.add_argument(
        "--kinds", default=",".join(FAULTS), metavar="LIST", help=f"of {', '.join(FAULTS)}"
    )
    parser.add_argument(
        "--floor", type=float, default=3.0, help="survival.hang_floor_seconds (default 3)"
    )
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.05,
        help="the least that a step takes (default 0.05)",
    )
    parser.add_argument(
        "--per-job", type=int, default=10, help="injections into one job (default 10)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order and the targets (default 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--folder", type=Path, help="where stores are made (default: the temporary folder)"
    )
    given = parser.parse_args(arguments)
    given.kinds = [kind for kind in given.kinds.split(",") if kind]
    unknown = [kind for kind in given.kinds if kind not in FAULTS]
    if unknown:
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return given


def _bench(given: argparse.Namespace) -> int:
    figures: dict[str, Any] = {"kind": "measured", "machine": describe_machine()}
    print(machine_line(figures["machine"]), flush=True)
    faults = [FAULTS[kind] for kind in given.kinds]
    figures |= {
        "floor_seconds": given.floor,
        "seed": given.seed,
        "planned": given.injections,
    }
    plan = _plan(faults, given.injections, random.Random(given.seed))
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as name:
        campaign = _campaign(given, Path(name), figures)
        if plan:
            campaign.run(plan)
        figures |= _so_far(campaign)
        print(f"\n{survival_text(figures)}", flush=True)
    _write(given, figures)
    waited = [finding.kind for finding in campaign.findings if finding.overdue]
    complaints = [*campaign.wrong, *(f"{kind}: nothing came of it in time" for kind in waited)]
    for complaint in complaints:
        print(f"WRONG: {complaint}", flush=True)
    return int(bool(complaints))


def _campaign(given: argparse.Namespace, folder: Path, figures: dict[str, Any]) -> Campaign:
    """Make the campaign, which writes --json after each job, so that findings are not lost."""
    per_job = min(given.per_job, given.injections)
    return Campaign(
        config=survival_config(
            folder, injections=per_job, floor_seconds=given.floor, step_seconds=given.step_seconds
        ),
        folder=folder,
        per_job=per_job,
        tell=lambda line: print(line, flush=True),
        keep=lambda campaign: _write(given, figures | _so_far(campaign)),
    )


def _so_far(campaign: Campaign) -> dict[str, Any]:
    return survival_figures(campaign.findings) | {
        "jobs": campaign.jobs,
        "different_weights": list(campaign.wrong),
    }


def _write(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    if given.json is not None:
        temporary = given.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(figures, indent=1) + "\n")
        temporary.replace(given.json)


def _plan(faults: list[Fault], injections: int, chance: random.Random) -> Planned:
    """Plan every kind equally often, in random order, on random targets."""
    kinds = [faults[number % len(faults)] for number in range(injections)]
    chance.shuffle(kinds)
    plan = []
    for number, fault in enumerate(kinds):
        node = chance.choice(fault.nodes)
        plan.append((fault, Aim(node=node, rank=node, number=number)))
    return plan

"""The command: which of the two measurements, how many notices, and where the figures go."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.training.notice.scaled import measure_scaled
from benchmarks.training.notice.shape import ARMS, TARGET_STEPS, WORKERS, measure_shape
from benchmarks.training.tables import machine_line
from ebbflow.core.errors import InfraError
from ebbflow.infra.instance import describe_machine
from ebbflow.training.errors import TrainingError

PARTS = ("scaled", "shape")


def main(arguments: list[str]) -> int:
    given = _parse(arguments)
    figures: dict[str, Any] = {"kind": "measured", "machine": describe_machine()}
    print(machine_line(figures["machine"]), flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ebbflow-notice-", dir=given.folder) as folder:
            _measure(given, Path(folder), figures)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ebbflow bench notice",
        description="Measure what becomes of notices of spot interruptions.",
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)} (default: both)"
    )
    parser.add_argument("--notices", type=int, default=100, help="of the scaled part (default 100)")
    parser.add_argument(
        "--notice-seconds", type=float, default=12.0, help="given by each notice (default 12)"
    )
    parser.add_argument(
        "--margin-seconds", type=float, default=1.0, help="kept back of it (default 1)"
    )
    parser.add_argument(
        "--arms", default=",".join(ARMS), help=f"of the shape: {', '.join(ARMS)} (default: both)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the steps at which notices come (default 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--folder", type=Path, help="where the store is made (default: the temporary folder)"
    )
    given = parser.parse_args(arguments)
    for option, allowed in (("parts", PARTS), ("arms", ARMS)):
        if unknown := set(getattr(given, option).split(",")) - set(allowed):
            parser.error(
                f"--{option}: {', '.join(sorted(unknown))} is none of {', '.join(allowed)}"
            )
    return given


def _measure(given: argparse.Namespace, folder: Path, figures: dict[str, Any]) -> None:
    seconds = {"notice_seconds": given.notice_seconds, "margin_seconds": given.margin_seconds}
    if "scaled" in given.parts.split(","):
        figures["scaled"] = measure_scaled(
            folder, notices=given.notices, seed=given.seed, tell=_say, **seconds
        )
        print(f"\n{_scaled_text(figures['scaled'])}", flush=True)
    if "shape" in given.parts.split(","):
        figures["shape"] = measure_shape(folder, arms=given.arms.split(","), tell=_say, **seconds)
        print(f"\n{_shape_text(figures['shape'])}", flush=True)


def _scaled_text(found: dict[str, Any]) -> str:
    lines = [
        f"{found['notices']} notices of {found['notice_seconds']:g} s to 2 ranks: "
        f"{found['durable']} with the last step durable in time, {found['interrupted']} left as "
        f"interrupted, {found['steps_redone']} steps redone",
        f"{'from the notice, in seconds':28}{'median':>9}{'p95':>9}{'worst':>9}",
        _line("heard by an agent", found["heard_seconds"]),
        _line("durable commit", found["durable_seconds"]),
    ]
    lines += [
        _line(f"  by {source}", values)
        for source, values in found["durable_seconds_by_source"].items()
    ]
    return "\n".join(lines)


def _line(name: str, values: dict[str, Any]) -> str:
    cells = (values[key] for key in ("median", "p95", "worst"))
    return f"{name:28}" + "".join("        –" if cell is None else f"{cell:9.2f}" for cell in cells)


def _shape_text(found: dict[str, Any]) -> str:
    lines = [
        f"{WORKERS} ranks, {TARGET_STEPS} steps, 4 notices",
        f"{'arm':10}{'redone':>8}{'starts':>8}{'seconds':>10}",
    ]
    for arm in ARMS:
        if arm in found:
            one = found[arm]
            lines.append(
                f"{arm:10}{one['wasted_steps']:8}{one['num_attempts']:8}{one['e2e_time']:10.1f}"
            )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, flush=True)

"""`ebbflow bench overhead`: what being watched costs a step: heartbeat, step sync and guards,
beside none of it.

Two ranks on this machine wait 50 ms for their device (a sleep), reduce 1 MiB of gradients, and go
on; step after step in turn without anything, with heartbeat and step sync, and with guards as well.
What disturbs the machine disturbs all alike, so that the figure is the median over the rounds of
the difference to the bare step of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.figures import interval_of_median, part_figures
from benchmarks.training.ranks import run_ranks
from benchmarks.training.tables import machine_line, parts_text, table
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.store import Store
from ebbflow.infra.instance import describe_machine
from ebbflow.training.errors import TrainingError

_PART_ROUNDS = 15
_CALLS = 200
_BARE = "bare"
_NAMES = {
    _BARE: "bare step",
    "watched": "heartbeat and step sync",
    "watched_gloo": "the same, by gloo's all-gather",
    "guarded": "heartbeat, step sync and guards",
}


def main(arguments: list[str]) -> int:
    """Returns 1 if heartbeat and step sync cost more than --at-most of a step, or the exit code of
    an error.
    """
    parser = argparse.ArgumentParser(
        prog="ebbflow bench overhead", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--rounds", type=int, default=300, help="steps of each kind (default 300)")
    parser.add_argument(
        "--step-milliseconds", type=float, default=50.0, help="that the device takes (default 50)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="on this machine (default 2)")
    parser.add_argument(
        "--at-most",
        type=float,
        metavar="SHARE",
        help="fail above this share of a step, such as 0.01",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--folder", type=Path, help="where files are made (default: the temporary folder)"
    )
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds (default 1800)")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.ranks < 1 or given.step_milliseconds <= 0:
        parser.error("--rounds, --ranks and --step-milliseconds are positive")
    try:
        return _bench(given)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code


def _bench(given: argparse.Namespace) -> int:
    machine = describe_machine()
    print(machine_line(machine), flush=True)
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as name:
        task = {
            "kind": "overhead",
            "config": RunConfig().model_dump(mode="json"),
            "folder": name,
            "store_uri": Store.open(str(Path(name) / "store")).uri,
            "rounds": given.rounds,
            "part_rounds": min(given.rounds, _PART_ROUNDS),
            "calls": _CALLS,
            "step_seconds": given.step_milliseconds / 1e3,
        }
        ranks = run_ranks(task, Path(name), ranks=given.ranks, deadline_seconds=given.deadline)
    figures = {"kind": "measured", "machine": machine, "ranks": given.ranks, "rounds": given.rounds}
    steps = [rank["steps"] for rank in ranks]
    figures |= {
        "step_seconds": task["step_seconds"],
        "contestants": overhead_figures(steps, task["step_seconds"]),
    }
    figures["parts"] = part_figures([rank["parts"] for rank in ranks])
    print(f"\n{overhead_text(figures)}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    share = figures["contestants"]["watched"]["share_of_step"]["median"]
    return int(given.at_most is not None and share > given.at_most)


def overhead_figures(ranks: Sequence[dict[str, Any]], step_seconds: float) -> dict[str, Any]:
    """By contestant. A step, or a part of it, lasts as long as its slowest rank's.

    share_of_step: by how much a step was longer than the bare one of its round, over step_seconds;
    a negative one says that the machine's noise is larger. The parts are seconds of a call, as it
    was made within a step; processor is the mean of the ranks, of heartbeat, step sync and guards
    together.
    """
    bare = _slowest(ranks, _BARE, "step")
    found: dict[str, Any] = {}
    for name in ranks[0]:
        steps = _slowest(ranks, name, "step")
        longer = [(own - other) / step_seconds for own, other in zip(steps, bare, strict=True)]
        found[name] = {
            "step_seconds": interval_of_median(steps),
            "share_of_step": interval_of_median(longer),
            **{
                f"{part}_seconds": interval_of_median(_slowest(ranks, name, part))
                for part in _PARTS
            },
            "processor_seconds": statistics.fmean(
                statistics.median(rank[name]["processor"]) for rank in ranks
            ),
        }
    return found


_PARTS = ("beats", "step_sync", "guards")


def _slowest(ranks: Sequence[dict[str, Any]], name: str, part: str) -> list[float]:
    return [max(values) for values in zip(*(rank[name][part] for rank in ranks), strict=True)]


def overhead_text(figures: dict[str, Any]) -> str:
    rows = []
    for name, found in figures["contestants"].items():
        bare = name == _BARE
        rows.append(
            [
                _NAMES[name],
                _bracketed(found["step_seconds"], 1e3, 2),
                "" if bare else _bracketed(found["share_of_step"], 1e2, 2),
                *(
                    "" if bare else f"{1e6 * found[f'{part}_seconds']['median']:.1f}"
                    for part in _PARTS
                ),
                "" if bare else f"{1e6 * found['processor_seconds']:.0f}",
            ]
        )
    heads = [
        "step with",
        "ms",
        "% of a step more",
        "4 beats µs",
        "step sync µs",
        "guards µs",
        "CPU µs",
    ]
    about = (
        f"overhead: measured · {figures['ranks']} ranks of 1 thread, a device that takes "
        f"{1e3 * figures['step_seconds']:g} ms, 1 MiB reduced\nmedians of {figures['rounds']} "
        "steps each, in turn, with their 95 % interval in brackets"
    )
    parts = (
        "again and again, with warm "
        f"caches:\n{parts_text(figures['parts'], ranks=figures['ranks'])}"
    )
    return f"{about}\n\n{table(heads, rows, text_columns=1)}\n\n{parts}"


def _bracketed(found: dict[str, float], times: float, digits: int) -> str:
    median, low, high = (f"{times * found[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}–{high})"

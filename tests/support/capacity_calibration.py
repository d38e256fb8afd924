"""Compare the plan's chances, hours and dollars of Spot jobs with what recorded capacity then did.

    python -m tests.support.capacity_calibration FOLDER

FOLDER has `availability/ZONE_v100_1.json` and `gang/ZONE_v100_1.json`: `metadata.gap_seconds` and
`data`, the number of machines that could be had at each tick (skypilot-org/spot-traces). A zone of
the first kind is forecast from the other eight. Of the second kind, none is in the plan's table.
Jobs of 1 to 24 h of work, a commit each 15 min, start at 60 moments of each trace and stay on Spot.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.plan.guarantee import start_hours
from ebbflow.cost.plan.live_forecast import simulate_live
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.plan.pools import Candidate
from ebbflow.cost.plan.spot_belief import ZONE_SPELLS, ZoneSpells

WORK_HOURS = (1.0, 3.0, 6.0, 12.0, 24.0)
INTERVAL_HOURS = 0.25
STARTS = 60
GANG_ZONES = ("us-east-1f", "us-east-2a", "us-west-2c")


@dataclass(frozen=True)
class Trace:
    """Spot capacity of one zone, tick by tick."""

    tick_hours: float
    has_capacity: numpy.ndarray

    @classmethod
    def read(cls, path: Path, machines: int) -> Trace:
        recorded = json.loads(path.read_text())
        return cls(
            recorded["metadata"]["gap_seconds"] / 3600, numpy.array(recorded["data"]) >= machines
        )

    def run(self, start: int, work: float, boot: float) -> tuple[float, float] | None:
        """Return the hours and the paid hours of a job from tick `start` on; None if the trace
        ends before it does.
        """
        paid = 0.0
        hours = 0.0
        at = start
        while at < len(self.has_capacity):
            until = at
            while until < len(self.has_capacity) and (
                self.has_capacity[until] == self.has_capacity[at]
            ):
                until += 1
            spell = (until - at) * self.tick_hours
            if self.has_capacity[at]:
                if boot + work <= spell:
                    return hours + boot + work, paid + boot + work
                trained = max(0.0, spell - boot)
                work -= trained - trained % INTERVAL_HOURS
                paid += spell
            hours += spell
            at = until
        return None


def calibrate(
    pool: Candidate, config: RunConfig, traces: Mapping[str, Trace], *, leave_out: bool
) -> list[str]:
    """Return one line for each tenth of the printed chance, and one of the dollars."""
    seen: list[tuple[float, float]] = []
    planned = 0.0
    actual = 0.0
    for name, trace in traces.items():
        zones: dict[str, ZoneSpells] = {
            zone: spells for zone, spells in ZONE_SPELLS.items() if zone != name or not leave_out
        }
        last = len(trace.has_capacity) - 1
        for work in WORK_HOURS:
            case = replace(
                pool.case,
                work_hours=work,
                interval_hours=INTERVAL_HOURS,
                speed_log_deviation=0.0,
            )
            spot = replace(pool, case=case)
            runs = simulate_live(
                config, spot, None, hours_left=None, usd_left=math.inf, zones=zones
            )
            begins = numpy.linspace(0, 0.75 * last, STARTS).astype(int)
            done = [trace.run(int(begin), work, start_hours(spot)) for begin in begins]
            finished = [run for run in done if run is not None]
            planned += float(runs.usd.mean()) / pool.gang_usd_per_hour
            actual += sum(paid for _, paid in finished) / len(finished)
            for share in numpy.linspace(0.05, 0.95, 19):
                limit = float(numpy.quantile(runs.hours, share))
                chance = float((runs.hours <= limit).mean())
                met = [run is not None and run[0] <= limit for run in done]
                seen.append((chance, sum(met) / len(met)))
    lines = []
    for tenth in range(1, 10):
        near = [pair for pair in seen if abs(pair[0] - tenth / 10) <= 0.05]
        if near:
            said = sum(chance for chance, _ in near) / len(near)
            came = sum(true for _, true in near) / len(near)
            lines.append(f"  P {said:.2f}: came true {came:.2f} ({len(near)} forecasts)")
    lines.append(f"  planned / actual dollars - 1: {planned / actual - 1:+.3f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cluster = {
        "nodes": 1,
        "plan_for": "kubernetes",
        "instance_types": ["g5.xlarge"],
        "market": "spot",
    }
    config = RunConfig.model_validate({"training": {"max_steps": 10**6}, "cluster": cluster})
    pool = make_plan(config, now_utc=1.79e9).ranked[0]
    single = {
        name: Trace.read(folder / "availability" / f"{name}_v100_1.json", 1) for name in ZONE_SPELLS
    }
    print("one machine, each zone forecast from the other eight")
    print("\n".join(calibrate(pool, config, single, leave_out=True)))
    for machines in (2, 4):
        gangs = {
            name: Trace.read(folder / "gang" / f"{name}_v100_1.json", machines)
            for name in GANG_ZONES
        }
        print(f"gangs of {machines}, not in the table")
        print("\n".join(calibrate(pool, config, gangs, leave_out=False)))


if __name__ == "__main__":
    main()

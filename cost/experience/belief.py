"""What a plan believes of a pool's hazard and of a speed: the published prior, moved by what own jobs have shown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cost.experience.records import JobExperience, SpeedSeen, Stay
from infra.reliability import GammaHazard

# What was seen counts half after a day, and is worth far more than the band. Chosen by the likelihood of the next day's
# losses, given all days before, in recorded traces (V100, 2023): a day did best of 6 h, 12 h, 1, 2, 3, 5, 7 and 14 days
# and for ever, both in nine zones and for gangs of four in three zones (nine zones: −1,262 against −1,503 for ever).
HALF_LIFE_HOURS = 24.0
# Losses come in bursts: a day's vary 3 to 8 times as much as independent ones would (the same nine zones). So what was
# seen leaves as much doubt as a quarter of it would, had it been independent. The mean stays as it is.
EVIDENCE_WORTH = 0.25

Place = tuple[str, str | None, str | None]


@dataclass(frozen=True)
class Experience:
    """Stays by (type, region, zone), and by (type, region, None) all of the region; speeds by type."""

    stays: Mapping[Place, Sequence[Stay]] = field(default_factory=dict)
    speeds: Mapping[str, Sequence[SpeedSeen]] = field(default_factory=dict)

    @classmethod
    def of(cls, jobs: Iterable[JobExperience]) -> Experience:
        stays: dict[Place, list[Stay]] = defaultdict(list)
        speeds: dict[str, list[SpeedSeen]] = defaultdict(list)
        for job in jobs:
            for stay in job.stays:
                if stay.market != "spot":
                    continue
                stays[stay.instance_type, stay.region, None].append(stay)
                if stay.zone is not None:
                    stays[stay.instance_type, stay.region, stay.zone].append(stay)
            for speed in job.speeds:
                speeds[speed.instance_type].append(speed)
        return cls(dict(stays), dict(speeds))

    def reclaims(
        self, prior: GammaHazard, instance_type: str, region: str | None, zone: str | None, now_utc: float
    ) -> tuple[GammaHazard, int]:
        """The belief after all stays in the pool, and their number. zone None: any of the region.

        A gang is one hazard whatever its size, so that stays of all sizes count alike. Each hour of a stay counts by
        its own age: were a long stay weighed by its end alone, its hours would outweigh the losses in them.
        """
        found = self.stays.get((instance_type, region, zone), ())
        belief = prior
        for stay in found:
            weight = 0.5 ** (max(0.0, now_utc - stay.ended_utc) / 3600 / HALF_LIFE_HOURS)
            hours = HALF_LIFE_HOURS / math.log(2) * (1 - 0.5 ** (max(0.0, stay.hours) / HALF_LIFE_HOURS))
            belief = belief.seen(weight * stay.reclaimed, weight * hours)
        if found:
            belief = GammaHazard(EVIDENCE_WORTH * belief.shape, EVIDENCE_WORTH * belief.hours)
        return belief, len(found)

    def speed(self, instance_type: str, nodes: int, processes_per_node: int, fingerprint: str) -> SpeedSeen | None:
        """The newest speed of exactly this."""
        found = [
            seen
            for seen in self.speeds.get(instance_type, ())
            if (seen.nodes, seen.processes_per_node, seen.fingerprint) == (nodes, processes_per_node, fingerprint)
        ]
        return max(found, key=lambda seen: seen.seen_utc, default=None)

    def nearest_speed(self, instance_type: str, nodes: int, fingerprint: str) -> SpeedSeen | None:
        """Elsewhere, of the same configuration: same type first, then the nearest number of nodes, then the newest."""

        def distance(seen: SpeedSeen) -> tuple[bool, float, float]:
            ratio = max(seen.nodes, nodes) / min(seen.nodes, nodes)
            return seen.instance_type != instance_type, ratio, -seen.seen_utc

        every = [seen for found in self.speeds.values() for seen in found if seen.fingerprint == fingerprint]
        return min(every, key=distance, default=None)

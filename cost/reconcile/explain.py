"""Why the bill and the ledger differ: parts of the gap, and what is wrong, each with its name and its dollars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from cost.ledger.instances import MINIMUM_SECONDS
from cost.reconcile.account import Account, Billed, Metered

# What is left unexplained up to here counts as agreement.
AGREED_SHARE = Decimal("0.01")
# Of a node that vanishes, events of its last seconds are missing: they are put each 10 s, its heart beats each second.
LOST_SECONDS = 15.0
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of the gap, billed less metered. cause: boot time, minimum charge, price, other zone … or unexplained."""

    cause: str
    instance_id: str
    usd: Decimal
    words: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something wrong. kind: orphan instance, wrong zone, missed tag …; usd: of the lines that it concerns."""

    kind: str
    resource: str
    usd: Decimal
    words: str


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """forecast, metered and billed dollars of a job's instances, with the gap in parts that sum to it exactly."""

    account: Account
    parts: tuple[Part, ...]
    findings: tuple[Finding, ...]

    @property
    def billed_usd(self) -> Decimal:
        """Of the instances that the events know, in their hours."""
        return sum((billed.usd for billed in self.account.billed.values()), Decimal(0))

    @property
    def joined_usd(self) -> Decimal:
        """What was metered on instances that can be joined with a bill."""
        return sum((metered.usd for metered in self.account.metered.values()), Decimal(0))

    @property
    def gap_usd(self) -> Decimal:
        return self.billed_usd - self.joined_usd

    @property
    def unexplained_usd(self) -> Decimal:
        return sum((part.usd for part in self.parts if part.cause == UNEXPLAINED), Decimal(0))

    @property
    def unexplained_share(self) -> float | None:
        """Of the billed dollars, as the sum of what is unexplained of each instance without regard to sign."""
        if not self.billed_usd:
            return None
        apart = sum((abs(part.usd) for part in self.parts if part.cause == UNEXPLAINED), Decimal(0))
        return float(apart / self.billed_usd)

    @property
    def agrees(self) -> bool:
        share = self.unexplained_share
        return share is not None and Decimal(share) <= AGREED_SHARE and not self.findings and not self.account.unknown

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; dollars as decimal strings, exactly."""
        account = self.account
        return {
            "schema": SCHEMA,
            "job": account.job,
            "bill": "synthetic bill" if account.synthetic else "bill",
            "forecast_usd": account.forecast_usd,
            "metered_usd": str(account.metered_usd),
            "joined_usd": str(self.joined_usd),
            "billed_usd": str(self.billed_usd),
            "gap_usd": str(self.gap_usd),
            "unexplained_usd": str(self.unexplained_usd),
            "unexplained_share": self.unexplained_share,
            "agrees": self.agrees,
            "parts": [{**vars(part), "usd": str(part.usd)} for part in self.parts],
            "findings": [{**vars(finding), "usd": str(finding.usd)} for finding in self.findings],
            "repeated_lines": account.twice,
            "other_usd": {kind: str(usd) for kind, usd in sorted(account.other_usd.items())},
        }


UNEXPLAINED = "unexplained"


def explain(account: Account) -> Reconciliation:
    """Split each instance's gap: first by price, then by time, and what evidence does not cover stays unexplained."""
    parts: list[Part] = []
    for instance_id, metered in sorted(account.metered.items()):
        billed = account.billed.get(instance_id)
        if billed is None or not billed.seconds:
            words = "metered and not billed"
            parts.append(Part(cause=UNEXPLAINED, instance_id=instance_id, usd=-metered.usd, words=words))
            continue
        parts += [part for part in _parts(metered, billed) if part.usd]
    return Reconciliation(account=account, parts=tuple(parts), findings=tuple(_findings(account)))


def _parts(metered: Metered, billed: Billed) -> Iterator[Part]:
    """billed − metered = (billed price − metered price) × common seconds + other seconds × their price."""

    def part(cause: str, usd: Decimal, words: str) -> Part:
        return Part(cause=cause, instance_id=metered.instance_id, usd=usd, words=words)

    rate = billed.usd / _decimal(billed.seconds)
    own_rate = metered.usd / _decimal(metered.seconds) if metered.seconds else rate
    common = min(metered.seconds, billed.seconds)
    cause = _price_cause(metered, billed)
    words = f"{common:,.0f} s billed at ${rate * 3600:.6f}/h, metered at ${own_rate * 3600:.6f}/h"
    yield part(cause, (rate - own_rate) * _decimal(common), words)
    beyond = billed.seconds - metered.seconds
    if beyond < 0:
        yield part(UNEXPLAINED, own_rate * _decimal(beyond), f"{-beyond:,.0f} s metered and not billed")
        return
    boot = min(beyond, metered.boot_seconds)
    yield part("boot time", rate * _decimal(boot), f"{boot:,.0f} s from the instance's boot to the first agent")
    beyond -= boot
    # Where the events know no uptime, the ledger may have counted too little to see the minimum.
    short = billed.seconds <= MINIMUM_SECONDS
    least = min(beyond, max(0.0, MINIMUM_SECONDS - metered.seconds - boot)) if short else 0.0
    yield part("minimum charge", rate * _decimal(least), f"{least:,.0f} s to make up a minute")
    beyond -= least
    lost = min(beyond, metered.lost_ends * LOST_SECONDS)
    yield part("end not recorded", rate * _decimal(lost), f"{lost:,.0f} s after the last sign of life of a lost node")
    rest = beyond - lost
    yield part(UNEXPLAINED, rate * _decimal(rest), f"{rest:,.0f} s billed while no agent of the job was there")


def _price_cause(metered: Metered, billed: Billed) -> str:
    machine = metered.machine
    if billed.zones and machine.get("zone") and machine["zone"] not in billed.zones:
        return "other zone"
    if billed.instance_types and machine.get("instance_type") and machine["instance_type"] not in billed.instance_types:
        return "other type"
    if billed.markets and metered.market and metered.market not in billed.markets:
        return "other market"
    return "price"


def _findings(account: Account) -> Iterator[Finding]:
    for instance_id, orphan in sorted(account.orphans.items()):
        words = (
            f"carries the tag {account.job_tag}={account.job}, and no event of the job knows it: is it still running?"
        )
        yield Finding(kind="orphan instance", resource=instance_id, usd=orphan.usd, words=words)
    for instance_id, metered in sorted(account.metered.items()):
        billed = account.billed.get(instance_id)
        if billed is None or not billed.seconds:
            yield _not_billed(account, metered)
            continue
        contradictions = list(_contradictions(metered, billed))
        # Nobody was to pay the prices of a simulated run, so that none of them is wrong.
        yield from contradictions or (() if account.simulated else _wrong_price(metered, billed))
        yield from _twice(billed)
        if account.job not in billed.tags:
            found = f"the value {', '.join(sorted(billed.tags))}" if billed.tags else "no value"
            words = f"its tag {account.job_tag} has {found}: cost allocation by tag misses it"
            yield Finding(kind="missed tag", resource=instance_id, usd=billed.usd, words=words)


def _twice(billed: Billed) -> Iterator[Finding]:
    """Deliveries have ids of their own, so that one that corrects another is told by its times alone."""
    reasons = []
    if billed.told_differently:
        reasons.append(f"{billed.told_differently} of its hours are in two files that differ")
    if billed.too_long_seconds > 1.0:
        reasons.append(f"{billed.too_long_seconds:,.0f} s billed beyond the length of their hours")
    if reasons:
        words = f"{', '.join(reasons)}: two deliveries together? fix: give the newest one alone"
        yield Finding(kind="billed twice", resource=billed.instance_id, usd=billed.usd, words=words)


def _contradictions(metered: Metered, billed: Billed) -> Iterator[Finding]:
    machine = metered.machine
    for kind, known, said in (
        ("wrong zone", machine.get("zone"), billed.zones),
        ("wrong type", machine.get("instance_type"), billed.instance_types),
        ("wrong market", metered.market, billed.markets),
    ):
        if known and said and known not in said:
            words = f"billed in {', '.join(sorted(said))}, the events say {known}"
            yield Finding(kind=kind, resource=metered.instance_id, usd=billed.usd, words=words)


def _wrong_price(metered: Metered, billed: Billed) -> Iterator[Finding]:
    """Where no price on record makes the ledger's dollars those of the bill, for its other seconds."""
    beyond = _decimal(billed.seconds - metered.seconds) / 3600
    low, high = sorted(metered.usd + beyond * usd for usd in metered.usd_per_hour)
    apart = max(low - billed.usd, billed.usd - high)
    if apart > AGREED_SHARE * billed.usd:
        words = (
            f"${billed.usd:.4f} billed for {billed.seconds:,.0f} s; at the prices on record it would be ${low:.4f}"
            + (f" to ${high:.4f}" if high > low else "")
        )
        yield Finding(kind="wrong price", resource=metered.instance_id, usd=billed.usd, words=words)


def _not_billed(account: Account, metered: Metered) -> Finding:
    early = account.covers_until < metered.end
    why = (
        "the bill ends before it did: try a later report" if early else "not in this bill: another account's, or daily?"
    )
    return Finding(kind="not billed", resource=metered.instance_id, usd=metered.usd, words=why)


def _decimal(seconds: float) -> Decimal:
    return Decimal(str(round(seconds, 6)))

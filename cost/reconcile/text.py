"""A reconciliation as a block for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from decimal import Decimal

from cost.reconcile.explain import AGREED_SHARE, Reconciliation
from cost.report.figures import percent, plain, usd

_WIDTH = 100


def render(found: Reconciliation) -> str:
    """Forecast, metered, billed; the gap in parts; what is wrong; what could not be joined."""
    lines = list(_lines(found))
    return "\n".join(piece for line in lines for piece in _wrapped(line))


def _lines(found: Reconciliation) -> Iterator[str]:
    account = found.account
    bill = "synthetic bill" if account.synthetic else "bill"
    decimals = 2 if max(found.billed_usd, account.metered_usd) >= 10 else 4
    yield f"reconciliation of job {plain(account.job)} with the {bill}"
    yield f"  forecast  {usd(account.forecast_usd, decimals)}  (estimated by the plan)"
    simulated = ", SIMULATED: the job was priced as if, and no provider billed it" if account.simulated else ""
    yield f"  metered   {usd(account.metered_usd, decimals)}  (from the job's events{simulated})"
    unjoined = account.metered_usd - found.joined_usd
    if account.unknown:
        yield f"    of it {usd(unjoined, decimals)} on {len(account.unknown)} nodes whose instance is unknown"
    instances = len(account.billed)
    yield f"  billed    {usd(found.billed_usd, decimals)}  ({instances} of {len(account.metered)} instances found)"
    yield f"  gap       {usd(found.gap_usd, decimals)}  billed less metered on joined instances, of which"
    for cause, amount, count in _by_cause(found):
        yield f"    {cause:<18} {usd(amount, decimals):>12}  ({count} instance{'s' if count > 1 else ''})"
    share = found.unexplained_share
    if share is not None:
        within = "within" if Decimal(share) <= AGREED_SHARE else "more than"
        yield f"  unexplained: {percent(share, 2)} of the bill, {within} {percent(float(AGREED_SHARE), 0)}"
    for part in found.parts:
        yield f"  · {part.instance_id}: {part.cause} {usd(part.usd, decimals)}: {part.words}"
    for finding in found.findings:
        yield f"  ! {finding.kind}: {plain(finding.resource)} ({usd(finding.usd, decimals)}): {plain(finding.words)}"
    for instance_id, billed in sorted(account.billed.items()):
        if billed.elsewhere_usd:
            yield f"  · {instance_id}: {usd(billed.elsewhere_usd, decimals)} more at other times, not this job's"
    for instance_id in account.shared:
        yield f"  · {instance_id}: nodes of the job ran on it at once and divided its price"
    if account.twice:
        lines = f"{account.twice} lines were" if account.twice > 1 else "1 line was"
        yield f"  · {lines} given twice, as deliveries of one report repeat them, and counted once"
    for kind, amount in sorted(account.other_usd.items()):
        yield f"  · {kind}: {usd(amount, decimals)} in lines with the job's tag, which the ledger does not count"
    if account.unknown:
        yield (
            "  ! unknown instances cannot be joined with a bill; fix: let containers reach the metadata service "
            "(HttpPutResponseHopLimit 2), or set EBBFLOW_INSTANCE_ID, EBBFLOW_INSTANCE_TYPE and EBBFLOW_ZONE"
        )


def _by_cause(found: Reconciliation) -> list[tuple[str, Decimal, int]]:
    amounts: dict[str, list[Decimal]] = {}
    for part in found.parts:
        amounts.setdefault(part.cause, []).append(part.usd)
    return [(cause, sum(usd, Decimal(0)), len(usd)) for cause, usd in sorted(amounts.items())]


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False) or [""]

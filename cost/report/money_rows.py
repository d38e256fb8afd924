"""The money of a report as rows and texts: dollars by cause, regret, who pays."""

from __future__ import annotations

from decimal import Decimal

from ebbflow.cost.money import apportion
from ebbflow.cost.report.number_text import NONE, percent, plain, seconds, usd, usd_decimals
from ebbflow.cost.report.report import RunReport

_LONGEST = 48  # a generation's reason is foreign text
CAUSE_HEADER = ("what it was paid for", "rank-seconds", "share", "USD")


def cause_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """`CAUSE_HEADER` of each cause and of the total. What is displayed sums to the displayed totals."""
    causes = report.money.get("causes") or []
    if not causes:
        return []
    decimals = usd_decimals(report.total_usd)
    dollars = apportion([Decimal(str(line["usd"])) for line in causes], decimals)
    time = apportion([Decimal(str(line["rank_seconds"])) for line in causes], 2)
    total = float(report.total_usd)
    rows = [
        (
            _short(plain(line["cause"])),
            f"{shown_seconds:,}",
            percent(line["usd"] / total if total else None),
            usd(shown_usd, decimals),
        )
        for line, shown_seconds, shown_usd in zip(causes, time, dollars, strict=True)
    ]
    whole = percent(1.0 if total else None)
    return [*rows, ("total", seconds(report.paid_rank_seconds), whole, usd(report.total_usd, decimals))]


def regret_text(report: RunReport) -> str:
    """Such as "$0.0012 (34.0 %) over $0.0035 in hindsight, estimated"."""
    found = report.money.get("hindsight")
    if not found:
        return NONE
    decimals = usd_decimals(report.total_usd)
    share = percent(found.get("regret_share"))
    return f"{usd(found['regret_usd'], decimals)} ({share}) over {usd(found['usd'], decimals)} in hindsight, estimated"


def budget_text(report: RunReport) -> str:
    """Such as "62.0 % of $5.0000, told at 50 %"; n/a without a budget."""
    limit = (report.plan or {}).get("budget_usd")
    if not limit:
        return NONE
    told = [percent(share, 0) for share in report.money.get("thresholds") or []]
    return f"{percent(float(report.total_usd) / limit)} of {usd(limit)}" + (
        f", told at {', '.join(told)}" if told else ""
    )


def owner_text(report: RunReport) -> str:
    """Owner and project of the configuration; n/a where nobody set them."""
    owner, project = (plain(report.money.get(name) or NONE) for name in ("owner", "project"))
    return NONE if owner == project == NONE else f"{owner}, project {project}"


def price_lines(report: RunReport) -> list[str]:
    """How the price of each kind of machine is known, where they were not all of one."""
    found = report.money.get("prices") or []
    nodes, decimals = sum(line["nodes"] for line in found), usd_decimals(report.total_usd)
    if len(found) < 2:
        return []
    return [
        f"prices: {line['nodes']} of {nodes} nodes on {plain(line['pool'] or NONE)}, "
        f"{usd(line['usd'], decimals)}: {plain(line['kind'])}"
        for line in found
    ]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

"""What a plan takes for granted and leaves out, in lines for whoever reads it."""

from __future__ import annotations

from cost.plan.candidates import Sources
from cost.plan.queues import short_name
from cost.rates import RATES_KIND
from infra.config.schema import RunConfig


def plan_notes(config: RunConfig, sources: Sources) -> tuple[str, ...]:
    """Only what holds of this configuration."""
    regions, rates = config.cost.regions, sources.rates
    lines = [f"storage, requests and transfer: {RATES_KIND}; NAT, logs, taxes, credits and Savings Plans are left out"]
    lacking = [region for region in regions if region not in rates.regions]
    if lacking:
        lines.append(f"storage in {', '.join(lacking)}: no list price on record, so it counts as nothing there")
    if not config.store.startswith("s3://"):
        lines.append("transfer: the store is a folder, so nothing is counted for commits and tokens")
    elif config.cost.store_region is None:
        lines.append("transfer: cost.store_region is not set, so the store is taken to lie in each pool's own region")
    else:
        away = [region for region in regions if rates.egress_usd_per_gb(region, config.cost.store_region) is None]
        if away:
            lines.append(f"transfer with {', '.join(away)}: no price on record, so it counts as nothing")
    if sources.queues is not None:
        names = ", ".join(map(short_name, sources.queues))
        lines.append(f"only pools that one of these queues takes: {names}")
    if config.cluster.market != "on_demand":
        waits = "waits after a reclaim as recorded of V100, 2023; the first start is taken to be granted at once"
        lines.append(f"p50, p90 and P(deadline): simulated, staying in the pool; {waits}")
    return tuple(lines)

"""Represent the pools of a Kubernetes cluster (`kubernetes.pools`) as instance types with prices.

A plan then judges them like the types of Amazon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from ebbflow.core.config.schema import KubernetesPoolConfig, RunConfig
from ebbflow.cost.catalogue import Catalogue, InstanceType, load_catalogue
from ebbflow.cost.errors import CatalogueError
from ebbflow.cost.prices.quote import PriceSource, Quote, StaticPrices

_CPUS_PER_GPU = 4
_MEMORY_GIB_PER_GPU = 16.0
_SOURCE = "kubernetes.pools"


@dataclass(frozen=True, kw_only=True)
class StatedPoolPrices:
    """Price source for Kubernetes pools, with the prices that the configuration states.

    Each pool has a price in one market only.
    """

    pools: Sequence[KubernetesPoolConfig]
    region: str  # the first of cost.regions, whose storage and transfer prices apply
    now_utc: float  # Unix time of the plan

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        quote = self._quote(kind, region, preemptible=True)
        if quote is None:
            return ()
        return (quote,)

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        return self._quote(kind, region, preemptible=False)

    # The unused arguments below are those of `PriceSource`.
    def zones(self, region: str) -> Sequence[str]:  # noqa: ARG002
        return ()

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:  # noqa: ARG002
        return f"in {_SOURCE}: the pool is not preemptible"

    def describe(
        self,
        *,
        now_utc: float,  # noqa: ARG002
        regions: Sequence[str],  # noqa: ARG002
        max_age_hours: float,  # noqa: ARG002
    ) -> tuple[str, ...]:
        return (f"prices of {len(self.pools)} pools: stated in {_SOURCE}",)

    def _quote(self, kind: InstanceType, region: str, *, preemptible: bool) -> Quote | None:
        if region != self.region:
            return None
        for pool in self.pools:
            if pool.name == kind.name and pool.preemptible == preemptible:
                return Quote(
                    instance_type=pool.name,
                    region=region,
                    zone=None,
                    zone_name=None,
                    usd_per_hour=Decimal(repr(pool.usd_per_node_hour)),
                    at=None,
                    observed=self.now_utc,
                    kind="recorded",
                    source=f"stated in {_SOURCE}",
                    has_volume=False,
                )
        return None


def uses_pools(config: RunConfig) -> bool:
    """Return whether the plan chooses among `kubernetes.pools` and not among Amazon's types."""
    return config.cluster.plan_for == "kubernetes" and bool(config.kubernetes.pools)


def default_prices(config: RunConfig, now_utc: float) -> PriceSource:
    """Return the prices that need neither a file nor a request.

    They are those of `kubernetes.pools`, or else the static table.
    """
    if not uses_pools(config):
        return StaticPrices()
    return StatedPoolPrices(
        pools=config.kubernetes.pools, region=config.cost.regions[0], now_utc=now_utc
    )


def catalogue_of(config: RunConfig) -> Catalogue:
    """Return the instance types that a plan of this configuration may choose.

    Raises CatalogueError if a pool has an unknown GPU, or if two pools have the same name.
    """
    shipped = load_catalogue()
    if not uses_pools(config):
        return shipped
    pools = config.kubernetes.pools
    names = [pool.name for pool in pools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise CatalogueError(f"kubernetes.pools.{number}.name: there are two pools {name}")
    types = [_instance_type(number, pool, shipped) for number, pool in enumerate(pools)]
    return Catalogue(tuple(types), are_pools=True)


def find_pool(config: RunConfig, instance_type: str) -> KubernetesPoolConfig | None:
    """Return the Kubernetes pool with the name of an instance type; None for a type of Amazon's."""
    if not uses_pools(config):
        return None
    return next((pool for pool in config.kubernetes.pools if pool.name == instance_type), None)


def _instance_type(number: int, pool: KubernetesPoolConfig, shipped: Catalogue) -> InstanceType:
    model, _, count_text = pool.gpu.partition(":")
    key = f"kubernetes.pools.{number}.gpu: {pool.gpu}"
    if count_text and not (count_text.isdecimal() and int(count_text) > 0):
        raise CatalogueError(f"{key}: must be MODEL or MODEL:NUMBER, such as H100:8")
    count = int(count_text or 1)
    like = [kind for kind in shipped.types if kind.gpu.name.lower() == model.lower()]
    if not like:
        known = dict.fromkeys(kind.gpu.name for kind in shipped.types)
        raise CatalogueError(f"{key}: unknown GPU; known are {', '.join(known)}")
    smallest = min(like, key=lambda kind: (kind.gpu_memory_mib, abs(kind.gpu_count - count)))
    memory_mib = smallest.gpu_memory_mib
    if pool.gpu_memory_gib is not None:
        memory_mib = round(pool.gpu_memory_gib * 1024)
    return replace(
        smallest,
        name=pool.name,
        gpu_count=count,
        gpu_memory_mib=memory_mib,
        vcpu=pool.cpus or _CPUS_PER_GPU * count,
        ram_gib=pool.memory_gib or _MEMORY_GIB_PER_GPU * count,
        on_demand={},
        advice={},
    )

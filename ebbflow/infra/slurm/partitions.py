"""Configured Slurm partitions: their order of preference, and the GPUs and ranks per node."""

from __future__ import annotations

import re

from ebbflow.core.config.schema import PartitionConfig, RunConfig, SlurmConfig

_GPUS = re.compile(r"(?:gres/)?gpu(?::[\w.-]+?)?[:=](\d+)")


def is_priced(config: RunConfig) -> bool:
    """Return whether every partition that the job may use has a price."""
    partitions = config.slurm.partitions
    return bool(partitions) and all(
        partition.usd_per_node_hour is not None for partition in partitions
    )


def order_partitions(config: RunConfig) -> list[PartitionConfig]:
    """Return the partitions in order of preference: by price if all have one, or else as
    configured.
    """
    partitions = list(config.slurm.partitions)
    if is_priced(config):
        partitions.sort(key=lambda partition: partition.usd_per_node_hour or 0.0)
    return partitions


def gpus_per_node(slurm: SlurmConfig) -> int:
    """Return the number of GPUs per node that a job gets in every partition, at least 1.

    The partition with the fewest GPUs decides, because an attempt may be placed in any partition.
    """
    return min((_count_gpus(partition) for partition in slurm.partitions), default=1)


def explain_fewest_gpus(config: RunConfig) -> str:
    """Return a message about the automatic number of ranks per node if the partitions' numbers of
    GPUs differ, else "".
    """
    partitions = config.slurm.partitions
    counts = {partition.name: _count_gpus(partition) for partition in partitions}
    if config.cluster.processes_per_node != "auto" or len(set(counts.values())) < 2:
        return ""
    ranks = gpus_per_node(config.slurm)
    by_partition = ", ".join(f"{count} in {name}" for name, count in counts.items())
    return (
        f"cluster.processes_per_node is auto: {ranks} ranks on each node, the fewest GPUs of gres "
        f"({by_partition})"
    )


def _count_gpus(partition: PartitionConfig) -> int:
    """Return the number of GPUs that a partition's `gres` requests on each node, or 1 if it
    requests none.
    """
    return sum(int(count) for count in _GPUS.findall(partition.gres or "")) or 1

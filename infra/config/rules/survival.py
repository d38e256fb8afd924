"""Rules of going on with fewer nodes: no more than there are, and shards that fit any number of them."""

from __future__ import annotations

from infra.config.rules.arithmetic import division, nearest_divisors, set_to
from infra.config.rules.rule import Answer, Rule
from infra.config.schema import RunConfig


def _no_more_than_there_are(config: RunConfig) -> Answer:
    least, nodes = config.cluster.min_nodes, config.cluster.nodes
    if least is None or nodes == "auto" or least <= nodes:
        return None
    message = f"cluster.min_nodes {least} is more than cluster.nodes {nodes}: the job could not even start"
    return message, set_to(("cluster.min_nodes", [nodes]), ("cluster.nodes", [least]))


def _shards_stay_on_a_node(config: RunConfig) -> Answer:
    """A number of nodes that the configuration does not know must not be what a group of shards needs."""
    shard, processes = config.parallel.shard_size, config.cluster.processes_per_node
    if config.cluster.min_nodes is None or config.parallel.mode != "hsdp" or shard is None or processes == "auto":
        return None
    if config.cluster.min_nodes == config.cluster.nodes or processes % shard == 0:
        return None
    message = (
        "parallel.shard_size must divide cluster.processes_per_node where cluster.min_nodes lets nodes be lost: "
        f"{division(processes, shard)}"
    )
    return message, set_to(("parallel.shard_size", nearest_divisors(processes, shard)), ("cluster.min_nodes", ["null"]))


RULES = (
    Rule(("cluster.min_nodes", "cluster.nodes"), _no_more_than_there_are),
    Rule(
        ("parallel.shard_size", "parallel.mode", "cluster.processes_per_node", "cluster.min_nodes", "cluster.nodes"),
        _shards_stay_on_a_node,
    ),
)

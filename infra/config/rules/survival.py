"""Rules of how many nodes: bounds that hold together, and shards that fit any number that may be left."""

from __future__ import annotations

from ebbflow.infra.config.rules.arithmetic import division, nearest_divisors, set_to
from ebbflow.infra.config.rules.rule import Answer, Rule
from ebbflow.infra.config.schema import RunConfig


def _no_more_than_there_are(config: RunConfig) -> Answer:
    least, nodes = config.cluster.min_nodes, config.cluster.nodes
    if least is None or nodes == "auto" or least <= nodes:
        return None
    message = f"cluster.min_nodes {least} is more than cluster.nodes {nodes}: the job could not even start"
    return message, set_to(("cluster.min_nodes", [nodes]), ("cluster.nodes", [least]))


def _no_more_than_allowed(config: RunConfig) -> Answer:
    cluster = config.cluster
    if cluster.max_nodes is None:
        return None
    if cluster.nodes != "auto" and cluster.nodes > cluster.max_nodes:
        message = f"cluster.nodes {cluster.nodes} is more than cluster.max_nodes {cluster.max_nodes}"
        return message, set_to(("cluster.max_nodes", ["null"]), ("cluster.nodes", [cluster.max_nodes, "auto"]))
    if cluster.min_nodes is not None and cluster.min_nodes > cluster.max_nodes:
        message = f"cluster.min_nodes {cluster.min_nodes} is more than cluster.max_nodes {cluster.max_nodes}"
        return message, set_to(("cluster.min_nodes", [cluster.max_nodes]), ("cluster.max_nodes", [cluster.min_nodes]))
    return None


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
    Rule(("cluster.max_nodes", "cluster.nodes", "cluster.min_nodes"), _no_more_than_allowed),
    Rule(
        ("parallel.shard_size", "parallel.mode", "cluster.processes_per_node", "cluster.min_nodes", "cluster.nodes"),
        _shards_stay_on_a_node,
    ),
)

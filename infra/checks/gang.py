"""Checks of sums: what follows from batch, ranks and steps, also for a gang that has lost nodes."""

from __future__ import annotations

from math import lcm

from ebbflow.infra.config.rules.arithmetic import division, nearest_divisors, nearest_multiples
from ebbflow.infra.config.rules.derived import DERIVED
from ebbflow.infra.footprint import Gang, local_gang
from ebbflow.infra.preflight import Finding, PreflightContext

_NEAR = 4  # a batch beyond so many times the given one is no advice


def check_derived(context: PreflightContext) -> Finding:
    """Whatever a division leaves must be at least 1: a job that rounds to nothing would do nothing, and not say so."""
    config = context.config
    known = [one for one in DERIVED if one.applies(config)]
    wrong = [found for one in known if (found := one.check(config)) is not None]
    if wrong:
        hints = "\n".join(hint or "" for _, hint in wrong)
        return Finding.failed("\n".join(message for message, _ in wrong), hints)
    return Finding.passed(", ".join(f"{one.name} {one.value(config)}" for one in known))


def check_batch(context: PreflightContext) -> Finding:
    """Each rank gets the same number of samples in each micro-batch."""
    gang = local_gang(context.config)
    if gang is None:
        return Finding.skipped("cluster.nodes or cluster.processes_per_node is auto; the plan's check decides")
    training = context.config.training
    accumulation = training.gradient_accumulation_steps
    parts = gang.ranks * accumulation
    samples, rest = divmod(training.batch_size, parts)
    arithmetic = f"{training.batch_size} = {gang.ranks} ranks × {accumulation} accumulation × {samples}"
    if rest:
        return Finding.failed(f"{arithmetic} + {rest}", f"set training.batch_size to a multiple of {parts}")
    return Finding.passed(f"{arithmetic} samples per micro-batch")


def check_elastic(context: PreflightContext) -> Finding:
    """Whether the job could go on with fewer nodes: for each number of them, whether batch and shards still divide."""
    config, gang = context.config, local_gang(context.config)
    if gang is None:
        return Finding.skipped("the number of ranks is auto")
    if gang.nodes == 1:
        return Finding.skipped("a single node cannot lose another")
    batch, accumulation = config.training.batch_size, config.training.gradient_accumulation_steps
    shard = config.parallel.shard_size if config.parallel.mode == "hsdp" else None
    fits, fails = [], []
    for nodes in range(gang.nodes, 0, -1):
        smaller = Gang(nodes=nodes, processes_per_node=gang.processes_per_node)
        trouble = _trouble(batch, accumulation, shard, smaller)
        if trouble is None:
            fits.append(str(nodes))
        else:
            fails.append(f"{nodes} nodes, {smaller.ranks} ranks: {trouble}" if nodes > 1 else f"1 node: {trouble}")
    if not fails:
        return Finding.passed(f"{batch} samples divide on {', '.join(fits)} nodes")
    told = f"the job could go on with {', '.join(fits) or 'no number of'} nodes, and not with\n" + "\n".join(fails)
    return Finding.failed(told, _fix(batch, accumulation, gang, shard))


def _trouble(batch: int, accumulation: int, shard: int | None, gang: Gang) -> str | None:
    """What does not divide on a smaller gang, and which accumulation would; None when all does."""
    if shard is not None and gang.ranks % shard:
        return f"groups of parallel.shard_size do not divide the ranks: {division(gang.ranks, shard)}"
    if batch % (gang.ranks * accumulation) == 0:
        return None
    if batch % gang.ranks:
        return f"no accumulation does: {division(batch, gang.ranks)}"
    share = batch // gang.ranks
    would = " or ".join(map(str, nearest_divisors(share, accumulation)))
    return f"{share} samples per rank do not divide by {accumulation} accumulation; {would} would do"


def _fix(batch: int, accumulation: int, gang: Gang, shard: int | None) -> str:
    smallest = lcm(*(nodes * gang.processes_per_node * accumulation for nodes in range(1, gang.nodes + 1)))
    batches = [size for size in nearest_multiples(smallest, batch) if size <= _NEAR * batch]
    if batch % smallest == 0 or not batches:
        sized = "resume on one of the numbers of nodes that fit"
    else:
        sized = f"set training.batch_size to {' or '.join(map(str, batches))}, which all of them divide"
    if shard is not None and shard > gang.processes_per_node:
        sized += f", and parallel.shard_size to {gang.processes_per_node}, the ranks of a node"
    return f"{sized}, or leave it: a shrink is yours to ask for"

"""Preflight: can this gang spread the model as the configuration says? Imports no torch."""

from __future__ import annotations

import glob

from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.footprint import causal_lm_shape, local_gang, shard_ranks
from ebbflow.infra.preflight import Check, CheckFinding, PreflightContext
from ebbflow.training.parallel.refusals import Place, find_refusals

_GPU_DEVICES = "/dev/nvidia[0-9]*"


def check_parallel(context: PreflightContext) -> CheckFinding:
    """What ranks would refuse when they start, on this machine: sizes of shards, precision, DDP's options, compiler."""
    config, place = context.config, _place(context.config)
    found = find_refusals(config, place)
    if found:
        return CheckFinding.failed("; ".join(refusal.message for refusal in found), found[0].fix)
    return CheckFinding.passed("; ".join([_arrangement(config, place), *_remarks(config)]))


def _place(config: RunConfig) -> Place:
    gang = local_gang(config)
    # Where the plan is to choose the ranks, what depends on their number is left to it and to the ranks themselves.
    ranks, ranks_per_node = (gang.ranks, gang.processes_per_node) if gang else (config.parallel.shard_size or 2, 1)
    return Place(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        gpu=bool(glob.glob(_GPU_DEVICES)),
        parameters=causal_lm_shape(config.model).parameters if config.workload is None else None,
    )


def _arrangement(config: RunConfig, place: Place) -> str:
    mode = config.parallel.mode
    if local_gang(config) is None:
        return f"{mode}, on as many ranks as the plan says"
    shard = shard_ranks(config, place.ranks, place.ranks_per_node)
    ranks, copies = _count(place.ranks, "rank", "ranks"), _count(place.ranks // shard, "copy", "copies")
    return f"{mode}: {ranks} = {copies} of the model × {_count(shard, 'rank that holds', 'ranks that hold')} one"


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _remarks(config: RunConfig) -> list[str]:
    found = []
    if config.parallel.recompute != "none":
        found.append(f"recompute {config.parallel.recompute}")
    if config.parallel.compile:
        seconds = config.cluster.step_deadline_seconds
        found.append(f"units are compiled in the first step, within cluster.step_deadline_seconds {seconds:g}")
    if config.parallel.mode == "ddp" and config.ddp.gradient_compression == "powersgd":
        found.append("powersgd is lossy, and begins anew behind every commit, so that a resumed run does the same")
    if config.parallel.mode == "ddp" and config.ddp.static_graph:
        found.append("from three ranks on static_graph resumes to rounding, not bit for bit")
        accumulation = config.training.gradient_accumulation_steps
        if accumulation > 1:
            found.append(f"static_graph reduces gradients {accumulation} times per step, after each micro-batch")
    return found


CHECKS: list[Check] = [
    Check(
        id="parallel",
        title="the model can be spread over the ranks",
        severity="error",
        tier="quick",
        deadline_seconds=10.0,
        symptoms=("A06", "F06"),
        run=check_parallel,
    ),
]

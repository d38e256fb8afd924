"""A job made small enough to be run four times on this machine; nothing changes that decides how its numbers add up."""

from __future__ import annotations

import os
from pathlib import Path

from infra.config.schema import RunConfig

RECORDED = "training.certify.recorded:Recorded"
WORKLOAD_OPTION = "certified_workload"
FOLDER_OPTION = "certified_records"
DEFAULT_STEPS = 24
_SAVES = 6


def small_config(config: RunConfig, *, store: Path, steps: int) -> RunConfig:
    """The same model, data, batch, optimizer and mode; fewer steps, with a commit after each sixth of them.

    Ranks: as configured, as far as this machine has cores for them; two nodes where there are several, and never fewer
    after a loss, since other ranks add up otherwise. Figures that would reach others (metrics) are off.
    """
    nodes, processes = gang_size(config)
    sections = {
        "training": {"max_steps": steps, "evaluation_interval_steps": max(1, steps // 2)},
        "checkpoint": {
            "interval": "steps",
            "interval_steps": max(1, steps // _SAVES),
            "when_busy": "wait",
            "upload_mib_per_second": None,
        },
        "cluster": {"nodes": nodes, "processes_per_node": processes, "min_nodes": None},
        "metrics": {"port": None, "push_url": None},
    }
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update={**changed, "store": str(store)})


def recorded(config: RunConfig, folder: Path) -> RunConfig:
    """The same with the workload behind its witness, whose records go to `folder`."""
    options = {**config.workload_options, WORKLOAD_OPTION: config.workload or "", FOLDER_OPTION: str(folder)}
    return config.model_copy(update={"workload": RECORDED, "workload_options": options})


def gang_size(config: RunConfig) -> tuple[int, int]:
    """(nodes, ranks of each) for this machine."""
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    nodes = 2 if nodes == "auto" else min(nodes, 2)
    processes = 1 if processes == "auto" else processes
    cores = len(os.sched_getaffinity(0))
    return nodes, max(1, min(processes, cores // nodes))

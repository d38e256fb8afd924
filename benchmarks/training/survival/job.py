"""The job of `bench survival`: two nodes of one rank, a tiny model, a commit every half second."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.chaos.orders import Orders
from benchmarks.chaos.scene import Scene
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import workload_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.store.identity import adopt_store
from ebbflow.training.data import prepare_tokens
from ebbflow.training.launch.messages import GangSpec

WORKLOAD = "benchmarks.chaos.workload:Tormented"
STEPS_PER_INJECTION = 30  # what passes between two injections, with a commit among them
_SPARE_STEPS = 60
_COMMIT_STEPS = 10


def survival_config(
    folder: Path, *, injections: int, floor_seconds: float, step_seconds: float
) -> RunConfig:
    """Return its configuration. Steps take `step_seconds` at least and outlast all injections."""
    return RunConfig(
        store=str(folder / "store"),
        workload=WORKLOAD,
        workload_options={"orders": "", "step_seconds": step_seconds},
        model={"hidden_size": 32, "num_layers": 2, "num_heads": 2, "sequence_length": 32},
        training={
            "batch_size": 4,
            "max_steps": _SPARE_STEPS + STEPS_PER_INJECTION * injections,
            "evaluation_interval_steps": 50,
            "scheduler": {"type": "constant", "warmup_steps": 0},
        },
        data={"held_out_samples": 8},
        cluster={
            "nodes": 2,
            "processes_per_node": 1,
            "start_deadline_seconds": 60.0,
            "step_deadline_seconds": 60.0,
        },
        checkpoint={"interval_steps": _COMMIT_STEPS},
        survival={"hang_floor_seconds": floor_seconds},
    )


def survival_spec(config: RunConfig, folder: Path, job: str) -> GangSpec:
    """Return node 0's spec of the job named `job`, with orders of its own."""
    adopt_store(config.store, job, folder / "runs")  # its ranks write to no other one
    store = Store.open(config.store).sub(workload_prefix(WORKLOAD))
    tokens = prepare_tokens(config.data, store, project_root=PROJECT_ROOT)
    options = {**config.workload_options, "orders": str(folder / job / "orders")}
    return GangSpec(
        job=job,
        # Ports follow from it: two benches on one machine must not share them
        run=f"{job}-{os.getpid()}",
        attempt=0,
        node=0,
        nodes=2,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=config.model_copy(update={"workload_options": options}),
        store_uri=config.store,
        prepared=tokens.to_json(),
        log_folder=str(folder / job / "logs"),
    )


def make_scene(config: RunConfig, folder: Path, job: str) -> Scene:
    spec = survival_spec(config, folder, job)
    return Scene(spec, folder / job, Orders(folder / job / "orders"))

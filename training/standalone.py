"""`torchrun -m training CONFIG`: training without the pipeline. Rank 0 does what the flow and the agents would."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from infra.config.load import load_config
from infra.config.schema import RunConfig
from infra.layout import check_job_name, job_prefix
from infra.store import Store
from training.checkpoint import open_generation, reachable_commits
from training.data import prepare_tokens
from training.gang import Gang
from training.launch.spec import WorkerSpec

PROJECT_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    config: RunConfig
    job: str


def parse_arguments(arguments: list[str]) -> Request:
    """CONFIG [--set KEY=VALUE ...] [--job NAME]. Raises ConfigError with every problem of the configuration."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m training", description="Train without the pipeline: no plan, no retry, commits and events."
    )
    parser.add_argument("config", help="YAML file, such as configs/laptop.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, model.num_heads=8")
    parser.add_argument("--job", default="", help="a job's name; one that exists goes on from its last commit")
    given = parser.parse_args(arguments)
    loaded = load_config(given.config, given.set, project_root=PROJECT_ROOT)
    return Request(loaded.config, check_job_name(given.job) if given.job else "")


def share_spec(request: Request, gang: Gang) -> WorkerSpec:
    """Rank 0 prepares the tokens and opens the generation; the others hear of it. Collective."""
    texts = [_make_spec(request).to_json() if gang.rank == 0 else ""]
    if not gang.alone:
        dist.broadcast_object_list(texts, src=0, device=gang.device)
    spec = WorkerSpec.from_json(texts[0])
    return replace(spec, node=gang.rank // spec.colocated_ranks)


def _make_spec(request: Request) -> WorkerSpec:
    config = request.config
    job = request.job or time.strftime("torchrun-%Y%m%d-%H%M%S")
    store = Store.open(config.store)
    job_store = store.sub(job_prefix(job))
    tokens = prepare_tokens(config.data, store, project_root=PROJECT_ROOT)
    job_store.put("config.json", config.model_dump_json(indent=1).encode())
    generation = open_generation(job_store, run=job, attempt=0)
    print(f"job {job} in {config.store}, generation {generation.name}", flush=True)
    return WorkerSpec(
        job=job,
        run=job,
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        node=0,
        generation=generation.number,
        generation_id=generation.id,
        candidates=[commit.key for commit in reachable_commits(job_store)],
        config=config.model_dump(mode="json"),
        store_uri=store.uri,
        tokens=tokens.fingerprint,
        colocated_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )

"""`ebbflow.attach`: commits, notice handling, hang detection and a ledger for a user's own loop."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ebbflow.core.config.load import load_config
from ebbflow.core.errors import InfraError
from ebbflow.core.layout import job_of_script, job_prefix
from ebbflow.core.store import Store
from ebbflow.infra.slurm.environment import SlurmTask
from ebbflow.training.attach import loop as attached_loop
from ebbflow.training.attach.capture import VALUES, ScriptState, Stateful
from ebbflow.training.attach.folder import FolderJob
from ebbflow.training.attach.job import AttachedJob
from ebbflow.training.attach.loop import AttachedLoop, refuse
from ebbflow.training.attach.plain_state import PlainState, is_plain_state
from ebbflow.training.attach.standalone import (
    adopt_job_store,
    claim_for_ranks,
    observe_job,
    open_job,
    share_from_rank_0,
)
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.checkpoint.state import named_state
from ebbflow.training.compat import PrefixStore
from ebbflow.training.engine.guards.overrides import read_overrides, rewind_parent
from ebbflow.training.errors import AttachError, TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec

# Class of the model: integration
_SHARDING = {"DeepSpeedEngine": "deepspeed", "FullyShardedDataParallel": "fsdp1"}
Job = TypeVar("Job")


def attach(
    model: nn.Module | dict[str, nn.Module],
    optimizer: Optimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    store: str | None = None,
    name: str | None = None,
    config: str | Path | None = None,
    **states: object,
) -> AttachedJob:
    """Attach this process to a job, and restore the job's newest commit if there is one.

    Call it on every rank.

    The job is completed when its outermost loop (`batches` with `epochs`, `epochs` or `steps`) ends
    or, if the job is used as a context manager, when the `with` block ends. After a notice or
    SIGTERM, the job saves and the process exits with code 75.

    In a rank that `ebbflow run` started, `store`, `name` and `config` are those of the command; if
    they are given here, the job says that they are not used.

    Args:
        model: the model that the loop calls: plain, DDP, FSDP1 or FSDP2; or a dict of models with
            one optimizer.
        store: folder or s3://bucket/prefix; default: the configuration's store, else `runs`.
        name: name of the job; default: EBBFLOW_JOB, else the name of the script.
        config: configuration file; default: only the EBBFLOW__SECTION__KEY variables and the
            defaults.
        states: further objects to save and restore: those with state_dict and load_state_dict, and
            lists, dicts, sets, deques, tensors and arrays, which are restored in place.
    """
    if scheduler is not None:
        states["scheduler"] = scheduler

    def open_spec() -> WorkerSpec:
        return _open(store=store, name=name, config=config)

    job = attach_with(open_spec, model, optimizer, states)
    given = {"store": store, "name": name, "config": config}
    unused = [word for word, value in given.items() if value is not None and value != job.name]
    if unused and WorkerSpec.from_environment() is not None:
        job.say(
            f"attach({', '.join(f'{word}=…' for word in unused)}) is not used, since ebbflow run "
            f"started this rank for job {job.name}; fix: ebbflow run --job, --config or --set store="
        )
    return job


def attach_with(
    open_spec: Callable[[], WorkerSpec],
    model: nn.Module | dict[str, nn.Module],
    optimizer: Optimizer | None,
    states: dict[str, object],
) -> AttachedJob:
    """Attach this process to a job as `attach` does.

    `open_spec` opens a generation. Rank 0 calls it if the process has no agent.
    """
    try:
        if isinstance(model, dict):
            model = nn.ModuleDict(model)
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, Optimizer):
            optimizer = inner  # accelerate's wrapper runs no hooks
        adopted = _adopt_plain_states(states)
        _check_arguments(model, optimizer, adopted)

        def make(spec: WorkerSpec, gang: Gang) -> AttachedJob:
            state = _make_state(spec, gang, model, optimizer, adopted)
            return AttachedJob(AttachedLoop(spec, gang, state), state)

        return _open_with(open_spec, make)
    except (TrainingError, InfraError) as error:
        refuse(error, ends_job=False)


def attach_folder(
    into: Path | str,
    *,
    store: str | None = None,
    name: str | None = None,
    config: str | Path | None = None,
) -> FolderJob:
    """Attach this process to a job whose commits are folders, and restore the newest one into
    `into`.

    Call it on every rank. The other arguments are those of `ebbflow.attach`.
    """
    try:
        folder = Path(into)
        return open_attached(
            lambda spec, gang: FolderJob(spec, gang, folder), store=store, name=name, config=config
        )
    except (TrainingError, InfraError) as error:
        refuse(error, ends_job=False)


def open_attached(make: Callable[[WorkerSpec, Gang], Job], **wanted: str | Path | None) -> Job:
    """Create the job of this process.

    Without an agent, rank 0 first opens a generation. Collective.

    `make` creates the job from the specification of this rank. `wanted` has the store, name and
    config of `attach`.

    Raises:
        AttachError: this process already has a job, or there are several ranks without a process
            group.
    """
    return _open_with(lambda: _open(**wanted), make)


def _open_with(open_spec: Callable[[], WorkerSpec], make: Callable[[WorkerSpec, Gang], Job]) -> Job:
    current = attached_loop.current
    if current is not None:
        raise AttachError(
            f"attach: this process already runs job {current.name}; fix: call attach once, and "
            "pass other models and optimizers as keywords: attach(model, optimizer, "
            "critic=critic)"
        )
    gang = _join_gang()
    spec = WorkerSpec.from_environment() or share_from_rank_0(gang, open_spec, gang.group)
    if isinstance(spec, int):
        sys.exit(spec)
    if gang.store is not None:  # a later job of this process has keys of its own
        gang = replace(gang, store=PrefixStore(spec.generation_id, gang.store))
    return make(spec, gang)


def _make_state(
    spec: WorkerSpec,
    gang: Gang,
    model: nn.Module,
    optimizer: Optimizer | None,
    states: dict[str, Stateful],
) -> ScriptState:
    match _sharding_library(model):
        case "deepspeed":
            from ebbflow.integrations.deepspeed import make_state

            return make_state(spec, gang, model, optimizer, states)
        case "fsdp1":
            from ebbflow.integrations.fsdp1 import make_state

            return make_state(spec, gang, model, optimizer, states)
        case _:
            return ScriptState(gang, model, optimizer, states)


def _sharding_library(model: nn.Module) -> str:
    """Return the library that must save the model's state, such as "deepspeed".

    Return "" if Ebbflow can save it.
    """
    kinds = {type(module).__name__ for module in model.modules()}
    return next((library for kind, library in _SHARDING.items() if kind in kinds), "")


def _adopt_plain_states(states: dict[str, object]) -> dict[str, Any]:
    """Return the states by name, with containers, tensors and arrays wrapped to have a state_dict.

    Raises AttachError for a plain value, which cannot be restored in place.
    """
    adopted: dict[str, Any] = {}
    for name, state in states.items():
        if name == VALUES:
            raise AttachError(f"attach: the name {name} is taken; fix: another keyword")
        if isinstance(state, bool | int | float | str | bytes | tuple | None):
            raise AttachError(
                f"attach: {name} has type {type(state).__name__}, which cannot be restored in place; "
                f"fix: saved = job.state({name}=…), and saved.{name} in its place"
            )
        is_stateful = hasattr(state, "state_dict") and hasattr(state, "load_state_dict")
        if not is_stateful and is_plain_state(state):
            adopted[name] = PlainState(name, state)
        else:
            adopted[name] = state
    return adopted


def _check_arguments(
    model: nn.Module, optimizer: Optimizer | None, states: dict[str, Stateful]
) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise AttachError(
            "attach: a process that the script has started imports the script anew, as a loader's worker with spawn "
            'does; fix: put the script\'s code under if __name__ == "__main__":'
        )
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"attach: the model has type {type(model).__name__}; fix: pass the torch.nn.Module "
            "first"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise AttachError(
            f"attach: the optimizer has type {kind}; fix: pass the torch.optim.Optimizer second"
        )
    for name, state in states.items():
        if not (hasattr(state, "state_dict") and hasattr(state, "load_state_dict")):
            raise AttachError(
                f"attach: {name} has type {type(state).__name__}, without state_dict and "
                "load_state_dict; fix: give it both, or leave it out"
            )
    if _sharding_library(model):
        return
    try:
        named_state(model, optimizer)
    except TrainingError as error:
        raise AttachError(
            f"attach: {error}; fix: make the optimizer from model.parameters() of this model, "
            "and pass the optimizer of another model as a keyword"
        ) from error


def _join_gang() -> Gang:
    world_size = int(os.environ.get("WORLD_SIZE") or _count_slurm_tasks())
    if not (dist.is_available() and dist.is_initialized()):
        if world_size > 1:
            raise AttachError(
                f"attach: there are {world_size} ranks and no process group; fix: call "
                "torch.distributed.init_process_group() before attach"
            )
        return Gang()
    world_size = dist.get_world_size()
    if world_size == 1:
        return Gang()
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
    store = PrefixStore("ebbflow", dist.distributed_c10d._get_default_store())
    return Gang(rank=dist.get_rank(), world_size=world_size, group=group, store=store)


def _count_slurm_tasks() -> int:
    """Return the number of tasks of this process's Slurm step; 1 outside of `srun`.

    `import ebbflow` has set WORLD_SIZE, unless Slurm's variables could not be read.
    """
    task = SlurmTask.from_environment(os.environ)
    return 1 if task is None else task.world_size


def _open(
    store: str | Path | None, name: str | Path | None, config: str | Path | None
) -> WorkerSpec:
    """Open a new generation of the job, and return the specification of its ranks.

    Only rank 0 calls this.
    """
    loaded = load_config(config, [f"store={store}"] if store else [], project_root=Path.cwd())
    settings = loaded.script_settings()
    job = job_of_script(None if name is None else str(name), sys.argv[0] if sys.argv else "")
    use_signing_key(loaded.config.checkpoint.signing_key_env)
    uri = adopt_job_store(str(settings["store"]), job)
    claim_for_ranks(Store.open(uri).sub(job_prefix(job)), job, take_over=False)
    job_store = Store.open(uri).sub(job_prefix(job))
    script = os.path.abspath(sys.argv[0]) if sys.argv else "script"
    spec = open_job(
        uri,
        job,
        {
            "path": "" if config is None else str(config),
            "config": settings,
            "sources": loaded.sources,
        },
        {"fingerprint": "", "weight_unit": "samples"},
        parent=rewind_parent(job_store),
        script=script,
    )
    observe_job(spec, script=script)
    return replace(spec, overrides=read_overrides(job_store).to_json())

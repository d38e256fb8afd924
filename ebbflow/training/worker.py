"""The process of one rank, from its start to its result file.

The process is started by an agent of `ebbflow run`, or by `torchrun -m ebbflow.training`.
"""

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ebbflow.core.config.device_settings import settle_for_device
from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig, TrainingConfig
from ebbflow.core.errors import InfraError, Outcome, StoreError
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import NETWORK, NOTICE, PROMISE, describe_network
from ebbflow.core.layout import check_job_name, generation_name, job_prefix
from ebbflow.core.process import tie_forked_children
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.requirements import TESTED_TORCH
from ebbflow.core.store import Store
from ebbflow.infra.slurm.environment import adopt_slurm_environment
from ebbflow.training.attach import standalone
from ebbflow.training.attach.guards import CLOSE, EXACT
from ebbflow.training.checkpoint.rollback import add_permits, requested_permits
from ebbflow.training.checkpoint.signing import signer, use_signing_key
from ebbflow.training.engine.guards.overrides import read_overrides, rewind_parent
from ebbflow.training.engine.loop import train
from ebbflow.training.engine.trainer_setup import build_trainer, restore
from ebbflow.training.errors import TrainingError, UnsupportedTorch, WorkloadError
from ebbflow.training.gang import Gang, connect, disconnect, leave
from ebbflow.training.launch.heartbeat import WatchHooks
from ebbflow.training.launch.messages import OrderRecord, WorkerSpec
from ebbflow.training.limits import PREPARE_SECONDS, LoopResult
from ebbflow.training.session import open_reporter, open_saver
from ebbflow.training.torch_names import describe_release
from ebbflow.training.workload import WorkloadContext
from ebbflow.training.workload_loader import prepare_data, workload_context

_LOOK_SECONDS = 0.2

TryWorkload = Callable[[RunConfig, WorkloadContext], str]


@dataclass(frozen=True)
class Request:
    config: RunConfig  # the configuration
    job: str  # the name of the job; "" to derive one
    sources: dict[str, str]  # where each value of the configuration comes from, by key
    path: str  # the configuration file
    permits: tuple[str, ...] = ()  # losses that the user accepts (`checkpoint.rollback.PERMITS`)
    take_over: bool = False  # whether to end another launcher that runs the job
    # Checks a user's workload before the job starts, and returns the checks that it passed
    try_workload: TryWorkload | None = None


def parse_arguments(arguments: list[str]) -> Request:
    """Parse CONFIG [--set KEY=VALUE ...] [--job NAME] and the other options. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m training",
        description="Train without the pipeline: no plan, no retry, commits and events.",
        epilog="Also: ebbflow checkpoints (list, verify), examine (try a workload of your own: "
        "docs/workloads.md), bench, soak; each has a --help of its own.",
    )
    parser.add_argument("config", help="YAML file, such as configs/laptop.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override, model.num_heads=8",
    )
    parser.add_argument(
        "--job", default="", help="a job's name; one that exists goes on from its last commit"
    )
    add_permits(parser)
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="end the launcher that runs the job now, and go on from its last save",
    )
    given = parser.parse_args(arguments)
    loaded = load_config(given.config, given.set, project_root=PROJECT_ROOT)
    if given.job:
        job = check_job_name(given.job)
    else:
        job = ""
    permits = tuple(requested_permits(given))
    take_over = given.take_over
    return Request(
        loaded.config, job, loaded.sources, path=given.config, permits=permits, take_over=take_over
    )


def share_spec(request: Request, gang: Gang) -> WorkerSpec:
    """Return the `WorkerSpec` that rank 0 makes for a run without an agent. Collective.

    If rank 0 fails, it prints the error in one line, and every rank exits with the error's exit
    code.
    """
    # A separate group with a longer deadline, because preparing data may take longer than a step.
    if gang.alone:
        waiting: Any = None
    else:
        waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=PREPARE_SECONDS))
    try:
        spec = standalone.share_from_rank_0(gang, lambda: _make_spec(request), waiting)
    except (TrainingError, InfraError) as error:
        if _is_user_failure(error):
            raise
        print(error, file=sys.stderr)
        spec = error.outcome.exit_code
    if waiting is not None:
        dist.destroy_process_group(waiting)
    if isinstance(spec, int):
        return leave(spec)
    return spec


def main(arguments: list[str], try_workload: TryWorkload | None = None) -> NoReturn:
    """Train, then exit with code 0, with 75 after a drain request, or with the code of an error.

    Code 0 includes a stop at a limit, such as the budget. The task comes from the agent's
    environment variables if they are set, else from the command's arguments.
    """
    spec = WorkerSpec.from_environment()
    try:
        task = spec or _read_request(arguments)
    except InfraError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        leave(error.outcome.exit_code)
    tie_forked_children()
    if spec and spec.heartbeat_path:
        observed = WatchHooks(Path(spec.heartbeat_path), spec.agent_pid)
    else:
        observed = None
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # fails if stderr is closed
        faulthandler.enable(all_threads=True)
    try:
        if spec is not None and "script" in spec.prepared:
            from ebbflow.training.attach.script import run_script

            ending = run_script(spec)
        else:
            ending = _train(task, try_workload)
    except KeyboardInterrupt:  # end by the signal, as other programs do
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 128 + signal.SIGINT
    except BaseException as error:  # includes sys.exit and GeneratorExit of the user's code
        if observed:
            observed.save_records()
        expected = isinstance(error, InfraError) or (
            isinstance(error, TrainingError) and not error.curable
        )
        standalone.record_exception(
            error, one_line=spec is None and expected and not _is_user_failure(error)
        )
        code = _exit_code(error, alone=spec is None)
    else:
        if ending.outcome is Outcome.INTERRUPTED:
            code = ending.outcome.exit_code
        else:
            code = 0
    standalone.release_job()
    standalone.end_observer()
    leave(code)


def arrange_arithmetic(training: TrainingConfig, device: torch.device) -> None:
    """Apply the settings `training.tf32` and `training.deterministic`.

    On a GPU, the backward pass of fused attention is deterministic only if operations without a
    deterministic algorithm raise an error (mode "strict"). In mode "auto" such operations run, with
    a warning.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    if training.deterministic == "off":
        return
    torch.use_deterministic_algorithms(
        True, warn_only=training.deterministic == "auto" and device.type != "cpu"
    )
    # Deterministic mode would fill every new tensor, a debugging aid that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def describe_promise(mode: str, device: torch.device) -> dict[str, Any]:
    """Return how exactly the job resumes at the same world size, as data of the event `promise`."""
    reasons = []
    if mode == "off":
        reasons.append("training.deterministic is off")
    elif device.type != "cpu":
        reasons.append(
            "never run on CUDA by us; certify decides"
            if mode == "strict"
            else (
                "operations without a deterministic algorithm, such as attention's backward, run "
                "on the GPU; fix: training.deterministic strict"
            )
        )
    if not reasons or mode == "strict":
        level = EXACT
    else:
        level = CLOSE
    return {
        "level": level,
        "same_data": "the order of samples, a function of the seed",
        "reasons": reasons,
    }


def flush_before_end(log: EventLog, record: OrderRecord) -> None:
    """Wait until the agent is about to kill this rank, then flush the events.

    Call this in a thread of its own.
    """
    while not record.ending:
        time.sleep(_LOOK_SECONDS)
    with contextlib.suppress(StoreError):
        log.flush()


def accept_release(version: str) -> str:
    """Return a note if this release of torch is newer than the tested one, else "".

    Raises UnsupportedTorch if it lacks a name that training needs.
    """
    try:
        return describe_release(version, TESTED_TORCH)
    except ImportError as error:
        raise UnsupportedTorch(str(error)) from error


def run_rank(spec: WorkerSpec, gang: Gang) -> LoopResult:
    """Train, write the result file, and return the result.

    Events are flushed even if training fails.
    """
    nodes = gang.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    spec = replace(spec, config=settle_for_device(spec.config, gang.capability))
    with open_reporter(spec, gang) as (reporter, log):
        if spec.control_path:
            record = OrderRecord(Path(spec.control_path))
            threading.Thread(
                target=flush_before_end, args=(log, record), name="last events", daemon=True
            ).start()
        if gang.device_note and gang.rank == 0:
            reporter.emit(NOTICE, message=gang.device_note)
        mode = spec.config.training.deterministic
        if gang.rank == 0 and (mode != "auto" or gang.device.type != "cpu"):
            reporter.emit(PROMISE, **describe_promise(mode, gang.device))
        if gang.network and gang.rank == 0:
            print(f"network of {nodes} nodes: {describe_network(gang.network)}", flush=True)
            reporter.emit(NETWORK, **gang.network)
        saver = open_saver(spec, gang, reporter, starts_uploader=False)
        trainer = build_trainer(spec, gang, reporter=reporter, saver=saver)
        ending = train(replace(trainer, start=restore(trainer, spec.candidates)))
        saver.close()
    if spec.result_path:
        standalone.write_result(Path(spec.result_path), ending)
    return ending


def _read_request(arguments: list[str]) -> Request:
    """Read the task of a rank that torchrun, Slurm or a user started. Raises InfraError."""
    adopt_slurm_environment(os.environ)
    return parse_arguments(arguments)


def _is_user_failure(error: BaseException) -> bool:
    """Return whether the error is a WorkloadError that an exception in the user's code caused."""
    cause = error.__cause__
    return isinstance(error, WorkloadError) and not isinstance(
        cause, (TrainingError, InfraError, type(None))
    )


def _make_spec(request: Request) -> WorkerSpec:
    config = request.config
    job = request.job or standalone.default_job_name(
        os.environ, config.cluster.start_deadline_seconds
    )
    store = Store.open(standalone.adopt_job_store(config.store, job, permits=request.permits))
    job_store = store.sub(job_prefix(job))
    standalone.claim_for_ranks(job_store, job, take_over=request.take_over)
    context = workload_context(config, Gang(), store=store)
    prepared = prepare_data(config, context)
    # Try it on the CPU first: a mistake in it should not cost the time of a gang
    if config.workload is not None and request.try_workload is not None:
        print(request.try_workload(config, replace(context, prepared=prepared)), flush=True)
    settings = {
        "path": request.path,
        "config": config.model_dump(mode="json"),
        "sources": request.sources,
    }
    parent = rewind_parent(job_store)
    spec = standalone.open_job(
        store.uri, job, settings, prepared, permits=request.permits, parent=parent
    )
    standalone.observe_job(spec)
    return replace(spec, overrides=read_overrides(job_store).to_json())


def _exit_code(error: BaseException, *, alone: bool) -> int:
    """Return the exit code for an error.

    Without an agent (`alone`), an exception of the user's code counts as FAILED.
    """
    if alone and _is_user_failure(error):
        return Outcome.FAILED.exit_code
    outcome = getattr(error, "outcome", Outcome.FAILED)
    return (outcome if isinstance(outcome, Outcome) else Outcome.FAILED).exit_code


def _train(task: WorkerSpec | Request, try_workload: TryWorkload | None) -> LoopResult:
    if isinstance(task, WorkerSpec):
        spec = task
    else:
        spec = None
    if isinstance(task, Request):
        config = task.config
    else:
        config = RunConfig.model_validate(task.config)
    use_signing_key(config.checkpoint.signing_key_env)
    signer()  # raises at once if this node lacks the key
    note = accept_release(torch.__version__)
    # This rank's share of the cores. The number of threads decides the order in which sums are
    # computed.
    if spec:
        colocated = spec.colocated_ranks
    else:
        colocated = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // colocated))
    torch.set_num_interop_threads(1)
    if config.training.deterministic != "off":  # cuBLAS reads it when its first handle is made
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Identifies the restart, because torchrun's key-value store keeps the keys of dead workers.
    restart = (
        os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    gang = connect(
        start_seconds=config.cluster.start_deadline_seconds,
        collective_seconds=config.cluster.step_deadline_seconds,
        generation=generation_name(spec.generation, spec.generation_id)
        if spec
        else "-".join(restart),
        device_choice=config.cluster.device,
        promised_gpus=spec.promised_gpus if spec else 0,
        kept=Path(spec.kept_path) if spec and spec.kept_path else None,
        keys_path=Path(spec.keys_path) if spec and spec.keys_path else None,
    )
    arrange_arithmetic(config.training, gang.device)
    for text in filter(None, (note, gang.device_note)):
        if gang.rank == 0:
            print(text, flush=True)
    if isinstance(task, Request):
        task = share_spec(replace(task, try_workload=try_workload), gang)
    ending = run_rank(task, gang)
    disconnect()
    return ending

"""One rank as a process: from its first moment to its exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.infra.event_log import EventLog
from ebbflow.infra.events import NOTICE, Origin
from ebbflow.infra.layout import generation_name, job_prefix
from ebbflow.infra.process import tie_forked_children
from ebbflow.infra.store import Store
from ebbflow.training.assembly import build_trainer, make_reporter, open_saver, restore
from ebbflow.training.checkpoint.signing import signer, use_signing_key
from ebbflow.training.clock import Clock
from ebbflow.training.engine import train
from ebbflow.training.errors import TrainingError, WorkloadError, describe_exception, describe_traceback
from ebbflow.training.gang import Gang, connect, disconnect, leave
from ebbflow.training.launch.heartbeat import Observed
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.metrics import live_metrics
from ebbflow.training.position import Ending
from ebbflow.training.standalone import Request, parse_arguments, release_job, share_spec


def main(arguments: list[str]) -> NoReturn:
    """Train as the environment's spec says, or (under torchrun, or alone) as the arguments say. Does not return.

    Exit code 0 for every outcome that was agreed, 75 when asked to leave, else that of the exception's outcome.
    """
    spec = WorkerSpec.from_environment()
    request = None if spec else _request(arguments)
    tie_forked_children()
    observed = Observed(Path(spec.heartbeat_path), spec.agent_pid) if spec and spec.heartbeat_path else None
    with contextlib.suppress(RuntimeError, ValueError, OSError):  # without an output there is no place for stacks
        faulthandler.enable(all_threads=True)
    try:
        ending = _train(spec, request)
    except KeyboardInterrupt:  # ends like any program that SIGINT ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # sys.exit and GeneratorExit of the user's code too: each leaves its cause
        if observed:
            observed.keep_records()
        _record_exception(error)
        code = _exit_code(error, alone=spec is None)
    else:
        code = ending.outcome.exit_code if ending.outcome is Outcome.INTERRUPTED else 0
    release_job()
    leave(code)


def _request(arguments: list[str]) -> Request:
    """A bad configuration is said once, by rank 0, and without a traceback."""
    try:
        return parse_arguments(arguments)
    except InfraError as error:
        if os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        leave(error.outcome.exit_code)


def _record_exception(error: BaseException) -> None:
    """Print it, and leave it where the agent, ours or torchrun's, looks for it, in the format of torch's @record.

    @record itself is of no use here: it fails with a `__str__` that fails, keeps texts of any size, sees neither
    sys.exit nor GeneratorExit, and prints nothing.
    """
    text = describe_traceback(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        kind = type(error)
        known = {
            "py_callstack": text,
            "timestamp": str(int(time.time())),
            "class": f"{kind.__module__}.{kind.__qualname__}",
        }
        record = {"message": {"message": describe_exception(error), "extraInfo": known}}
        with contextlib.suppress(OSError):  # a full disk; the exit code and the log remain
            _write_whole(Path(path), json.dumps(record))
    with contextlib.suppress(OSError, ValueError):  # the program may have closed its own output
        print(text, end="", file=sys.stderr, flush=True)  # stderr escapes what its encoding lacks


def _exit_code(error: BaseException, *, alone: bool) -> int:
    """alone: without an agent, where an exception of the user's code, found by the first trial, is a failure as any."""
    cause = error.__cause__
    if alone and isinstance(error, WorkloadError) and not isinstance(cause, (TrainingError, InfraError, type(None))):
        return Outcome.FAILED.exit_code
    outcome = getattr(error, "outcome", Outcome.FAILED)
    return (outcome if isinstance(outcome, Outcome) else Outcome.FAILED).exit_code


def _train(spec: WorkerSpec | None, request: Request | None) -> Ending:
    config = RunConfig.model_validate(spec.config) if spec else request.config
    use_signing_key(config.checkpoint.signing_key_env)
    signer()  # a key that is missing on this node ends the start before anything is computed
    _settle_threads(spec.colocated_ranks if spec else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    gang = connect(
        start_seconds=config.cluster.start_deadline_seconds,
        collective_seconds=config.cluster.step_deadline_seconds,
        generation=generation_name(spec.generation, spec.generation_id) if spec else _torchrun_generation(),
        device_choice=config.cluster.device,
        promised_gpus=spec.promised_gpus if spec else 0,
    )
    if gang.device.type == "cpu":
        _compute_alike()
    if gang.device_note and gang.rank == 0:
        print(gang.device_note, flush=True)
    ending = run_rank(spec or share_spec(request, gang), gang)
    disconnect()
    return ending


def run_rank(spec: WorkerSpec, gang: Gang) -> Ending:
    """Train, write the result file, and leave events behind however it ends."""
    origin = Origin(
        job=spec.job,
        run=spec.run,
        attempt=spec.attempt,
        generation=spec.generation,
        node=spec.node,
        rank=gang.rank,
    )
    nodes = gang.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    job_store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    with (
        EventLog(job_store, origin) as log,
        live_metrics(spec, rank=gang.rank, world_size=gang.world_size, emit=log.emit) as emit,
    ):
        clock = Clock(emit)
        reporter = make_reporter(spec, clock, emit)
        try:
            reporter.enter("init", 0)
            if gang.device_note and gang.rank == 0:
                emit(NOTICE, message=gang.device_note)
            saver = open_saver(spec, gang, emit, lambda: reporter.enter_for_a_while("store"))
            trainer = build_trainer(spec, gang, nodes=nodes, reporter=reporter, saver=saver)
            ending = train(replace(trainer, start=restore(trainer, saver, spec.candidates)))
            saver.close()
        finally:
            reporter.close()
            clock.emit_phases()
    if spec.result_path:
        _write_result(Path(spec.result_path), ending)
    return ending


def _settle_threads(colocated_ranks: int) -> None:
    """Give each rank its share of the cores: the count of threads decides the order of sums."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // colocated_ranks))
    torch.set_num_interop_threads(1)


def _compute_alike() -> None:
    """Make equal runs on the CPU equal bit for bit."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs every allocation


def _torchrun_generation() -> str:
    """Restarted workers find the keys of the dead ones in the store that outlived them; these keep them apart."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _write_result(path: Path, ending: Ending) -> None:
    result = {
        "outcome": str(ending.outcome),
        "step": ending.step,
        "weights_sha256": ending.weights_sha256,
        "message": ending.message,
    }
    _write_whole(path, json.dumps(result))


def _write_whole(path: Path, text: str) -> None:
    """Whole or not at all: an agent may look at any time."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)

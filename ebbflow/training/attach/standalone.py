"""Start of a job whose ranks torchrun or the user starts, without an agent.

Rank 0 claims the job and opens a generation for all ranks.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ebbflow.core.config.load import values_with_sources
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, StoreError
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import CONFIGURED, PREPARED, ROLLBACK, Origin, read_events
from ebbflow.core.launchers import Claim, claim_job
from ebbflow.core.layout import (
    KnownJob,
    job_prefix,
    plain_name,
    remember_job,
    runs_folder,
    write_atomically,
)
from ebbflow.core.observer_process import (
    ObserverProcess,
    describe_start,
    start_observer,
    start_script_observer,
)
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.store.identity import adopt_store
from ebbflow.core.store.marker import expect_marker, expected_marker_id
from ebbflow.core.terms import describe_unwatched_limits
from ebbflow.training.checkpoint import lineage
from ebbflow.training.checkpoint.lineage import (
    CANDIDATES,
    GenerationOpening,
    open_generation,
    reachable_commits,
)
from ebbflow.training.checkpoint.rollback import (
    check_rollback,
    newest_generation_in_events,
    record_permits,
)
from ebbflow.training.compat import TCPStore
from ebbflow.training.errors import (
    RendezvousError,
    TrainingError,
    describe_exception,
    describe_traceback,
    redact_secrets,
)
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import LoopResult

_NAME_KEY = "ebbflow/job"

_claim: Claim | None = None  # rank 0's claim on the job
_observer: ObserverProcess | None = None  # rank 0's


def release_job() -> None:
    """Release this process's claim on the job, if it has one.

    Otherwise another launcher would have to wait until the claim is stale.
    """
    if _claim is not None and _claim.launcher.pid == os.getpid():  # not in a fork
        _claim.release()


def end_observer() -> None:
    """Wait until the report of this process's job is written and its last lines are printed.

    Do nothing if this process opened no job.

    Call it once the claim is released, as late as possible.
    """
    global _observer
    if _observer is not None:
        observer = _observer
        _observer = None
        observer.end()


def claim_for_ranks(job_store: Store, job: str, *, take_over: bool) -> None:
    """Claim the job. If another launcher takes it over later, this process drains as after SIGTERM.

    After a restart by torchrun, `take_over` is ignored, so that the job is not taken back from a
    launcher that took it over in the meantime.
    """
    global _claim

    def leave_to_successor() -> None:
        loss = "job taken over by another launcher"
        if _claim is not None:
            loss = _claim.describe_loss()
        print(f"{loss}: saving and leaving", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        _claim = claim_job(
            job_store,
            job,
            "torchrun",
            take_over=take_over and restarts() == 0,
            on_fenced=leave_to_successor,
        )
    except StoreError as error:
        print(f"job {job} is not protected from a second launcher: {error}", file=sys.stderr)


def adopt_job_store(uri: str, job: str, *, permits: Sequence[str] = ()) -> str:
    """Make this process accept no other store than the present one at `uri`, and return its
    address.

    Raises JobNotInStore or StoreError.
    """
    adopt_store(uri, job, runs_folder(PROJECT_ROOT), from_scratch=lineage.FROM_SCRATCH in permits)
    return Store.open(uri).uri


def restarts() -> int:
    """Return how often torchrun has restarted the workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def open_job(
    store_uri: str,
    job: str,
    settings: dict[str, Any],
    prepared: dict[str, Any],
    *,
    permits: Sequence[str] = (),
    parent: str | None = None,
    script: str = "",
) -> WorkerSpec:
    """Open a generation of the job, and return the spec of its ranks.

    Rank 0 calls this, after it has claimed the job.

    Args:
        settings: the configuration, with the keys "path", "config" and "sources".
        prepared: the result of the workload's `prepare`.
        permits: the losses of progress that the user accepts (values of `PERMITS` in
            `checkpoint.rollback`).
        parent: the commit to go back to; None for the newest commit.
        script: path of the script that attaches its model, for reports; "" for a workload.
    """
    job_store = Store.open(store_uri).sub(job_prefix(job))
    attempt = restarts()
    job_store.put("config.json", json.dumps(settings, indent=1, sort_keys=True).encode())
    # A restart by torchrun repeats the arguments, but the user has not accepted later losses
    if attempt == 0:
        record_permits(job_store, *permits)
    known = read_events(job_store)
    rolled_back = check_rollback(job_store, known)
    opening = GenerationOpening(number=newest_generation_in_events(known))
    generation = open_generation(
        job_store, run=job, attempt=attempt, parent=parent, opening=opening
    )
    origin = Origin(
        job=job, run=job, attempt=attempt, generation=generation.number, process="prepare"
    )
    with EventLog(job_store, origin) as events:
        shown = settings["config"] | ({"script": script} if script else {})
        sources = settings["sources"] | ({"script": "argument"} if script else {})
        events.emit(CONFIGURED, settings=values_with_sources(shown, sources))
        events.emit(PREPARED, **prepared)
        if rolled_back is not None:
            events.emit(ROLLBACK, step=rolled_back.known.step, **rolled_back.to_json())
    return WorkerSpec(
        job=job,
        run=job,
        attempt=attempt,
        node=0,
        generation=generation.number,
        generation_id=generation.id,
        candidates=[commit.key for commit in reachable_commits(job_store, limit=CANDIDATES)],
        config=RunConfig.model_validate(settings["config"]),
        store_uri=store_uri,
        store_marker=expected_marker_id(store_uri),
        prepared=prepared,
        colocated_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def observe_job(spec: WorkerSpec, *, script: str = "", writes_report: bool = True) -> None:
    """Print the job's first line, and start the process that shows it.

    Rank 0 calls this, after it has opened the job.

    Args:
        script: path of the script that attaches its model; "" for a workload.
        writes_report: whether that process writes the report at the end, since no caller does.
    """
    global _observer
    end_observer()  # of an earlier job of this process
    if script:
        work = f"script {Path(script).name}"
        command = f"ebbflow run {script} --nodes 1"
    else:
        work = f"workload {spec.config.workload or 'language'}"
        command = "ebbflow run --config FILE"
    known = KnownJob(spec.job, spec.store_uri, spec.store_marker)
    values = spec.config.model_dump(mode="json")
    try:
        folder = remember_job(runs_folder(PROJECT_ROOT), known)
    except OSError as error:
        print(f"job {spec.job}: no live page and no report: {error}", file=sys.stderr)
        start_observer(spec.job, spec.store_uri, values)
        return
    print(describe_start(spec.job, work, spec.store_uri, folder), flush=True)
    unwatched = describe_unwatched_limits(spec.config, command)
    if unwatched and spec.terms is None:
        print(unwatched, flush=True)
    _observer = start_script_observer(
        spec.job, spec.store_uri, values, folder, writes_report=writes_report
    )


def share_from_rank_0(gang: Gang, make: Callable[[], WorkerSpec], group: Any) -> WorkerSpec | int:
    """Call `make` on rank 0, and return the spec of each rank.

    If `make` fails, rank 0 raises the error. Collective.

    The other ranks then get the exit code of the error, with which they must exit.
    """
    shared: list[Any] = [None]
    error = None
    if gang.rank == 0:
        try:
            shared = [make()]
        except (TrainingError, InfraError) as failure:
            error = failure
            shared = [failure.outcome.exit_code]
    if not gang.alone:
        dist.broadcast_object_list(shared, src=0, group=group)
    if error is not None:
        raise error
    spec = shared[0]
    if isinstance(spec, int):
        return spec
    expect_marker(spec.store_uri, spec.store_marker)
    return replace(spec, node=gang.rank // spec.colocated_ranks)


def default_job_name(environment: Mapping[str, str], seconds: float) -> str:
    """Return a job name that stays the same when torchrun restarts the workers.

    So a restart continues the job.

    The name contains torchrun's run id if there is one (--rdzv-id, --standalone). Otherwise it
    contains the time of the first start, which is kept in the key-value store of torchrun's agent.

    Args:
        environment: torchrun's environment variables.
        seconds: the deadline for the key-value store to answer.

    Raises:
        RendezvousError: if the key-value store does not answer.
    """
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return f"torchrun-{plain_name(run_id)}"
    name = time.strftime("torchrun-%Y%m%d-%H%M%S")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return name  # these workers are not restarted
    host = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])
    try:
        # This key has no prefix of a generation, because all generations share it.
        agent = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
        return agent.compare_set(_NAME_KEY, "", name).decode()
    except (dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"rank 0: torchrun's agent did not answer at {host}:{port} within {seconds:g} s, so "
            f"the job's name is not known ({' '.join(str(error).split())[:200]}); fix: give it "
            "one with --job"
        ) from error


def write_result(path: Path, ending: LoopResult) -> None:
    """Write the result file of a rank, which the agent reads."""
    write_atomically(path, json.dumps(asdict(ending)).encode())


def record_exception(
    error: BaseException, *, one_line: bool = False, at: float | None = None
) -> None:
    """Print the error, and write it to the error file for the agent, in the format of torch's
    `@record`.

    `at` is the Unix time of its cause, if that is earlier: of several failures, the first is the
    culprit. Secrets are redacted in the file, as in a bundle, and not in the rank's own output.

    `@record` itself is not used: it fails if `__str__` raises, does not limit the length of the
    text, does not catch sys.exit, and prints nothing.
    """
    text = describe_traceback(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # What follows from this process's first error is not its cause
    if path and not os.path.exists(path):
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        callstack = redact_secrets(text)
        message = redact_secrets(describe_exception(error))
        known = {"py_callstack": callstack, "timestamp": str(int(at or time.time())), "class": name}
        record = {"message": {"message": message, "extraInfo": known}}
        with contextlib.suppress(OSError):  # such as a full disk; the exit code and the log remain
            write_atomically(Path(path), json.dumps(record).encode())
    with contextlib.suppress(OSError, ValueError):  # the user's code may have closed stderr
        if one_line:
            shown = f"{error}\n"
        else:
            shown = text
        # Stderr escapes characters that its encoding lacks
        print(shown, end="", file=sys.stderr, flush=True)

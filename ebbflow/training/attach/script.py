"""Implement `ebbflow run SCRIPT.py [options] [-- ARGUMENTS]`: run a script's ranks on this machine.

A node's agent starts the ranks with torchrun's environment, watches them, and restarts them after a
failure, without Metaflow. A script that calls `ebbflow.attach` continues from its last commit; any
other script starts from the beginning.
"""

import argparse
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ebbflow.core.config.load import LoadedConfig, load_config, values_with_sources
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import CONFIGURED, OUTCOME, PREPARED, Origin, read_events
from ebbflow.core.launchers import claim_job
from ebbflow.core.layout import KnownJob, job_of_script, job_prefix, remember_job, runs_folder
from ebbflow.core.observer_process import (
    describe_start,
    shows_live_page,
    start_script_observer,
)
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.store.identity import adopt_store
from ebbflow.core.terms import describe_unwatched_limits
from ebbflow.integrations import switch_on
from ebbflow.training.attach.script_folder import find_script
from ebbflow.training.attach.unattached import (
    bill_unattached,
    describe_unattached,
    never_attaches,
)
from ebbflow.training.checkpoint.lineage import FROM_SCRATCH
from ebbflow.training.checkpoint.rollback import (
    add_permits,
    newest_generation_in_events,
    record_permits,
    requested_permits,
)
from ebbflow.training.engine.profiler import profile_script
from ebbflow.training.errors import TrainingError, WorkloadError
from ebbflow.training.launch.agent import run_gang
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.messages import GangOutcome, GangSpec, WorkerSpec
from ebbflow.training.launch.transport import control_ports
from ebbflow.training.launch.workers import THREADS_VARIABLE, threads_per_rank
from ebbflow.training.limits import LoopResult
from ebbflow.training.rehearse import Fault

_DEFAULT = "default"  # source of a key that the user did not set
_LOOK_SECONDS = 1.0
_LEAST_CPU_SECONDS = 0.005  # within a look, by which a rank shows that it is not frozen


def flow_options(words: list[str]) -> list[str] | None:
    """Convert the arguments of `run SCRIPT.py` to options of the flow.

    Return None if they have neither --nodes nor --with.

    The flow adds preflight, plan, attempts on other machines and the report; without the flow, a
    node's agent suffices.
    """
    own, arguments = _split_words(words)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("script")
    parser.add_argument("--nodes", default=None)
    parser.add_argument("--ranks", default=None)
    parser.add_argument("--with", action="append", default=[], dest="backends")
    known, rest = parser.parse_known_args(own)
    if known.nodes is None and not known.backends:
        return None
    given = {
        "script": json.dumps(os.path.abspath(known.script)),
        "script_args": json.dumps(arguments),
    }
    given["cluster.nodes"] = known.nodes or "1"
    if known.ranks is not None:
        given["cluster.processes_per_node"] = known.ranks
    options: list[str] = []
    for backend in known.backends:
        options += ["--with", backend]
    options.append("run")
    if "--job" not in rest:
        options += ["--job", job_of_script(None, known.script)]
    for key, value in given.items():
        options += ["--set", f"{key}={value}"]
    return options + rest


def main(words: list[str]) -> int:
    """Run a script's ranks until they have ended, and return the exit code of the job's outcome."""
    own, arguments = _split_words(words)
    given = _make_parser().parse_args(own)
    script = Path(given.script)
    if not script.is_file():
        raise WorkloadError(f"{script}: no such script; fix: give the path of a Python file")
    loaded = load_config(given.config, given.set, project_root=Path.cwd())
    ranks = _choose_ranks(loaded, given.script, given.ranks)
    if given.rehearse:
        Fault.parse(given.rehearse).check(max_steps=sys.maxsize, nodes=1, world_size=ranks)
    config = loaded.script_settings()
    job = job_of_script(given.job, str(script))
    known = _find_store(job, str(config["store"]), requested_permits(given))
    job_store = Store.open(known.store).sub(job_prefix(job))
    folder = remember_job(runs_folder(PROJECT_ROOT), known)
    # The name of a run must be new, because the agents' secret is stored under it.
    run = f"{job}-{time.time_ns():x}"
    settings = {"path": given.config or "", "config": config}
    claim = claim_job(job_store, job, "run", on_fenced=lambda: os.kill(os.getpid(), signal.SIGTERM))
    plural = "" if ranks == 1 else "s"
    what = f"script {script.name} on {ranks} rank{plural}"
    print(describe_start(job, what, known.store, folder), flush=True)
    unwatched = describe_unwatched_limits(loaded.config, f"ebbflow run {given.script} --nodes 1")
    if unwatched:
        print(unwatched, flush=True)
    observer = start_script_observer(job, known.store, config, folder)
    try:
        record_permits(job_store, *requested_permits(given))
        job_store.put(
            "config.json", json.dumps(settings | {"sources": loaded.sources}, indent=1).encode()
        )
        prepared = {
            "fingerprint": "",
            "weight_unit": "samples",
            "script": str(script.resolve()),
            "words": arguments,
        }
        number = newest_generation_in_events(read_events(job_store)) + 1
        with EventLog(
            job_store, Origin(job=job, run=run, attempt=0, generation=number, process="prepare")
        ) as events:
            shown = config | {"script": str(script.resolve()), "script_args": arguments}
            sources = loaded.sources | {"script": "argument", "script_args": "argument"}
            events.emit(CONFIGURED, settings=values_with_sources(shown, sources))
            events.emit(PREPARED, **prepared)
        spec = GangSpec(
            job=job,
            run=run,
            attempt=0,
            node=0,
            nodes=1,
            processes_per_node=ranks,
            main_address="127.0.0.1",
            config=RunConfig.model_validate(config),
            store_uri=known.store,
            prepared=prepared,
            log_folder=str(folder / "logs"),
            candidate_ports=control_ports(run, 0),
            rehearse=given.rehearse,
        )
        if never_attaches(script):
            print(
                f"ebbflow: {script.name} does not call ebbflow.attach: watched and billed, nothing is saved",
                flush=True,
            )
        if THREADS_VARIABLE not in os.environ:
            print(
                f"{THREADS_VARIABLE}={threads_per_rank(ranks)} for each rank: "
                f"{len(os.sched_getaffinity(0))} cores / {ranks} ranks; set it to keep your own",
                flush=True,
            )
        with _recording_failed_start(job_store, spec, number):
            ending = run_gang(spec)
        print(f"ebbflow: job {job}: {ending.outcome}{_describe_end(ending)}", flush=True)
        if not shows_live_page():  # otherwise the observer writes the report
            print(f"report: ebbflow report {job}", flush=True)
        return Outcome(ending.outcome).exit_code
    finally:
        claim.release()
        if observer is not None:
            observer.end()


def run_script(spec: WorkerSpec) -> LoopResult:
    """Run the script in this rank.

    Return its attached job's result, or COMPLETED at step 0 if it never attached.
    """
    # With torch, which the launcher does not import
    from ebbflow.training.attach import loop as attached_loop
    from ebbflow.training.attach.standalone import write_result

    script = find_script(
        spec.prepared["script"], spec.prepared.get("script_sha256"), Store.open(spec.store_uri)
    )
    result = Path(spec.result_path or os.devnull)
    # On another machine, relative paths begin at the unpacked folder
    if spec.prepared.get("script_sha256"):
        os.chdir(script.parent)
    if spec.heartbeat_path:
        heartbeat = Heartbeat(Path(spec.heartbeat_path))
        threading.Thread(
            target=_beat_while_working,
            args=(heartbeat, lambda: attached_loop.current is not None),
            name="heartbeat",
            daemon=True,
        ).start()
    switch_on()
    sys.argv = [str(script), *spec.prepared["words"]]
    sys.path[0] = str(script.parent)
    with bill_unattached(spec, script.name, lambda: attached_loop.was_opened):
        _run_user_code(script, spec, result)
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(result.read_text())
        return LoopResult(
            Outcome(known["outcome"]), known["step"], known["message"], known["weights_sha256"]
        )
    message = ""
    if not attached_loop.was_opened:
        message = describe_unattached(script.name)
    ending = LoopResult(Outcome.COMPLETED, 0, message)
    write_result(result, ending)
    return ending


def explain_missing_file(error: FileNotFoundError, script: Path) -> str:
    """Return the folder in which a relative path was not found, with the fix if the script's folder
    has it; "" for other paths, and for programs, which are found by PATH.
    """
    name = error.filename
    frames = traceback.extract_tb(error.__traceback__)
    is_program = bool(frames) and frames[-1].filename == subprocess.__file__
    if not isinstance(name, str) or os.path.isabs(name):
        return ""
    if is_program or error.filename2 is not None:  # of two paths either may be missing
        return ""
    folder = Path.cwd()
    place = f"relative to the working directory {folder}"
    if folder != script.parent.resolve() and (script.parent / name).exists():
        return f"{place}; fix: read Path(__file__).parent / {name!r}, which exists"
    return place


@contextlib.contextmanager
def _recording_failed_start(job_store: Store, spec: GangSpec, generation: int) -> Iterator[None]:
    """Record the outcome of a run that fails before its agent can record it.

    Otherwise the report would show the outcome of the run before. If the store accepts no event,
    only the error's own message remains.
    """
    try:
        yield
    except (InfraError, TrainingError) as error:
        with contextlib.suppress(InfraError):
            events = read_events(job_store)
            if not any(event.name == OUTCOME and event.run == spec.run for event in events):
                origin = Origin(
                    job=spec.job, run=spec.run, generation=generation, process="launcher"
                )
                with EventLog(job_store, origin) as log:
                    log.emit(OUTCOME, outcome=error.outcome.value, message=str(error))
        raise


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebbflow run",
        description="Run a script's ranks on this machine.",
        epilog=(
            "--nodes N or --with local|batch|kubernetes|slurm sends it through the flow: preflight, "
            "plan, report. --profile FIRST:LAST profiles these steps, --memory-snapshot STEP records "
            "the GPU's memory of one."
        ),
    )
    parser.add_argument("script", help="the script; its arguments follow after --")
    parser.add_argument(
        "--ranks",
        type=int,
        default=None,
        help="number of processes per node; default: cluster.processes_per_node, else 1",
    )
    parser.add_argument(
        "--job", default=None, help="name of the job; default: EBBFLOW_JOB, else the script's name"
    )
    parser.add_argument("--config", default=None, help="configuration file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override of a setting"
    )
    parser.add_argument(
        "--rehearse",
        default=None,
        metavar="FAULT",
        help="inject a fault, such as rank-kill@step:100",
    )
    add_permits(parser)
    return parser


@contextlib.contextmanager
def _ending_forks() -> Iterator[None]:
    """End each forked process where the script ends, with the exit code that Python would give it.

    Only the process that the agent started has a result.
    """
    rank = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != rank:
            _end_fork(error)
        raise
    if os.getpid() != rank:
        _end_fork(None)


def _end_fork(error: BaseException | None) -> NoReturn:
    code = 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            code = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            code = 1
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the fork
            stream.flush()
    os._exit(code & 0xFF)


def _run_user_code(script: Path, spec: WorkerSpec, result: Path) -> None:
    """Run the script, and complete its job if it left its loop with `break`.

    An exit with a code other than 0 is raised as an error, unless the job has written its result.
    """
    from ebbflow.training.attach import loop as attached_loop

    try:
        try:
            with (
                profile_script(spec, lambda: attached_loop.was_opened),
                _ending_forks(),
            ):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0) and not result.is_file():
                raise
        if attached_loop.current is not None:
            attached_loop.current.close_at_exit()
    except SystemExit as end:
        if isinstance(end.__cause__, TrainingError | InfraError):  # `refuse` has printed it
            raise end.__cause__ from None
        error = RuntimeError(f"{script.name} exited with {end.code}")
        raise error.with_traceback(end.__traceback__) from None  # it names the line with sys.exit
    except FileNotFoundError as error:
        with contextlib.suppress(FileNotFoundError):  # the working directory has been removed
            note = explain_missing_file(error, script)
            if note:
                error.add_note(note)
        raise


def _find_store(job: str, address: str, permits: Sequence[str]) -> KnownJob:
    """Return the job and its store, which is the only one that this process accepts from now on.

    Raises JobNotInStore or StoreError.
    """
    uri = Store.open(address, create=False).uri
    marker = adopt_store(uri, job, runs_folder(PROJECT_ROOT), from_scratch=FROM_SCRATCH in permits)
    return KnownJob(job, uri, marker)


def _choose_ranks(loaded: LoadedConfig, script: str, wanted: int | None) -> int:
    """Return the number of ranks: `wanted` (--ranks), else that of the configuration, else 1.

    Raises WorkloadError if the configuration asks for more than this command starts.
    """
    cluster = loaded.config.cluster
    nodes_source = loaded.sources["cluster.nodes"]
    if nodes_source != _DEFAULT and cluster.nodes != 1:
        raise WorkloadError(
            f"{nodes_source}: cluster.nodes is {cluster.nodes}, and `ebbflow run {script}` starts 1 "
            f"node, this machine; fix: ebbflow run {script} --nodes {cluster.nodes}, or "
            "cluster.nodes=1"
        )
    ranks_source = loaded.sources["cluster.processes_per_node"]
    configured = cluster.processes_per_node
    if ranks_source == _DEFAULT:
        return wanted or 1
    if isinstance(configured, str):
        raise WorkloadError(
            f"{ranks_source}: cluster.processes_per_node is {configured}, and a script's batch "
            "depends on its ranks; fix: give a number"
        )
    if wanted not in (None, configured):
        raise WorkloadError(
            f"{ranks_source}: cluster.processes_per_node is {configured}, and --ranks is {wanted}; "
            "fix: give one of them"
        )
    return configured


def _describe_end(ending: GangOutcome) -> str:
    """Return a text such as " at step N: message", for the end of a sentence.

    The step is left out if no step was counted, and the message if the outcome has none.
    """
    step = ""
    if ending.step:
        step = f" at step {ending.step}"
    if ending.message:
        return f"{step}: {ending.message}"
    return step


def _split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line at "--" into the command's own words and the script's arguments."""
    if "--" not in words:
        return words, []
    end = words.index("--")
    return words[:end], words[end + 1 :]


def _beat_while_working(heartbeat: Heartbeat, is_attached: Callable[[], bool]) -> None:
    """Send heartbeats while this process uses CPU time, until an attached job sends its own."""
    used = 0.0
    while True:
        time.sleep(_LOOK_SECONDS)
        now = time.process_time() - time.thread_time()
        if now - used >= _LEAST_CPU_SECONDS and not is_attached():
            heartbeat.beat(0, "evaluation")
        used = now

"""The work of the flow's steps before and after training, such as preflight, plan and report.

The functions combine the packages `training`, `cost` and `infra`. `flows/gang.py` does the work of
the training steps.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from metaflow import current
from metaflow.exception import MetaflowException

from ebbflow.core.config.load import values_with_sources
from ebbflow.core.errors import EbbflowError, InfraError, Outcome
from ebbflow.core.events import (
    CERTIFICATE,
    CONFIGURED,
    OUTCOME,
    PLAN,
    PREFLIGHT,
    PREPARED,
)
from ebbflow.core.footprint import ModelShape
from ebbflow.core.layout import PLAN_KEY
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.flows.checks import run_all_checks
from ebbflow.flows.decorators import training_backend
from ebbflow.flows.job import (
    RUNS,
    ClockReading,
    Job,
    TrainArtifacts,
    read_job_history,
    read_job_progress,
)
from ebbflow.flows.remote import in_container

if TYPE_CHECKING:
    from pandas import DataFrame

    from ebbflow.core.config.schema import RunConfig
    from ebbflow.cost.report.report import RunReport
    from ebbflow.infra.batch import QueueState
    from ebbflow.tryout.certify import Certificate

T = TypeVar("T")


class StepFailed(MetaflowException):
    """Failure of a step for a known reason. Metaflow prints the message without a traceback."""

    headline = "This attempt ended"

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message if outcome is Outcome.FAILED else f"{outcome.value}: {message}")
        self.outcome = outcome


def current_job(flow: TrainArtifacts) -> Job:
    return Job.of(flow, str(current.run_id))


def is_local(flow: TrainArtifacts) -> bool:
    """Return whether the ranks run on this machine, where nothing is paid for, so that prices are
    simulated.
    """
    return training_backend(flow) is None


def with_queue_region(flow: TrainArtifacts, config: RunConfig) -> RunConfig:
    """On AWS Batch, return the configuration with `cost.regions` limited to the queues' regions.

    For other backends, return the configuration unchanged.
    """
    from ebbflow.infra.batch import limit_to_queue_region

    if training_backend(flow) == "batch":
        there = limit_to_queue_region(config)
    else:
        there = config
    if there.cost.regions != config.cost.regions:
        named = ", ".join(config.cost.regions)
        found = ", ".join(there.cost.regions)
        print(
            f"using prices of {found}, the region of the queues; cost.regions has {named}",
            flush=True,
        )
    return there


def available_queues(flow: TrainArtifacts, config: RunConfig) -> dict[str, QueueState] | None:
    """Return the AWS Batch queues for training by name, or None if none is known or the job does
    not run on Batch.

    If Batch does not answer, which may happen in a container, return the configured queues.
    """
    from ebbflow.infra.batch import queues_to_plan

    if training_backend(flow) == "batch":
        return queues_to_plan(config.batch, ask=True, notify=say)
    return None


def record_failure(step: Callable[[TrainArtifacts], T]) -> Callable[[TrainArtifacts], T]:
    """Decorate a step's function so that an error is recorded as the job's outcome and ends the run
    with one message.

    Do not use this decorator for the training steps, where a new attempt may succeed.
    """

    @functools.wraps(step)
    def tell(flow: TrainArtifacts) -> T:
        try:
            return step(flow)
        except EbbflowError as error:
            record_outcome(flow, error.outcome, str(error))
            raise StepFailed(error.outcome, str(error)) from error
        except StepFailed:
            raise  # its outcome is recorded
        except Exception as error:  # a bug, which a retry would hit again
            record_outcome(flow, Outcome.FAILED, f"{type(error).__name__}: {error}")
            raise

    return tell


def record_outcome(flow: TrainArtifacts, outcome: Outcome, message: str) -> None:
    """Record the job's outcome in its event log.

    If the store cannot be opened, print a message instead.
    """
    try:
        with current_job(flow).events(str(current.step_name)) as events:
            events.emit(OUTCOME, outcome=outcome.value, message=message)
    except InfraError as error:
        say(f"the outcome was not recorded: {error}")


@record_failure
def begin_job(flow: TrainArtifacts) -> None:
    """Create the job's folder on this machine.

    Nothing is written to the store before preflight has passed.
    """
    job = current_job(flow)
    job.remember()
    what = job.config.script or f"{job.config.training.max_steps} steps"
    say(f"job {job.name}: {what}, store {job.store.uri}")


@record_failure
def run_preflight(flow: TrainArtifacts) -> list[dict]:
    """Run all preflight checks and return their results as JSON.

    Raises StepFailed if a check forbids the run.
    """
    from ebbflow.core.preflight import failed_results, render_results
    from ebbflow.tryout.examine import WORKLOAD_CHECK

    job = current_job(flow)
    target = training_backend(flow) or "local"
    results = run_all_checks(job.config, flow.settings["path"], job=job.name, target=target)
    say(render_results(results))
    records = [result.to_json() for result in results]
    failed = failed_results(results)
    # A workload that cannot be trained has the same outcome here, in the plan and in a rank.
    if {result.id for result in failed} == {WORKLOAD_CHECK}:
        outcome = Outcome.CONFIG
    else:
        outcome = Outcome.PREFLIGHT
    with job.events("preflight") as events:
        events.emit(
            CONFIGURED,
            settings=values_with_sources(flow.settings["config"], flow.settings["sources"]),
        )
        events.emit(PREFLIGHT, results=records, sent_away=in_container())
        if failed:
            events.emit(OUTCOME, outcome=outcome.value, message=f"{len(failed)} checks failed")
    if failed:
        raise StepFailed(outcome, ", ".join(result.id for result in failed))
    job.store.put("config.json", json.dumps(flow.settings, indent=1, sort_keys=True).encode())
    return records


@record_failure
def plan_capacity(flow: TrainArtifacts) -> dict:
    """Plan the job, and return the plan with its best pools as JSON.

    The plan with all pools is written to plan.json in the job's store. Raises StepFailed if budget,
    deadline or capacity do not allow the job.
    """
    from ebbflow.cost.plan.plan import make_plan
    from ebbflow.cost.plan.plan_text import render_plan
    from ebbflow.cost.prices.reservations import open_evidence
    from ebbflow.cost.prices.source import open_prices
    from ebbflow.flows.slurm.placement import plan_on_slurm

    job = current_job(flow)
    if is_local(flow):
        now = time.time()
    else:
        now = ClockReading.of(job.store).utc
    config = with_queue_region(flow, job.config)
    shape = None if flow.examined is None else ModelShape.from_json(flow.examined["shape"])
    if training_backend(flow) == "slurm":
        plan = plan_on_slurm(job, shape)
    else:
        plan = make_plan(
            config,
            now_utc=now,
            simulated=is_local(flow) or config.cluster.plan_for == "local",
            shape=shape,
            prices=open_prices(config, now, project_root=PROJECT_ROOT),
            history=read_job_history(job),
            progress=read_job_progress(job),
            queues=available_queues(flow, config),
            evidence=open_evidence(config),
            compare_keys=True,
        )
    plan = plan.with_sources(flow.settings["sources"])
    say(render_plan(plan))
    job.store.put(PLAN_KEY, json.dumps(plan.to_json(), allow_nan=False).encode())
    plan = plan.brief()
    with job.events("plan") as events:
        events.emit(PLAN, **plan.to_json())
        if plan.refusal:
            events.emit(OUTCOME, outcome=plan.refusal.outcome.value, message=plan.refusal.message)
    if plan.refusal:
        raise StepFailed(plan.refusal.outcome, f"{plan.refusal.message} ({plan.refusal.hint})")
    return plan.to_json()


@record_failure
def examine_workload(flow: TrainArtifacts) -> dict | None:
    """Prepare the data of the user's own workload, and try the workload on one sample.

    Returns the model's shape and a description of the prepared data as JSON, or None for the
    default workload.
    """
    from ebbflow.tryout.examine import examine

    job = current_job(flow)
    if job.config.user_code is None:
        return None
    found = examine(job.config, prepare=True, script_sha256=flow.settings.get("script_sha256"))
    say(found.text)
    assert found.shape is not None
    return {"shape": found.shape.to_json(), "prepared": found.prepared}


@record_failure
def prepare_data(flow: TrainArtifacts) -> dict:
    """Prepare the training data in the store, and return the data's fingerprint and statistics as
    JSON.

    Jobs with equal data in one store share the prepared data. For a user's own workload,
    `examine_workload` has already prepared the data, and this function only returns its
    description.
    """
    from ebbflow.training.data import prepare_tokens

    job = current_job(flow)
    if flow.examined is not None:
        prepared = flow.examined["prepared"]
        if job.config.script is None:
            say(f"data {prepared['fingerprint'][:16]}: counted in {prepared['weight_unit']}")
    else:
        tokens = prepare_tokens(job.config.data, job.root_store, project_root=PROJECT_ROOT)
        prepared = tokens.to_json()
        say(
            f"{tokens.files:,} files, {tokens.train_tokens:,} tokens to train on and "
            f"{tokens.held_out_tokens:,} held out, {tokens.tokens_per_byte:.3f} per byte, unigram entropy "
            f"{tokens.unigram_entropy_nats:.4f} nats"
        )
    with job.events("prepare") as events:
        events.emit(PREPARED, **prepared)
    _check_restore(job, prepared)
    return prepared


def write_report(flow: TrainArtifacts) -> tuple[RunReport, tuple[DataFrame, DataFrame, DataFrame]]:
    """Write the job's report to the store and to runs/<job>/ on this machine.

    Returns the report, and loss curve, ledger and throughput as pandas DataFrames for notebooks.
    """
    from ebbflow.cost.report.report import ledger_frame, loss_frame, throughput_frame
    from ebbflow.flows.reporting import write_report as write

    try:
        report, events = write(current_job(flow))
    except EbbflowError as error:  # the job keeps its outcome
        raise StepFailed(error.outcome, str(error)) from error
    return report, (loss_frame(report), ledger_frame(report), throughput_frame(events))


def require_completion(flow: TrainArtifacts) -> None:
    """Fail the run if the job is not complete, so that a successful run always means a complete
    job.
    """
    outcome = Outcome(flow.run_report["outcome"])  # a dictionary in runs of older releases
    if outcome is not Outcome.COMPLETED:
        if in_container():
            runs = "runs"  # of the launcher, which fetches the report
        else:
            runs = RUNS
        raise StepFailed(outcome, f"the job is not complete; report: {runs}/{flow.job}/report.html")


def say(text: str) -> None:
    print(text, flush=True)


@record_failure
def certify(flow: TrainArtifacts) -> Certificate | None:
    """Certify that the job resumes exactly, if the user asked for it.

    Return the certificate as JSON, else None.

    Raises TrainingError if the job would not resume exactly.
    """
    from ebbflow.training.errors import AttachError, TrainingError
    from ebbflow.tryout.certify import certify_in_child

    if not flow.certify:
        return None
    job = current_job(flow)
    if job.config.script is not None:
        raise AttachError(
            "--certify runs workloads; fix: leave it out, and run ebbflow doctor on the script"
        )
    found = certify_in_child(job.config)
    with job.events("certify") as events:
        events.emit(CERTIFICATE, **found)
    if not found["holds"]:
        raise TrainingError(
            "the job would not resume exactly, as its certificate says; fix: make it repeatable"
        )
    return found


def _check_restore(job: Job, prepared: dict) -> None:
    """Check that the next start can restore the job, before its machines are paid for.

    Raises TrainingError or StoreError.
    """
    from ebbflow.training.start_check import check_start

    config = job.config
    expected: dict[str, object] = {}
    if config.script is None:
        expected = {"seed": config.training.seed, "data_fingerprint": prepared["fingerprint"]}
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    ranks = None
    if nodes != "auto" and processes != "auto" and config.cluster.min_nodes is None:
        ranks = nodes * processes
    found = check_start(
        job.store,
        expected=expected,
        ranks=ranks,
        signing_key_env=config.checkpoint.signing_key_env,
    )
    if found is not None:
        say(f"the start will restore step {found.step}")

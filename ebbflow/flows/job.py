"""A job as the flow's steps see it: configuration, store and local folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import Event, Origin, read_events
from ebbflow.core.layout import KnownJob, job_prefix, make_local_folder, remember_job, runs_folder
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.store.marker import expect_marker, expected_marker_id
from ebbflow.core.store.objects import StoreClock
from ebbflow.core.store.s3 import STORE_REGION_VARIABLE
from ebbflow.infra.batch import has_foreign_queues

if TYPE_CHECKING:
    from metaflow.decorators import StepDecorator

    from ebbflow.cost.job_history import JobHistory
    from ebbflow.cost.plan.candidates import JobProgress
    from ebbflow.cost.report.report import RunReport

RUNS = runs_folder(PROJECT_ROOT)
CLOCK_TOLERANCE_SECONDS = 60.0


class FlowSettings(TypedDict):
    """Value of the flow's parameter `config`: one checked configuration (`flows/options.py`)."""

    path: str  # of the configuration file; "" without one
    config: dict  # `RunConfig` as JSON
    sources: dict[str, str]  # of each value: default, file:line, environment or --set
    script_sha256: NotRequired[str | None]
    store_marker: NotRequired[str]  # see ebbflow.core.store.marker


class JobArtifacts(Protocol):
    """Metaflow artifacts that identify the flow's job."""

    job: str
    settings: FlowSettings


class TrainArtifacts(JobArtifacts, Protocol):
    """Artifacts and parameters of `TrainFlow` that its steps read."""

    capacity: dict  # the run's plan as JSON
    examined: dict | None  # shape and data of the user's own workload
    prepared: dict  # fingerprint and statistics of the data
    rounds: int  # of `train_node`
    num_nodes: int
    rehearse: str
    certify: bool
    run_report: RunReport

    @property
    def train(self) -> FlowStep: ...

    @property
    def train_node(self) -> FlowStep: ...


class FlowStep(Protocol):
    """A step of the flow with its decorators."""

    decorators: list[StepDecorator]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job in one Metaflow run: its name, configuration, store and local folder."""

    name: str  # the same in all runs of the job
    run: str  # id of this Metaflow run
    config: RunConfig
    request_seconds: float = 60.0  # deadline of each request to the store

    @classmethod
    def of(cls, flow: JobArtifacts, run: str) -> Job:
        """Build the job from a flow's artifacts. `run` is the id of the Metaflow run.

        If the configured queues are in several regions, put the store's region into the environment
        of this process. From here on, this process accepts only the store that the launcher found:
        a resumed run may have found another one than the run whose settings it keeps.
        """
        config = RunConfig.model_validate_json(json.dumps(flow.settings["config"]))
        if has_foreign_queues(config.batch) and config.cost.store_region:
            os.environ[STORE_REGION_VARIABLE] = config.cost.store_region
        if not expected_marker_id(config.store):  # on another machine than the launcher's
            expect_marker(config.store, flow.settings.get("store_marker", ""))
        return cls(name=flow.job, run=run, config=config)

    @cached_property
    def root_store(self) -> Store:
        """The store that holds all jobs.

        It is opened once, so that credentials and connections are reused.
        """
        return Store.open(self.config.store, request_timeout_seconds=self.request_seconds)

    @property
    def store(self) -> Store:
        return self.root_store.sub(job_prefix(self.name))

    @property
    def folder(self) -> Path:
        return make_local_folder(RUNS, self.name, self.config.store)

    def remember(self) -> None:
        """Make the job known to commands on this machine. See `ebbflow.core.layout.remember_job`."""
        marker = expected_marker_id(self.config.store)
        remember_job(RUNS, KnownJob(self.name, self.config.store, marker))

    def events(self, process: str) -> EventLog:
        """Open the job's event log for one step of the flow.

        The caller must close it before the step ends.
        """
        return EventLog(self.store, Origin(job=self.name, run=self.run, process=process))


@dataclass(frozen=True)
class ClockReading:
    """The current time according to the store's clock and to this machine's clock.

    Both clocks are read, so that a jump of this machine's clock does not move a job's deadline.
    """

    # The store's time if the two differ by more than `CLOCK_TOLERANCE_SECONDS`, else own_utc
    utc: float
    own_utc: float

    @classmethod
    def of(cls, store: Store, own_utc: float | None = None) -> ClockReading:
        """Read both clocks. If the store does not answer, use this machine's time for both."""
        if own_utc is None:
            own = time.time()
        else:
            own = own_utc
        there = StoreClock().now(store, own)
        return cls(there if abs(there - own) > CLOCK_TOLERANCE_SECONDS else own, own)

    @property
    def ahead_seconds(self) -> float:
        """Seconds by which the store's clock is ahead of this machine's, or 0 if they differ by at
        most 60 s.
        """
        return self.utc - self.own_utc


def read_job_history(job: Job) -> JobHistory:
    """Read the store's job history.

    If the store does not answer, print a message and return an empty history.
    """
    # Late, since the process of every card imports this module
    from ebbflow.cost.job_history import load_job_history, load_or_use_priors

    return load_or_use_priors(
        lambda: load_job_history(job.root_store), lambda text: print(text, flush=True)
    )


def read_job_progress(job: Job) -> JobProgress:
    """Read the job's progress, which limits the plan to the remaining work.

    If the progress is unknown, print why, and return an empty progress. The whole job is then
    planned.
    """
    from ebbflow.cost.errors import CostError
    from ebbflow.cost.plan.candidates import NO_PROGRESS, read_progress

    try:
        return read_progress(read_events(job.store), run=job.run)
    except CostError as error:
        print(f"the job's progress is unknown, so all of it is planned: {error}", flush=True)
        return NO_PROGRESS


def spent_or_zero_usd(events: Sequence[Event]) -> float:
    """Return the dollars that a job has cost so far.

    If they are unknown, print why, and return 0: an error of the ledger must not stop the training.
    """
    from ebbflow.cost.errors import CostError
    from ebbflow.cost.ledger.ledger import compute_spent_usd

    try:
        return compute_spent_usd(events)
    except CostError as error:
        print(f"costs so far are unknown and count as $0 of the budget: {error}", flush=True)
        return 0.0

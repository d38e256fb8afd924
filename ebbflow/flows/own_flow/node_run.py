"""One training on one node of the user's flow: node 0 opens the job, the other nodes follow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ebbflow.core.errors import EbbflowError, InfraError, JobIsRunning, Outcome
from ebbflow.core.events import OUTCOME, read_events
from ebbflow.core.launchers import RUN_CLAIM_VARIABLE, Claim, claim_job, running_launcher
from ebbflow.core.observer_process import LIVE_PAGE, shows_live_page
from ebbflow.core.store import Store
from ebbflow.core.store.identity import adopt_store
from ebbflow.core.store.marker import expected_marker_id
from ebbflow.cost.ledger.generations import find_final_outcome
from ebbflow.flows.gang import set_network_interface
from ebbflow.flows.job import RUNS, Job
from ebbflow.flows.own_flow.gang_exchange import GangExchange, GangMessage
from ebbflow.flows.own_flow.shared_budget import SharedBudget
from ebbflow.flows.own_flow.step_card import StepCard, copy_live_page, show_live, show_report
from ebbflow.flows.own_flow.step_checks import (
    BudgetReached,
    CheckedStep,
    FinalError,
    OwnFlowError,
)
from ebbflow.flows.own_flow.task_name import TaskName, sweep_name
from ebbflow.flows.own_flow.trained_model import TrainedModel, describe_training
from ebbflow.flows.own_flow.training_plan import (
    PROCESS,
    describe_script,
    extend_terms,
    prepare_training,
)
from ebbflow.flows.own_flow.training_settings import TrainingSettings
from ebbflow.flows.remote import in_container
from ebbflow.training.errors import TrainingError
from ebbflow.training.launch.agent import run_gang
from ebbflow.training.launch.messages import GangOutcome, GangSpec
from ebbflow.training.launch.transport import control_ports

if TYPE_CHECKING:
    from ebbflow.flows.own_flow.task_job import NodePlace

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """One node's part in a training of the user's flow."""

    job: str  # name of the job
    call: int  # number of the training in its step, 1 for the first
    task: TaskName
    step: CheckedStep
    settings: TrainingSettings
    place: NodePlace

    def train(self) -> TrainedModel:
        """Train until the job is complete. Raises OwnFlowError if it does not complete."""
        if in_container() and self.place.main_address != _LOOPBACK:
            set_network_interface(self.place.main_address)
        if self.place.node == 0:
            return self._lead()
        return self._follow()

    def show_attached(self) -> contextlib.AbstractContextManager[None]:
        """Show a job's live page as the step's card, for a job that runs in the step itself."""
        page = self.metaflow_job.folder / LIVE_PAGE if shows_live_page() else None
        return copy_live_page(page, self._card)

    def share_result(self) -> TrainedModel:
        """Write the report of a job that ran in the step itself, and return its result on every
        node.
        """
        if self.place.node > 0:
            end = self._exchange.await_end()
            assert end.model is not None
            return TrainedModel.from_json(end.model)
        model = self._report()
        self._tell_end(GangMessage(model=asdict(model)))
        return model

    def try_report(self) -> None:
        """Try to write the report of a training that did not complete. Print the reason if this
        fails.
        """
        try:
            self._report()
        except EbbflowError as error:
            print(f"no report: {error}", flush=True)

    @property
    def metaflow_job(self) -> Job:
        return Job(name=self.job, run=self.task.run, config=self.settings.config)

    @property
    def _shared_budget(self) -> SharedBudget | None:
        limit = self.step.options.budget_of_all
        if limit is None:
            return None
        name = sweep_name(self.task, label=self.step.options.name)
        return SharedBudget(store=self.metaflow_job.root_store, name=name, limit_usd=limit)

    @property
    def _card(self) -> StepCard:
        name = "training" if self.call == 1 else f"training{self.call}"
        return StepCard(task=self.task, datastore=self.step.datastore, name=name)

    @property
    def _exchange(self) -> GangExchange:
        return GangExchange(
            store=self.metaflow_job.store,
            job=self.job,
            run=self.task.run,
            attempt=self.task.attempt,
            start_seconds=self.settings.config.cluster.start_deadline_seconds,
        )

    def _lead(self) -> TrainedModel:
        """Claim the job, start the gang, and send the start and the result to the other nodes."""
        try:
            adopt_store(self.settings.config.store, self.job, RUNS)
            claim = _claim(self.metaflow_job)
        except (EbbflowError, OwnFlowError) as error:
            with contextlib.suppress(InfraError):  # a store that is not the right one takes nothing
                self._tell_end(GangMessage(problem=str(error)))
            raise
        os.environ[RUN_CLAIM_VARIABLE] = claim.launcher.id
        try:
            model = self._run_trial()
            self._tell_end(GangMessage(model=asdict(model)))
        except (EbbflowError, OwnFlowError) as error:
            self._tell_end(GangMessage(problem=str(error)))
            if claim.is_stopped:  # by `ebbflow stop`, so that no retry may go on
                raise FinalError(f"{error}; {claim.describe_loss()}") from error
            raise
        finally:
            os.environ.pop(RUN_CLAIM_VARIABLE, None)
            claim.release()
        return model

    def _tell_end(self, message: GangMessage) -> None:
        if self.place.nodes == 1:
            return
        # One of the two is awaited
        self._exchange.publish_end(message)
        if message.problem:
            self._exchange.publish_start(message)

    def _run_trial(self) -> TrainedModel:
        """Run the job, and return its unspent dollars to the shared budget, if there is one.

        A trial whose part is spent, or too small to begin, ends with the outcome budget instead of
        an error, so that the flow goes on to the step that ranks the trials.
        """
        shared = self._shared_budget
        if shared is None:
            return self._run_job()
        try:
            model = self._run_job()
        except BudgetReached as error:
            print(f"job {self.job}: {error}", flush=True)
            if self.place.nodes > 1:
                self._exchange.publish_start(GangMessage())  # if the gang has not started
            model = self._report()
        except FinalError:
            shared.settle(self.job, self._report().usd)
            raise
        shared.settle(self.job, model.usd)
        return model

    def _run_job(self) -> TrainedModel:
        job = self.metaflow_job
        job.remember()
        complete = self._find_complete(job)
        if complete is not None:
            if self.place.nodes > 1:
                self._exchange.publish_start(GangMessage())
            return complete
        print(f"job {self.job}, store {job.store.uri}", flush=True)
        prepared, terms = prepare_training(
            job, self.settings, self.step.options, self._shared_budget
        )
        spec = GangSpec(
            job=self.job,
            run=self.task.run,
            attempt=self.task.attempt,
            node=0,
            nodes=self.place.nodes,
            processes_per_node=int(self.settings.config.cluster.processes_per_node),
            main_address=self.place.main_address,
            config=self.settings.config,
            store_uri=self.settings.config.store,
            store_marker=expected_marker_id(self.settings.config.store),
            prepared=prepared,
            log_folder=str(job.folder / "logs"),
            terms=terms,
            candidate_ports=control_ports(f"{self.task.run}/{self.job}", self.task.attempt),
        )
        if self.place.nodes > 1:
            self._exchange.publish_start(GangMessage(spec=replace(spec, terms=None).to_json()))
        try:
            with show_live(job, self._card):
                self._run_within_budget(spec)
        except OwnFlowError:
            self.try_report()
            raise
        return self._report()

    def _run_within_budget(self, spec: GangSpec) -> None:
        """Run this node's ranks, and continue from their last commit while a shared budget grants
        more.

        A gang of several nodes gets only its first share, because the other nodes could not follow.
        """
        while True:
            try:
                self._run_gang(spec)
                return
            except BudgetReached:
                shared = self._shared_budget
                if shared is None or spec.terms is None or spec.nodes > 1:
                    raise
                terms = extend_terms(self.metaflow_job, spec.terms, shared)
                if terms is None:
                    raise
            print(
                f"job {self.job}: continues with ${terms.budget_usd:.4f} of budget_of_all",
                flush=True,
            )
            spec = replace(spec, terms=terms)

    def _follow(self) -> TrainedModel:
        message = self._exchange.await_start()
        if message.spec:
            spec = GangSpec.from_json(message.spec)
            prepared = spec.prepared
            if self.settings.config.script is not None:
                prepared = describe_script(self.settings.config)  # with this node's path
            own_spec = replace(
                spec,
                node=self.place.node,
                main_address=self.place.main_address,
                log_folder=str(self.metaflow_job.folder / "logs"),
                prepared=prepared,
            )
            try:
                self._run_gang(own_spec)
            except BudgetReached:
                if self.step.options.budget_of_all is None:
                    raise
        end = self._exchange.await_end()
        assert end.model is not None
        return TrainedModel.from_json(end.model)

    def _run_gang(self, spec: GangSpec) -> None:
        """Run this node's ranks. Raises OwnFlowError if the job is not complete afterwards."""
        if spec.config.cluster.plan_for == "slurm":
            self._run_on_slurm(spec)
            return
        try:
            ending = run_gang(spec)
        except (TrainingError, InfraError) as error:
            is_curable = isinstance(error, InfraError) or error.curable
            if spec.node == 0 and not is_curable:
                _record_outcome(self.metaflow_job, error.outcome, str(error))
            if is_curable:
                raise OwnFlowError(f"{error.outcome}: {error}") from error
            final = BudgetReached if error.outcome is Outcome.BUDGET else FinalError
            raise final(f"{error.outcome}: {error}") from error
        if ending.goes_on or ending.outcome == Outcome.COMPLETED:
            return
        if ending.outcome == Outcome.INTERRUPTED:
            raise OwnFlowError(_describe_stop(self.job, ending))
        if ending.outcome == Outcome.BUDGET:
            raise BudgetReached(_describe_stop(self.job, ending))
        raise FinalError(_describe_stop(self.job, ending))

    def _run_on_slurm(self, spec: GangSpec) -> None:
        """Train in one Slurm job after another. Raises OwnFlowError if the job stays incomplete."""
        # Not at module level, since other trainings need none of it
        from ebbflow.flows.slurm.attempt import count_submitted_jobs, run_attempt
        from ebbflow.training.attach.script_folder import pack_script

        job = self.metaflow_job
        prepared = dict(spec.prepared)
        if spec.config.script is not None:
            prepared["script_sha256"] = pack_script(spec.config, Store.open(spec.config.store))
        while True:
            attempt = count_submitted_jobs(read_events(job.store), job.run)
            ports = control_ports(f"{spec.run}/{self.job}", attempt)
            order = replace(spec, attempt=attempt, candidate_ports=ports, prepared=prepared)
            end = run_attempt(job, order, number=attempt + 1)
            if not end.goes_on:
                break
        if end.message:
            _record_outcome(job, end.outcome, end.message)
        if end.outcome is Outcome.COMPLETED:
            return
        stopped = OwnFlowError if end.outcome is Outcome.INTERRUPTED else FinalError
        raise stopped(f"{end.outcome}: job {self.job}: {end.message or end.told or 'has ended'}")

    def _report(self) -> TrainedModel:
        """Write the job's report, show it as the step's card, and return the job's result.

        Raises:
            InfraError: The store does not answer, or its commits are damaged.
            CostError: The events contradict each other.
        """
        # Not at module level, since it imports what draws charts
        from ebbflow.flows.reporting import write_report

        job = self.metaflow_job
        report, events = write_report(job)
        show_report(job, self._card)
        return describe_training(job.name, job.store, job.config.store, report, events)

    def _find_complete(self, job: Job) -> TrainedModel | None:
        """Return the result of a job that is complete with these settings, else None."""
        events = read_events(job.store)
        final = find_final_outcome(events)
        if final is None or final.payload.outcome is not Outcome.COMPLETED:
            return None
        changed = self.settings.find_changes(json.loads(job.store.get("config.json")))
        if changed:
            print(
                f"job {self.job} was complete with other settings ({', '.join(changed)}): it "
                "continues from its last commit",
                flush=True,
            )
            return None
        model = self._report()
        print(
            f"job {self.job} is complete at step {model.steps}: its result is returned, nothing is "
            "trained; to train on, change an argument and resume; to train anew, start a new run",
            flush=True,
        )
        return model


def _claim(job: Job) -> Claim:
    def leave() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        return claim_job(job.store, job.name, "metaflow step", on_fenced=leave)
    except JobIsRunning as error:
        holder = running_launcher(job.store)
        described = "" if holder is None else f" ({holder.launcher.describe()})"
        raise OwnFlowError(
            f"job {job.name} is running{described}; fix: wait for that run, or end it with: "
            f"ebbflow stop {job.name}"
        ) from error


def _record_outcome(job: Job, outcome: Outcome, message: str) -> None:
    try:
        with job.events(PROCESS) as events:
            events.emit(OUTCOME, outcome=outcome.value, message=message)
    except InfraError as error:
        print(f"the outcome was not recorded: {error}", flush=True)


def _describe_stop(job: str, ending: GangOutcome) -> str:
    message = ending.message or "the job has left"
    return f"{ending.outcome}: job {job} at step {ending.step}: {message}"

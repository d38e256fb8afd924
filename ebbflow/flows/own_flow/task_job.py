"""The object `current.ebbflow` in a task of the user's flow, which runs trainings as jobs."""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metaflow import current
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY

from ebbflow.core.errors import EbbflowError, Outcome
from ebbflow.core.process import die_with_parent
from ebbflow.flows.own_flow.script_arguments import ArgumentError, ScriptOptions
from ebbflow.flows.own_flow.step_checks import (
    NO_SHARED_ATTACH,
    CheckedStep,
    FinalError,
    OwnFlowError,
)
from ebbflow.flows.own_flow.task_name import TaskName, job_name
from ebbflow.flows.own_flow.trained_model import TrainedModel
from ebbflow.flows.remote import in_container
from ebbflow.infra.checks.gpu import list_visible_gpus

if TYPE_CHECKING:
    from metaflow import FlowSpec
    from torch import nn
    from torch.optim import Optimizer

    from ebbflow.flows.own_flow.node_run import NodeRun
    from ebbflow.flows.own_flow.ranking import Ranking
    from ebbflow.flows.own_flow.training_settings import TrainingSettings
    from ebbflow.training.attach.job import AttachedJob


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Position of this task among the nodes of its gang."""

    node: int
    nodes: int
    main_address: str  # address of node 0


class TaskJob:
    """The trainings of one task. `current.ebbflow` is an object of this class."""

    def __init__(self, flow: FlowSpec, task: TaskName, step: CheckedStep) -> None:
        self._flow = flow
        self._task = task
        self._step = step
        self._calls = 0
        # The job that `attach` has opened, until its result is known
        self._run: NodeRun | None = None
        self._attached: AttachedJob | None = None
        self._live_card = contextlib.ExitStack()

    def run(self, script: str, *words: object, **arguments: object) -> TrainedModel:
        """Run a script's ranks on this node, or on all nodes of the gang, until its job is complete.

        `run("train.py", lr=0.1)` gives the script `--lr 0.1`. A retry and `resume` continue the
        job from its last commit.

        Args:
            script: Path of the script, relative to the flow's file.
            words: Words for the command line, before the options.
            arguments: Options of the script.

        Raises:
            OwnFlowError: The training did not complete.
        """
        path = self._find(script, "run")
        try:
            options = ScriptOptions.read(path).words(arguments)
        except ArgumentError as error:
            raise OwnFlowError(f"{self._step.place}: run({script!r}): {error}") from error
        settings = self._make_settings(script=path, words=[*map(str, words), *options])
        return self._make_run(settings).train()

    def train(self, config: str, *, set: Mapping[str, object] | None = None) -> TrainedModel:
        """Train the workload of a configuration file, as `ebbflow run --config` does.

        Args:
            config: Path of the YAML file, relative to the flow's file.
            set: Settings by key, such as {"training.max_steps": 400}.

        Raises:
            OwnFlowError: The training did not complete.
        """
        from ebbflow.flows.own_flow.training_settings import as_overrides, make_settings

        path = self._find(config, "train")
        overrides = as_overrides(set or {})
        settings = make_settings(
            self._step, nodes=_find_place().nodes, file=path, overrides=overrides
        )
        return self._make_run(settings).train()

    def attach(
        self,
        model: nn.Module | dict[str, nn.Module],
        optimizer: Optimizer | None = None,
        **states: object,
    ) -> AttachedJob:
        """Attach the training loop in the step itself to a job, as `ebbflow.attach` does in a
        script.

        The process of the task is the only rank of its node, and no agent watches it: after a
        failure the task ends, and a retry or `resume` continues the job.

        Args:
            model: The model that the loop calls; see `ebbflow.attach`.
            states: Further objects to save, and `scheduler`.
        """
        from ebbflow.flows.own_flow.step_attach import attach_in_step

        if self._step.options.budget_of_all is not None:
            raise OwnFlowError(f"{self._step.place}: {NO_SHARED_ATTACH}")
        run = self._make_run(self._make_settings())
        self._attached = attach_in_step(run, model, optimizer, states)
        self._run = run  # whose report the step writes from here on
        if run.place.node == 0:
            self._live_card.enter_context(run.show_attached())
        return self._attached

    def result(self) -> TrainedModel:
        """Return the result of the job that `attach` has opened, and end the job.

        In a gang, call it on every node.

        Raises:
            OwnFlowError: `attach` was not called.
        """
        if self._run is None or self._attached is None:
            raise OwnFlowError(
                f"{self._step.place}: result() has no job; fix: call current.ebbflow.attach first; "
                "run and train return their result"
            )
        run = self._run
        self._attached.close_at_exit()
        self._live_card.close()
        _end_live_page()
        self._run = None
        return run.share_result()

    def rank(
        self, inputs: Iterable[FlowSpec], *, metric: str | None = None, mode: str | None = None
    ) -> Ranking:
        """Rank the trials of a sweep by their metric per dollar, in the step that joins them.

        The table is printed and becomes a card of the step. Each trained model that is an artifact
        of an input is a trial.

        Args:
            inputs: The inputs of the join.
            metric: Name of a metric that the trials have logged, such as "accuracy". None: the
                held-out loss if a trial has it, else the training loss.
            mode: "max" or "min": which value is the best. None: "min" for these losses.

        Raises:
            OwnFlowError: The trials cannot be ranked.
        """
        from ebbflow.flows.own_flow.ranking import RankingError, rank_trials
        from ebbflow.flows.own_flow.step_card import StepCard

        trials: list[tuple[str, TrainedModel]] = []
        for joined in inputs:
            trials += _list_trials(joined)
        try:
            ranking = rank_trials(trials, metric=metric, mode=mode)
        except RankingError as error:
            raise OwnFlowError(f"{self._step.place}: {error}") from error
        print(ranking.to_text(), flush=True)
        card = StepCard(task=self._task, datastore=self._step.datastore, name="ranking")
        card.try_save(ranking.to_html())
        return ranking

    def begin_step(self) -> None:
        """Prepare this process as a node of its step's gang.

        `torch.distributed.init_process_group` then finds the other nodes. On one machine, the tasks
        of the other nodes end with that of node 0, which has started them.
        """
        place = _find_place()
        if place.node > 0 and not in_container():
            die_with_parent()
        if place.nodes > 1:
            # The last loop is that of the gang's nodes
            gang = [index for index, _, _ in self._flow.foreach_stack() or []][:-1]
            variables = {
                "RANK": place.node,
                "WORLD_SIZE": place.nodes,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": place.main_address,
                "MASTER_PORT": self._task.rendezvous_port(gang),
            }
            for name, value in variables.items():
                os.environ.setdefault(name, str(value))
            has_own_loop = any(call.kind == "attach" for call in self._step.calls)
            if has_own_loop and not in_container():
                # LOCAL_RANK is 0 on each node, so its GPU must be the node's first one. With run and
                # train, the agents share out the GPUs.
                gpus = share_gpus(list_visible_gpus(), place.node, place.nodes)
                if gpus:
                    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def end_failed_step(self) -> None:
        """Write the report of a failed job in the step, and let Metaflow decide the process's exit
        code.
        """
        if self._attached is not None:
            self._attached.leave_exit_to_caller()
        if self._run is not None and self._run.place.node == 0:
            self._live_card.close()
            _end_live_page()
            self._run.try_report()

    def end_step(self) -> None:
        """Write the report of a job that `attach` opened, unless `result` has done so."""
        if self._run is not None:
            self.result()

    def _find(self, name: object, method: str) -> Path:
        if not isinstance(name, str | Path):
            fix = "set={KEY: VALUE} for single settings" if method == "train" else "its path"
            raise OwnFlowError(
                f"{self._step.place}: {method} takes the path of a file, not a "
                f"{type(name).__name__}; fix: {fix}"
            )
        name = str(name)
        path = self._step.find_file(name)
        if path is None:
            raise OwnFlowError(
                f"{self._step.place}: {method}({name!r}): no such file in "
                f"{self._step.flow_folder}; fix: its path, relative to the flow's file"
            )
        return path

    def _make_settings(
        self, *, script: Path | None = None, words: Sequence[str] = ()
    ) -> TrainingSettings:
        """Return the settings for a user's own training loop."""
        from ebbflow.flows.own_flow.training_settings import make_settings

        file = None
        if self._step.options.config is not None:
            file = self._find(self._step.options.config, "config")
        return make_settings(
            self._step,
            nodes=_find_place().nodes,
            file=file,
            script=script,
            words=words,
            is_own_loop=True,
        )

    def _make_run(self, settings: TrainingSettings) -> NodeRun:
        from ebbflow.flows.own_flow.node_run import NodeRun

        self._calls += 1
        name = job_name(
            self._task,
            self._flow,
            label=self._step.options.name,
            is_gang=self._step.is_gang,
            call=self._calls,
        )
        return NodeRun(
            job=name,
            call=self._calls,
            task=self._task,
            step=self._step,
            settings=settings,
            place=_find_place(),
        )


def share_gpus(gpus: Sequence[str], node: int, nodes: int) -> list[str]:
    """Return the GPUs of one node, if several nodes share the GPUs of a machine.

    With fewer GPUs than nodes, nodes share one; without GPUs, the list is empty.
    """
    if not gpus:
        return []
    count = len(gpus) // nodes
    if count == 0:
        return [gpus[node % len(gpus)]]
    return list(gpus[node * count : (node + 1) * count])


@contextlib.contextmanager
def failures_as_step_errors(step: CheckedStep) -> Iterator[None]:
    """Convert Ebbflow's errors, and the exit of a job in the step itself, to one-line Metaflow
    errors.

    An error that a new attempt would repeat ends the process with the exit code after which
    Metaflow does not retry the task, unless `@catch` handles errors of the step.
    """
    try:
        with _exits_as_errors():
            yield
    except FinalError as error:
        if step.is_caught:
            raise
        print(f"{error.headline}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from error


@contextlib.contextmanager
def _exits_as_errors() -> Iterator[None]:
    try:
        yield
    except EbbflowError as error:
        raise OwnFlowError(f"{error.outcome}: {error}") from error
    except SystemExit as end:
        if end.code in (None, 0):
            return
        outcomes = {outcome.exit_code: outcome for outcome in Outcome}
        outcome = outcomes.get(end.code) if isinstance(end.code, int) else None
        text = f"the step left with exit code {end.code}"
        if outcome in (None, Outcome.FAILED, Outcome.INTERRUPTED):
            raise OwnFlowError(text) from end
        raise FinalError(f"{outcome}: {text}, as printed above") from end


def _list_trials(joined: FlowSpec) -> Iterator[tuple[str, TrainedModel]]:
    """Yield (label, model) for each trained model among the artifacts of a join's input."""
    datastore = joined._datastore
    assert datastore is not None
    for name, stored in sorted(datastore._info.items()):
        # Other artifacts, which may be large, are not read
        if TrainedModel.__name__ not in stored["type"]:
            continue
        model = getattr(joined, name)
        yield str(joined.input) if joined.input is not None else model.job, model


def _find_place() -> NodePlace:
    if not getattr(current, "is_parallel", False):
        return NodePlace(node=0, nodes=1, main_address="127.0.0.1")
    parallel = current.parallel
    return NodePlace(
        node=parallel.node_index, nodes=parallel.num_nodes, main_address=parallel.main_ip
    )


def _end_live_page() -> None:
    """End the process that updates an attached job's live page, before the report replaces the
    page.
    """
    from ebbflow.training.attach.standalone import (
        end_observer,  # not at module level: it needs torch
    )

    end_observer()

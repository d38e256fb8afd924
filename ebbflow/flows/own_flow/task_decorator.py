"""The step decorator behind `@ebbflow`: checks before a run, and `current.ebbflow` in its tasks.

Metaflow imports this module with every `import metaflow`, so it imports nothing but Metaflow at
module level.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from metaflow import metaflow_config
from metaflow.decorators import StepDecorator

if TYPE_CHECKING:
    from metaflow import FlowSpec
    from metaflow.datastore import FlowDataStore
    from metaflow.graph import FlowGraph
    from metaflow.runtime import CLIArgs

    from ebbflow.flows.own_flow.step_checks import CheckedStep
    from ebbflow.flows.own_flow.task_job import TaskJob


_NAME = "ebbflow_task"
# `spin` leaves out all other decorators
_allowed: list[str] = getattr(metaflow_config, "SPIN_ALLOWED_DECORATORS", [])
if _NAME not in _allowed:
    _allowed.append(_NAME)


class EbbflowTaskDecorator(StepDecorator):
    """Step decorator that `@ebbflow` adds. Users write `@ebbflow` instead."""

    name = _NAME
    defaults: ClassVar[dict[str, object]] = {"values": None, "options": None}
    _checked: CheckedStep
    _job: TaskJob

    # Metaflow passes the arguments of all hooks by position.
    def step_init(
        self,
        flow: FlowSpec,
        graph: FlowGraph,
        step_name: str,
        decorators: list[StepDecorator],
        _environment: object,
        flow_datastore: FlowDataStore,
        _logger: object,
    ) -> None:
        from ebbflow.flows.own_flow.step_checks import check_step, find_scheduler

        self._checked = check_step(
            self.attributes, flow, graph, step_name, decorators, flow_datastore
        )
        if self._checked.is_gang and self._checked.backend == "batch":
            from ebbflow.flows.command_line import CommandLine
            from ebbflow.flows.metaflow_fixes import fix_process_of_batch

            fix_process_of_batch(CommandLine.parse(sys.argv))
        # Not in each task, since reading a configuration takes a third of a second
        if "step" not in sys.argv and self._checked.calls:
            from ebbflow.flows.own_flow.step_checks import print_unpacked_files
            from ebbflow.flows.own_flow.training_settings import check_configurations

            check_configurations(self._checked)
            print_unpacked_files(self._checked)
            if find_scheduler(sys.argv) is not None:
                from ebbflow.flows.own_flow.deployment_plan import print_deployment_plans

                print_deployment_plans(self._checked)

    def add_to_package(self) -> list[tuple[str, str]]:
        from ebbflow.flows.own_flow.step_checks import list_package_files

        return list_package_files(self._checked)

    def runtime_step_cli(
        self, cli_args: CLIArgs, _retry_count: int, _max_retries: int, _ubf_context: str
    ) -> None:
        # Metaflow starts the other nodes of a local gang as the bare word `python`
        if cli_args.commands[:1] == ["step"]:
            folder = str(Path(sys.executable).parent)
            path = cli_args.env.get("PATH") or os.environ.get("PATH", "")
            cli_args.env["PATH"] = os.pathsep.join([folder, path])

    def task_pre_step(
        self,
        step_name: str,
        _task_datastore: object,
        _metadata: object,
        run_id: str,
        task_id: str,
        flow: FlowSpec,
        _graph: FlowGraph,
        retry_count: int,
        _max_retries: int,
        _ubf_context: str,
        _inputs: object,
    ) -> None:
        from metaflow import current

        from ebbflow.flows.own_flow.task_job import TaskJob
        from ebbflow.flows.own_flow.task_name import TaskName

        task = TaskName(
            flow=flow.name,
            run=str(run_id),
            origin_run=current.origin_run_id,
            step=step_name,
            task=str(task_id),
            attempt=retry_count,
        )
        self._job = TaskJob(flow, task, self._checked)
        current._update_env({"ebbflow": self._job})

    def task_decorate(
        self,
        step_func: Callable[[], None],
        _flow: FlowSpec,
        _graph: FlowGraph,
        _retry_count: int,
        _max_retries: int,
        _ubf_context: str,
    ) -> Callable[[], None]:
        @functools.wraps(step_func)
        def run_step(*inputs: object) -> None:
            from ebbflow.flows.own_flow.task_job import failures_as_step_errors

            with failures_as_step_errors(self._checked):
                self._job.begin_step()
                try:
                    step_func(*inputs)
                except BaseException:
                    self._job.end_failed_step()
                    raise
                self._job.end_step()

        return run_step

"""Metaflow decorators of the flow (`@capacity`, `--with cloud`, `--with local`), and the files of
its code package.

Without `@capacity`, Metaflow runs every attempt of a step on the backend and queue that the step's
decorators name. `@capacity` chooses the queue, machine type and number of nodes anew for each
attempt. It uses the private hook `runtime_step_cli`, because Metaflow has no public hook for this
(docs/architecture.md).

The code package is the archive of source files that Metaflow copies into a container. Metaflow
before 2.19.39 has no `@package_sources` to choose these files. For those releases, `@capacity` adds
the files in its hook `add_to_package`.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import metaflow
from metaflow import StepMutator
from metaflow.decorators import StepDecorator, _base_step_decorator

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.program import IMPORT_ROOT, INSTALLED
from ebbflow.core.store.s3 import STORE_REGION_VARIABLE
from ebbflow.flows import pods
from ebbflow.flows.remote import CLOUD_VARIABLE, UNPLACED_VARIABLE

if TYPE_CHECKING:
    from metaflow import MutableStep
    from metaflow.metadata_provider.metadata import MetadataProvider
    from metaflow.runtime import CLIArgs, Task

    from ebbflow.core.preflight import Target
    from ebbflow.cost.capacity import Placement
    from ebbflow.flows.attempts.order import AttemptOrder, SubmitOrder
    from ebbflow.flows.attempts.placement import PlacementRequest
    from ebbflow.flows.job import TrainArtifacts

_SUBMITTER_SECONDS = 10.0  # by which a submitter leaves before the launcher stops waiting for it
_HOOKS = ("step_init", "add_to_package", "runtime_step_cli", "task_pre_step")


def check_hooks(decorator: type) -> None:
    missing = [hook for hook in _HOOKS if not hasattr(decorator, hook)]
    if missing:
        raise ImportError(
            f"metaflow {metaflow.__version__}: its step decorators have no hook "
            f"{', '.join(missing)}; fix: pip install 'metaflow>=2.19,<2.20'"
        )


check_hooks(StepDecorator)

# Decorators that send a step to another machine.
REMOTE = ("batch", "kubernetes")


class local(StepMutator):  # noqa: N801 - the name follows --with
    """Step mutator for `--with local`: it removes @batch and @kubernetes, which would demand a
    remote datastore.

    The mutator prints nothing, because it also runs in the process of every task.
    """

    def mutate(self, mutable_step):
        for name in REMOTE:
            if name in _decorator_names(mutable_step):
                mutable_step.remove_decorator(name)


class cloud(StepMutator):  # noqa: N801
    """Step mutator for `--with cloud`. It sends the training steps to AWS Batch, or to Kubernetes
    if `cluster.plan_for` is kubernetes. All other steps run on this machine."""

    def mutate(self, mutable_step):
        names = _decorator_names(mutable_step)
        if "capacity" in names and not names.intersection(REMOTE):
            in_pod = "METAFLOW_KUBERNETES_WORKLOAD" in os.environ
            if in_pod or os.environ.get(CLOUD_VARIABLE) == "kubernetes":
                backend = "kubernetes"
            else:
                backend = "batch"
            mutable_step.add_decorator(backend)
            _init_decorator(mutable_step, backend)


def _init_decorator(mutable_step: MutableStep, name: str) -> None:
    """Initialise a decorator that a mutator added, because Metaflow up to 2.19.20 does not
    initialise it.
    """
    for decorator in getattr(getattr(mutable_step, "_my_step", None), "decorators", ()):
        if decorator.name == name:
            decorator.external_init()


def _decorator_names(mutable_step: MutableStep) -> set[str]:
    # Some releases have no `has_decorator`
    return {name for name, *_ in mutable_step.decorator_specs}


def training_backend(flow: TrainArtifacts) -> Target | None:
    """Return the backend of the training steps: "batch", "kubernetes", "slurm", or None for this
    machine.
    """
    if os.environ.get(CLOUD_VARIABLE) == "slurm":
        return "slurm"
    for step in (flow.train, flow.train_node):
        for decorator in step.decorators:
            if decorator.name in REMOTE:
                return decorator.name
    return None


OWN = not hasattr(metaflow, "package_sources")
_SUFFIXES = (".py", ".yaml", ".csv", ".js", ".css")
_SHIPPED: list[Path] = []


def package_sources() -> Callable[[type], type]:
    """Return a class decorator that adds `ebbflow` to the flow's code package and, in a source
    checkout, `examples`.
    """
    folders = [IMPORT_ROOT / "ebbflow", *([] if INSTALLED else [IMPORT_ROOT / "examples"])]
    # A code package may lack `examples`
    folders = [folder for folder in folders if folder.is_dir()]
    if not OWN:
        return metaflow.package_sources(
            [(str(folder), folder.name) for folder in folders], suffixes=list(_SUFFIXES)
        )

    def remember(flow: type) -> type:
        _SHIPPED[:] = folders
        return flow

    return remember


def packaged_files() -> Iterator[tuple[str, str]]:
    """Yield (path, name in the code package) for each file that `@capacity` must add.

    Yields no files if Metaflow has `@package_sources`, which then adds them.
    """
    for folder in _SHIPPED:
        # A checkout has links to the packages
        for parent, _, names in sorted(os.walk(folder, followlinks=True)):
            for path in (Path(parent, name) for name in sorted(names)):
                if path.suffix in _SUFFIXES:
                    yield str(path), str(path.relative_to(folder.parent))


# Command-line options of a step on this machine. All others belong to @batch.
_LOCAL_OPTIONS = frozenset(
    {
        "run-id",
        "task-id",
        "input-paths",
        "split-index",
        "split_index",
        "retry-count",
        "max-user-code-retries",
        "tag",
        "namespace",
        "ubf-context",
        "clone-run-id",
        "num-parallel",
    }
)


class CapacityDecorator(StepDecorator):
    """Step decorator that sets the queue, resources, time limit and number of nodes of each
    attempt.

    The decorator writes these values into the command line with which Metaflow launches the
    attempt.
    """

    name = "capacity"
    defaults: ClassVar[dict[str, object]] = {}
    metadata: MetadataProvider  # of the running task

    def step_init(
        self, flow, graph, step_name, decorators, _environment, flow_datastore, _logger
    ) -> None:
        from metaflow.metaflow_config import BATCH_JOB_QUEUE

        self._store = flow_datastore
        self._step = step_name
        queues = [
            decorator.attributes.get("queue")
            for decorator in decorators
            if decorator.name == "batch"
        ]
        self._named = any(queue not in (None, BATCH_JOB_QUEUE) for queue in queues)
        self._parallel = graph[step_name].parallel_step
        # Hooks run in the order of this list, and @batch overwrites the command line, so this
        # decorator must be last.
        step = getattr(type(flow), step_name)
        # Metaflow refuses @catch beside @parallel on Kubernetes. Without it, a gang that fails ends
        # the run before `report`, and the launcher writes the report from the events.
        if self._parallel and any(decorator.name == "kubernetes" for decorator in step.decorators):
            unfit = "catch"
        else:
            unfit = ""
        step.decorators = [
            decorator
            for decorator in step.decorators
            if decorator is not self and decorator.name != unfit
        ] + [self]

    def add_to_package(self) -> list[tuple[str, str]]:
        return list(packaged_files())

    def runtime_step_cli(self, cli_args, retry_count, max_user_code_retries, _ubf_context) -> None:
        if cli_args.commands not in (["batch", "step"], ["kubernetes", "step"]):
            return
        task = cli_args.task
        try:
            self._place(cli_args, task, retry_count, max_user_code_retries)
        except Exception as error:  # an exception here would end the run
            self._unplaced(cli_args, task, repr(error))

    # Metaflow passes the arguments by position.
    def task_pre_step(
        self,
        step_name,
        _task_datastore,
        metadata,
        run_id,
        task_id,
        flow,
        _graph,
        _retry_count,
        _max_retries,
        ubf_context,
        _inputs,
    ) -> None:
        self.metadata = metadata
        # @batch sets these attributes in multi-node jobs only; a @parallel step in a plain job
        # needs them too.
        alone = "AWS_BATCH_JOB_ID" in os.environ and "AWS_BATCH_JOB_NUM_NODES" not in os.environ
        if ubf_context == "ubf_control" and (alone or pods.is_single_pod()):
            flow._control_mapper_tasks = [f"{run_id}/{step_name}/{task_id}"]
            flow._control_task_is_mapper_zero = True

    def _place(self, cli_args: CLIArgs, task: Task, attempt: int, last_attempt: int) -> None:
        # Late, since the flow file, which every card refresh imports, imports this module
        from ebbflow.flows.attempts.order import AttemptName, try_to_show_in_client
        from ebbflow.flows.attempts.placement import (
            AttemptArtifacts,
            PlacementRequest,
            describe_order,
            place_attempt,
        )

        assert task.input_paths is not None  # only the task of `start` has none
        parent = self._store.get_task_datastore(*task.input_paths[0].split("/"))
        flow = AttemptArtifacts(
            job=parent["job"],
            settings=parent["settings"],
            capacity=parent["capacity"],
            examined=parent["examined"],
            rounds=parent["rounds"],
            num_nodes=parent["num_nodes"],
        )
        name = AttemptName(
            run=str(task.run_id), step=self._step, task=str(task.task_id), attempt=attempt
        )
        request = PlacementRequest(
            flow=flow,
            name=name,
            round=flow.rounds + 1,
            one_node=not self._parallel,
            last=attempt >= last_attempt,
            backend=cli_args.commands[0],
        )
        answer = place_attempt(request)
        if answer.order is None:
            self._unplaced(cli_args, task, answer.trouble)
            return
        if answer.trouble:
            source = (
                f"using the plan of the run, because there is no fresh choice: {answer.trouble}"
            )
            task.log(f"capacity: {source}", system_msg=True)
        task.log(f"capacity: {describe_order(answer.order)}", system_msg=True)
        trouble = try_to_show_in_client(task.metadata, name, answer.order.brief())
        if trouble:
            task.log(f"capacity: {trouble}", system_msg=True)
        self._send(cli_args, request, answer.order)

    def _send(self, cli_args: CLIArgs, request: PlacementRequest, order: AttemptOrder) -> None:
        """Change the attempt's command line so that the attempt runs where its order says."""
        from ebbflow.flows.attempts.order import SUBMIT_VARIABLE

        on_kubernetes = request.backend == "kubernetes"
        # On Kubernetes Metaflow prepares a gang's task for its pods, so that a stop cannot run on
        # this machine.
        stops = on_kubernetes and order.does == "stop"
        if order.does != "train" and not stops:
            run_locally(cli_args, self._step)
            return
        config = RunConfig.model_validate_json(json.dumps(request.flow.settings["config"]))
        placement = order.placement
        if placement is None:
            queue_region = None
        else:
            queue_region = placement.region
        region = set_region(cli_args.env, queue_region, config)
        if placement is not None and on_kubernetes:
            pods.apply_to_pod(cli_args, order, placement, config)
        elif placement is not None:
            apply_to_batch(cli_args, placement, config)
        cli_args.env[SUBMIT_VARIABLE] = _submit_order(
            request, order, config, region
        ).model_dump_json()

    def _unplaced(self, cli_args: CLIArgs, task: Task, trouble: str) -> None:
        """Handle an attempt for which no placement could be chosen.

        On Kubernetes, and if the user named a queue (`--with batch:queue=…`), the attempt runs with
        the settings of @kubernetes or @batch. Otherwise it fails on the scheduler's machine,
        because the default queue is not for training. Metaflow then retries the step, which gets a
        new placement.
        """
        backend = cli_args.commands[0]
        if self._named or backend == "kubernetes":
            task.log(
                f"capacity: using @{backend}'s own settings, because the choice failed: {trouble}",
                system_msg=True,
            )
            return
        task.log(
            f"capacity: this attempt is not submitted, because the placement failed: {trouble}",
            system_msg=True,
        )
        run_locally(cli_args, self._step)
        cli_args.env[UNPLACED_VARIABLE] = trouble


def _submit_order(
    request: PlacementRequest, order: AttemptOrder, config: RunConfig, region: str | None
) -> SubmitOrder:
    """Return the order for the process that submits the attempt to Batch or Kubernetes."""
    from ebbflow.flows.attempts.order import StopOrder, SubmitOrder

    placement = order.placement
    name = request.name
    stop = None
    if order.does == "stop":
        stop = StopOrder(outcome=Outcome(order.outcome), message=order.message)
    return SubmitOrder(
        job=request.flow.job,
        store=config.store,
        region=region,
        run=name.run,
        step=name.step,
        task=name.task,
        attempt=name.attempt,
        stop=stop,
        placement=placement,
        runnable_seconds=None if placement is None else placement.runnable_seconds,
        start_by_utc=None if placement is None else placement.start_by_utc,
        leave_seconds=config.checkpoint.drain_seconds - _SUBMITTER_SECONDS,
        last=request.last,
        kueue=config.kubernetes.queue,
        node_replacements=config.kubernetes.node_replacements,
        roll_call_seconds=config.cluster.replacement_deadline_seconds,
    )


def set_region(env: dict[str, str], region: str | None, config: RunConfig) -> str | None:
    """Set the region variables in `env` if the queue is outside `batch.region`.

    Return the region of the Batch job.
    """
    home = config.batch.region
    if home and region and region != home:
        env["AWS_DEFAULT_REGION"] = region
        if config.cost.store_region:
            env[STORE_REGION_VARIABLE] = config.cost.store_region
        return region
    return home


def apply_to_batch(cli_args: CLIArgs, placement: Placement, config: RunConfig) -> None:
    """Set the options of Metaflow's `batch step` from the placement, replacing the values of
    @batch.
    """
    # The flow file, which every card refresh imports, imports this
    from ebbflow.cost.catalogue import efa_interfaces

    batch = config.batch
    options = cli_args.command_options
    if placement.nodes > 1:
        efa = efa_interfaces(placement.instance_type, batch.efa_interfaces)
    else:
        efa = 0
    options["queue"] = placement.queue
    options["cpu"] = str(placement.cpu)
    options["gpu"] = str(placement.gpu)
    options["memory"] = str(placement.memory_mib)
    options["shared_memory"] = str(batch.shared_memory_mib)
    options["efa"] = efa or None
    options["run-time-limit"] = int(placement.wall_seconds)
    if batch.image:
        options["image"] = batch.image
    if batch.job_role:
        options["iam_role"] = batch.job_role
    tags = [f"{key}={value}" for key, value in sorted(batch.tags.items())]
    options["aws-batch-tag"] = [*(options.get("aws-batch-tag") or []), *tags]
    # One node is a plain job, since Batch runs no multi-node job on Spot
    if "num-parallel" in options:
        options["num-parallel"] = str(placement.nodes if placement.nodes > 1 else 0)


def run_locally(cli_args: CLIArgs, step: str) -> None:
    """Rewrite a step's command line to run on the scheduler's machine, for an attempt that does not
    train.
    """
    cli_args.commands = ["step"]
    cli_args.command_args = [step]
    options = cli_args.command_options
    cli_args.command_options = {
        key: value for key, value in options.items() if key in _LOCAL_OPTIONS
    }


capacity = partial(_base_step_decorator, CapacityDecorator)

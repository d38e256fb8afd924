"""Plan a step's trainings when its flow is deployed to a production scheduler.

The scheduler sends every attempt to where the step's decorators say. A training that cannot run
there is therefore refused at deployment.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from ebbflow.core.errors import EbbflowError, Outcome
from ebbflow.core.footprint import ModelShape
from ebbflow.cost.amounts import format_count, format_duration, format_usd
from ebbflow.cost.plan.plan import Plan
from ebbflow.flows.job import Job
from ebbflow.flows.own_flow.script_arguments import ArgumentError, ScriptOptions
from ebbflow.flows.own_flow.step_checks import CheckedStep, OwnFlowError, TrainingCall
from ebbflow.flows.own_flow.training_plan import plan_on_pools
from ebbflow.flows.own_flow.training_settings import TrainingSettings, as_overrides, make_settings
from ebbflow.training.attach.unattached import never_attaches
from ebbflow.tryout.examine import examine, examine_script, script_shape


def print_deployment_plans(step: CheckedStep) -> None:
    """Plan the trainings that a step's source names, and print them to stderr.

    The compiled workflow may be on stdout.

    Raises:
        OwnFlowError: A plan is refused.
    """
    for call in step.calls:
        where = f"step {step.name}, {call.file or call.kind}"
        try:
            with contextlib.redirect_stdout(sys.stderr):
                text = _plan_call(step, call)
        except (ArgumentError, EbbflowError) as error:
            raise OwnFlowError(f"{step.place}: {where}: {error}") from error
        print(f"@ebbflow: {where}: {text}", file=sys.stderr, flush=True)


def _plan_call(step: CheckedStep, call: TrainingCall) -> str:
    """Plan one training, and return a description of the plan."""
    if step.nodes is None:
        return "planned when the step runs, because num_parallel is computed"
    if call.kind == "train" and call.overrides is None:
        return "planned when the step runs, because set= is computed"
    settings = _make_settings(step, call, step.nodes)
    if settings.config.cluster.plan_for == "slurm":
        return "planned when the step runs, for Slurm"
    shape = _find_shape(call, settings)
    plan = plan_on_pools(
        Job(name=step.name, run="", config=settings.config),
        step.options,
        shape,
        now_utc=time.time(),
        is_simulated=False,
    )
    is_measured = shape is None or shape.kind != "unknown"
    refusal = plan.refusal
    if refusal is not None:
        is_unpriced = refusal.outcome is Outcome.NO_CAPACITY
        if not is_measured and not is_unpriced:
            return "planned when the step runs, because the training was not measured"
        if is_unpriced and plan.budget_usd is None:
            return f"no price: {refusal.message}; fix: usd_per_node_hour="
        raise OwnFlowError(
            f"{step.place}: step {step.name}, {call.file or call.kind}: {refusal.outcome}: "
            f"{refusal.message} ({refusal.hint})"
        )
    return _describe(plan, step, is_measured=is_measured)


def _make_settings(step: CheckedStep, call: TrainingCall, nodes: int) -> TrainingSettings:
    if call.kind == "train":
        file = step.find_file(call.file)
        overrides = as_overrides(call.overrides or {})
        return make_settings(step, nodes=nodes, file=file, overrides=overrides)
    file = None if step.options.config is None else step.find_file(step.options.config)
    script = step.find_file(call.file) if call.kind == "run" else None
    words: list[str] = []
    if script is not None and call.words is not None and call.values is not None:
        words = [*map(str, call.words), *ScriptOptions.read(script).words(call.values)]
    return make_settings(step, nodes=nodes, file=file, script=script, words=words, is_own_loop=True)


def _find_shape(call: TrainingCall, settings: TrainingSettings) -> ModelShape | None:
    """Return the shape of a training's model, as far as it is known before the step runs.

    Return None for the default workload. A script with computed arguments cannot be measured.
    """
    config = settings.config
    unknown = script_shape({}, config)
    if call.kind == "train":
        # Without its data, which the step prepares, a workload may not be measurable
        return None if config.workload is None else examine(config, prepare=False).shape or unknown
    has_limit = config.cost.budget_usd is not None or config.cost.deadline_hours is not None
    if call.kind == "attach" or call.words is None or call.values is None or not has_limit:
        return unknown
    if config.script is None or never_attaches(Path(config.script)):
        return unknown
    return examine_script(config).shape or unknown


def _describe(plan: Plan, step: CheckedStep, *, is_measured: bool) -> str:
    best = plan.chosen
    assert best is not None
    price = f"{format_usd(best.price.usd_float, 4)} per node-hour ({best.price.kind})"
    if step.options.usd_per_node_hour is None:
        parts = [f"{best} at {price}"]
    else:
        parts = [f"{format_count(best.nodes, 'node')} at {price}"]
    if is_measured:
        parts.append(
            f"{format_usd(best.expected_usd)} and {format_duration(best.expected_hours * 3600)} "
            "expected (estimated)"
        )
    else:
        parts.append("hours unknown, because the training was not measured")
    budget = "no budget" if plan.budget_usd is None else f"budget {format_usd(plan.budget_usd, 2)}"
    deadline = "no deadline"
    if plan.deadline_hours is not None:
        deadline = f"deadline {format_duration(plan.deadline_hours * 3600)}"
    parts.append(f"{budget}, {deadline}")
    parts.append(f"each attempt runs where @{step.backend} sends it")
    return "; ".join(parts)

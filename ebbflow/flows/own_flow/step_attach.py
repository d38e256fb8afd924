"""Attach a training loop in the step itself to a job: the task's process is a rank without an
agent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ebbflow.core.errors import Outcome
from ebbflow.core.store.identity import adopt_store
from ebbflow.flows.job import RUNS
from ebbflow.flows.own_flow.node_run import NodeRun
from ebbflow.flows.own_flow.training_plan import prepare_training
from ebbflow.training.attach.entry import attach_with
from ebbflow.training.attach.standalone import claim_for_ranks, observe_job, open_job
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.engine.guards.overrides import read_overrides, rewind_parent
from ebbflow.training.errors import GangError
from ebbflow.training.launch.messages import WorkerSpec

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ebbflow.training.attach.job import AttachedJob


def attach_in_step(
    run: NodeRun,
    model: nn.Module | dict[str, nn.Module],
    optimizer: Optimizer | None,
    states: dict[str, object],
) -> AttachedJob:
    """Attach the training loop in a step to the job of `run`, with its plan, price and limits."""
    return attach_with(lambda: _open_spec(run), model, optimizer, states)


def _open_spec(run: NodeRun) -> WorkerSpec:
    """Plan the job and open a generation (a start of its ranks). Only rank 0 calls this."""
    job = run.metaflow_job
    adopt_store(job.config.store, job.name, RUNS)
    job.remember()
    use_signing_key(run.settings.config.checkpoint.signing_key_env)
    claim_for_ranks(job.store, job.name, take_over=False)
    prepared, terms = prepare_training(job, run.settings, run.step.options)
    problem = "" if terms is None else terms.out_of_money()
    if problem:
        raise GangError(problem, curable=False, outcome=Outcome.BUDGET)
    spec = open_job(
        job.config.store,
        job.name,
        run.settings.document,
        prepared,
        parent=rewind_parent(job.store),
        script=run.step.place,
    )
    spec = replace(spec, terms=terms, overrides=read_overrides(job.store).to_json())
    observe_job(spec, script=run.step.place, writes_report=False)  # the step does, at its end
    return spec

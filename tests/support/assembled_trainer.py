"""Trainers that are assembled from given parts, some of which may be stand-ins."""

from __future__ import annotations

from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.engine.guards.guards import Guards
from ebbflow.training.engine.trainer import Trainer
from ebbflow.training.gang import Gang
from ebbflow.training.limits import Limits
from ebbflow.training.reporter import Reporter
from ebbflow.training.save_controller import SaveController, SaveSchedule, prior_hazard
from ebbflow.training.session import JobSession, Rehearsal


def assemble_trainer(
    config: RunConfig,
    gang: Gang,
    *,
    workload: Any,
    spread: Any,
    optimizer: Any,
    saver: Any,
    limits: Limits,
    reporter: Reporter,
    guards: Guards,
    save_schedule: SaveSchedule | None = None,
    rehearsal: Rehearsal | None = None,
) -> Trainer:
    """Assemble a trainer at the beginning of a job.

    Without a `save_schedule`, rank 0 gets that of the configuration.
    """
    if save_schedule is None and gang.rank == 0:
        save_schedule = SaveSchedule(config.checkpoint, prior_hazard(None, interruptions=0))
    saves = SaveController(
        config=config.checkpoint,
        rank=gang.rank,
        spread=spread,
        optimizer=optimizer,
        saver=saver,
        limits=limits,
        reporter=reporter,
        extra={},
        carried=guards.commit_fields,
        save_schedule=save_schedule,
    )
    session = JobSession(
        config=config,
        gang=gang,
        reporter=reporter,
        limits=limits,
        saver=saver,
        saves=saves,
        guards=guards,
        rehearsal=rehearsal,
    )
    return Trainer(
        config=config, workload=workload, spread=spread, optimizer=optimizer, session=session
    )

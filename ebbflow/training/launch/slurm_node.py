"""The agent of one node of a Slurm job, which `srun` starts.

    python -m ebbflow.training.launch.slurm_node STORE KEY

The launcher has written the gang's specification to the store before it submitted the job
(`SlurmOrder`), since the node may see nothing of the launcher's machine. Slurm's environment adds
the node's number and node 0's address. Each node writes its result beside the order.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.process import die_with_parent
from ebbflow.core.program import begin_program
from ebbflow.core.store import Store
from ebbflow.core.team_reservations import is_reserved
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.infra.slurm.environment import SlurmEnvironmentError, SlurmTask, first_address
from ebbflow.training.errors import TrainingError
from ebbflow.training.launch.agent import run_gang
from ebbflow.training.launch.messages import GangOutcome, GangSpec

# Libraries such as Lightning would take the agent's task for the place of its ranks.
_OF_TASK = ("PROCID", "LOCALID", "NODEID", "NTASKS", "STEP_ID", "STEPID", "TASKS_PER_NODE")


class SlurmOrder(BaseModel):
    """Instruction to all nodes of one Slurm job."""

    model_config = ConfigDict(frozen=True)

    gang: str  # `GangSpec` of node 0 as JSON
    partition: str | None = None  # None: the cluster's default
    round: int  # number of the attempt within the run, from 1
    most_minutes: int | None = None  # time limit; None: the partition's own
    reason: str = ""  # why this partition

    def spec(self) -> GangSpec:
        return GangSpec.from_json(self.gang)


class NodeResult(BaseModel):
    """Result of one node of a Slurm job: the gang's outcome, or the error with which it ended."""

    model_config = ConfigDict(frozen=True)

    job_id: str
    outcome: Outcome
    step: int | None = None
    weights_sha256: str | None = None
    message: str = ""
    error: str = ""  # "" if the gang ended with an outcome
    curable: bool = False  # whether a new attempt may succeed after the error

    @classmethod
    def of_outcome(cls, job_id: str, outcome: GangOutcome) -> NodeResult:
        values = asdict(outcome)
        return cls.model_validate({"job_id": job_id, **values})


def order_key(run: str, number: int) -> str:
    """Return the key under which the order for a Slurm job is stored in the job's folder of the
    store.
    """
    return f"orders/{run}-slurm-{number}.json"


def result_key(order: str, node: int) -> str:
    return f"{order.removesuffix('.json')}-result-{node}.json"


def make_reservation_check(spec: GangSpec) -> Callable[[], bool] | None:
    """Return a function that checks whether the team's budget has a reservation for this job.

    Return None on nodes other than node 0, and for a job without a team.
    """
    if spec.node != 0 or spec.config.cost.team_file is None:
        return None
    return partial(is_reserved, Store.open(spec.store_uri), spec.job)


def run_node(job_store: Store, key: str) -> int:
    """Run this node's agent, write its result, and return the exit code of the outcome.

    Raises:
        InfraError: the store does not answer, or this process is no task of Slurm.
    """
    order = SlurmOrder.model_validate_json(job_store.get(key))
    task = SlurmTask.from_environment(os.environ)
    if task is None:
        raise SlurmEnvironmentError("no task of Slurm; fix: `ebbflow run --with slurm` starts this")
    folder = Path(tempfile.mkdtemp(prefix=f"ebbflow-{task.job_id}-"))
    spec = replace(
        order.spec(),
        node=task.node,
        main_address=first_address(task.nodes),
        log_folder=str(folder),
    )
    for name in _OF_TASK:
        os.environ.pop(f"SLURM_{name}", None)
    try:
        outcome = run_gang(spec, is_reserved=make_reservation_check(spec))
        result = NodeResult.of_outcome(task.job_id, outcome)
    except (TrainingError, InfraError) as error:
        result = NodeResult(
            job_id=task.job_id,
            outcome=error.outcome,
            error=str(error),
            curable=isinstance(error, InfraError) or error.curable,
        )
        print(f"node {task.node}: {error}", file=sys.stderr, flush=True)
    job_store.put(result_key(key, task.node), result.model_dump_json().encode())
    shutil.rmtree(folder, ignore_errors=True)  # the logs are in the store
    return result.outcome.exit_code


def main(argv: list[str]) -> int:
    guard_terminal()
    die_with_parent()
    uri, key = argv
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    if restarts != "0":
        # `sbatch --no-requeue` does not bind an administrator. The launcher continues the job.
        print(f"Slurm has requeued this job ({restarts} times): left to its launcher", flush=True)
        return Outcome.INTERRUPTED.exit_code
    try:
        return run_node(Store.open(uri), key)
    except InfraError as error:
        print(error, file=sys.stderr, flush=True)
        return error.outcome.exit_code


if __name__ == "__main__":
    begin_program()
    sys.exit(main(sys.argv[1:]))

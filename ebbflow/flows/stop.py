"""`ebbflow stop JOB`: end a running job from anywhere, after its last save and its report."""

import argparse
import sys
from collections.abc import Sequence

from ebbflow.core.errors import Outcome
from ebbflow.core.events import read_events
from ebbflow.core.launchers import HAND_OVER_SECONDS, stop_job
from ebbflow.core.process import run_command
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.cost.jobs import find_job_uri, read_job
from ebbflow.cost.ledger.generations import find_final_outcome
from ebbflow.cost.plan.candidates import read_progress


def main(words: Sequence[str]) -> int:
    """Stop the job that the command line `words` names, and return the exit code."""
    guard_terminal()
    parser = argparse.ArgumentParser(
        prog="ebbflow stop",
        description="Let a running job save, write its report and end, from any machine that "
        "reaches its store. The command that started the job continues it.",
        epilog="exit codes: 0 the job has ended or was not running, 1 it has not ended in time, "
        "4 its store does not answer",
    )
    parser.add_argument("job", help="name of the job, its folder or its URI")
    parser.add_argument("--store", metavar="URI", help="the store of the job")
    arguments = parser.parse_args(list(words)[1:])
    return run_command(lambda: _stop(arguments.job, arguments.store))


def _stop(job: str, store: str | None) -> int:
    job_store = Store.open(find_job_uri(job, store))
    stopped = stop_job(job_store, job, say=print)
    if stopped is None:
        print(f"job {job}: no launcher runs it")
        return 0
    if not stopped.has_left:
        print(
            f"job {job}: {stopped.launcher.describe()} did not leave within "
            f"{HAND_OVER_SECONDS:.0f} s; it ends once it reads the store (ebbflow jobs shows it)",
            file=sys.stderr,
        )
        return Outcome.FAILED.exit_code
    outcome = find_final_outcome(read_events(job_store))
    if outcome is not None and outcome.payload.outcome is Outcome.COMPLETED:
        print(f"job {job}: completed before it could be stopped; ebbflow report {job} shows it")
        return 0
    progress = read_progress(read_job(job, store))
    print(
        f"job {job}: stopped at step {progress.done_steps}, which is committed; "
        f"ebbflow report {job} shows what it cost"
    )
    return 0

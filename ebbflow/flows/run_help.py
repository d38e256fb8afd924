"""The help of `ebbflow run`, in the order in which people need it."""

from __future__ import annotations

import textwrap

from ebbflow.core.errors import Outcome

METAFLOWS = "Metaflow's own"
_USAGE = """\
usage: ebbflow run [CONFIG.yaml | SCRIPT.py] [OPTIONS] [-- ARGUMENTS OF THE SCRIPT]

Train a configuration, a script, or (with neither) the default job. The same command continues a job
that was interrupted.
"""
SECTIONS: dict[str, dict[str, str]] = {
    "the job": {
        "--set KEY=VALUE": "override one key of the configuration; repeatable",
        "--config FILE": "the configuration of a script, or the same as CONFIG.yaml alone",
        "--job NAME": "name of the job; a job of that name is continued. Default: a new name, or the "
        "script's",
        "--from-scratch": "begin anew if no commit of the job can be restored",
        "--accept-rollback": "go on where the store has older commits than the job's events",
        "--take-over": "take the job from another launcher, which saves and leaves",
    },
    "where it runs": {
        "--with local": "run everything on this machine",
        "--with cloud": "run the training steps on the back end of cluster.plan_for",
        "--with batch|kubernetes": "run every step there",
        "--with slurm": "run the training steps as Slurm jobs",
        "--nodes N": "nodes of a script; it then gets preflight, a plan and attempts, as a "
        "configuration does",
        "--ranks N": "processes of a script on each node",
        "--yes": "do not ask before cloud money is spent",
    },
    "what you see": {
        "--verbose": "show Metaflow's log, every check, the full plan and the full report",
        "--tracker KIND": "send the metrics to wandb, mlflow, tensorboard or jsonl; repeatable",
        "--profile FIRST:LAST": "profile these steps of each rank",
        "--memory-snapshot STEP": "record the GPU's memory of this step, for pytorch.org/memory_viz",
    },
    "try it": {
        "--rehearse FAULT": "inject a fault: rank-kill@60%, node-loss@60%[:node=N], notice@60%, "
        "sleep@step:120[:rank=N]",
        "--compare": "after a rehearsal, run the job once more without the fault, and compare the "
        "weights",
        "--certify BOOLEAN": "prove first, on a small run of this job, that it resumes exactly",
    },
    METAFLOWS: {
        "--with DECORATOR": "add a decorator to all steps",
        "--tag TEXT": "annotate the run; repeatable",
        "--max-workers N": "tasks at the same time",
        "--max-num-splits N": "most tasks of a foreach",
        "--max-log-size N": "most megabytes of a task's output",
        "--namespace TEXT": "namespace of the client",
        "--run-id-file FILE": "write the run's id to this file",
    },
}
# What each exit code means, and what to do after it; `docs/exit-codes.md` is made of this.
EXIT_CODE_HELP: dict[Outcome, tuple[str, str]] = {
    Outcome.COMPLETED: (
        "all steps are done and committed",
        "",
    ),
    Outcome.FAILED: (
        "an error of the program, the code of the job or the store",
        "the report names it; fix it and run the same job again",
    ),
    Outcome.CONFIG: (
        "the configuration, or a model of your own, cannot be used",
        "the message has the line and a fix",
    ),
    Outcome.PREFLIGHT: (
        "a check failed, or the plan exceeds budget or deadline; nothing was started",
        "the check has a fix; `ebbflow preflight` repeats it",
    ),
    Outcome.BUDGET: (
        "training stopped at `cost.budget_usd`, with its state saved",
        "continue with a larger budget: `ebbflow run --job NAME --set cost.budget_usd=…`",
    ),
    Outcome.NO_CAPACITY: (
        "no queue can run any pool of the plan, or job after job never started",
        "allow more instance types, zones or markets; `ebbflow supervise` asks again",
    ),
    Outcome.CRASH_LOOP: (
        "the same failure three times, or any ten failures, or too many hours or dollars of starts, without a new commit",
        "the message names the failure, its generations and their cost",
    ),
    Outcome.NON_FINITE: (
        "a loss or gradient was non-finite",
        "look at the step that is named; see `guards.non_finite`",
    ),
    Outcome.DEADLINE: (
        "the deadline passed, with the state saved",
        "continue with a later `cost.deadline_hours`",
    ),
    Outcome.NO_RESTORE: (
        "the job has commits, and none of them can be restored",
        "the message names each damage; `--from-scratch` starts again from step 0",
    ),
    Outcome.ROLLED_BACK: (
        "the store has older commits than the events record",
        "find the missing commits, or `--accept-rollback`",
    ),
    Outcome.INTERRUPTED: (
        "the job was asked to leave, saved its state and left",
        "run the same job again",
    ),
}
_COLUMN = 26
_WIDTH = 100


def render_run_help() -> str:
    """Render the help of `ebbflow run`: its options by purpose, Metaflow's last."""
    lines = [_USAGE]
    for heading, options in SECTIONS.items():
        lines.append(heading)
        for option, text in options.items():
            wrapped = textwrap.wrap(text, _WIDTH - _COLUMN)
            lines.append(f"  {option:{_COLUMN - 2}}{wrapped[0]}")
            lines += [f"{'':{_COLUMN}}{line}" for line in wrapped[1:]]
        lines.append("")
    lines.append(
        f"exit codes: 0 completed, {Outcome.PREFLIGHT.exit_code} refused by a check, "
        f"{Outcome.BUDGET.exit_code} budget, {Outcome.DEADLINE.exit_code} deadline, "
        f"{Outcome.INTERRUPTED.exit_code} interrupted\n(run the same command again); all: "
        "docs/exit-codes.md"
    )
    return "\n".join(lines)

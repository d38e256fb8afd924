"""`ebbflow export slurm CONFIG`: a readable batch script for people who submit by hand.

The script runs the job's ranks under `srun`, without Metaflow and without a launcher. Slurm's own
requeue continues the job after a preemption, a lost node or a time limit, from the last commit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from ebbflow.core.config import LoadedConfig, load_config
from ebbflow.core.errors import Outcome
from ebbflow.core.layout import check_job_name, plain_name
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.infra.slurm.partitions import order_partitions
from ebbflow.infra.slurm.script import (
    BatchScript,
    activation_lines,
    partition_options,
    srun_line,
    warning_seconds,
)

_AGAIN = f"""code=$?
# The job has saved and left, and nobody has cancelled it: the next start continues it.
# A controller that restarts or is busy is asked again.
for try in 1 2 3 4 5 6; do
    [ "$code" = {Outcome.INTERRUPTED.exit_code} ] || break
    state=$(squeue -h -j "$SLURM_JOB_ID" -o %T)
    [ "$state" = RUNNING ] && scontrol requeue "$SLURM_JOB_ID" && break
    [ -z "$state" ] || [ "$state" = RUNNING ] || break
    sleep 10
done
exit "$code\""""


def export_slurm(arguments: argparse.Namespace) -> int:
    """Print the batch script of a job, and return the exit code.

    Args:
        arguments: `config`, `set` and `job` of the command line.

    Raises:
        ConfigError: the configuration has problems.
    """
    loaded = load_config(arguments.config, arguments.set, project_root=PROJECT_ROOT)
    job = arguments.job or plain_name(Path(arguments.config).stem)
    check_job_name(job)
    refusal = refusal_reason(loaded)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return Outcome.CONFIG.exit_code
    print(make_script(loaded, job, arguments.set).render(), end="")
    return 0


def refusal_reason(loaded: LoadedConfig) -> str | None:
    """Return why the job cannot be exported, with a fix, or None if it can."""
    cluster = loaded.config.cluster
    sizes = {
        "cluster.nodes": cluster.nodes,
        "cluster.processes_per_node": cluster.processes_per_node,
    }
    unknown = [name for name, value in sizes.items() if value == "auto"]
    if unknown:
        fix = " ".join(f"--set {name}=N" for name in unknown)
        return f"{' and '.join(unknown)}: auto; sbatch needs numbers\n  fix: {fix}"
    return None


def make_script(loaded: LoadedConfig, job: str, overrides: list[str]) -> BatchScript:
    """Build the batch script that runs a job's ranks with srun.

    Args:
        overrides: values of the --set options.
    """
    config = loaded.config
    slurm = config.slurm
    partition = next(iter(order_partitions(config)), None)
    options = [
        f"--job-name={job}",
        *partition_options(partition),
        f"--nodes={config.cluster.nodes}",
        f"--ntasks-per-node={config.cluster.processes_per_node}",
        f"--output={job}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=USR1@{warning_seconds(config)}",
        *slurm.options,
    ]
    if config.script is None:
        words = ["python", "-m", "ebbflow.training", str(loaded.path), "--job", job]
        for override in overrides:
            words += ["--set", override]
        settings = []
    else:
        words = ["python", config.script, *config.script_args]
        settings = [f"export EBBFLOW_JOB={shlex.quote(job)}", *_script_variables(loaded)]
    lines = [
        "# After a preemption or a lost node Slurm starts this script again (--requeue), and the job",
        "# continues from its last commit. SIGUSR1 before the time limit, and SIGTERM at a preemption,",
        f"# make every rank save within {config.checkpoint.stop_seconds:g} s (checkpoint.stop_seconds).",
        *activation_lines(slurm),
        *settings,
        srun_line(slurm, words, options=["--kill-on-bad-exit=0"]),
        *_AGAIN.splitlines(),
    ]
    return BatchScript(options=options, lines=lines)


def _script_variables(loaded: LoadedConfig) -> list[str]:
    """Return `export` lines with the user's settings, which `attach` reads in the script."""
    values = loaded.config.model_dump(mode="json")
    lines = []
    for name, source in loaded.sources.items():
        section = name.partition(".")[0]
        if name != "store" and (
            source == "default" or section in ("script", "script_args", "slurm")
        ):
            continue
        value = values
        for part in name.split("."):
            value = value[part]
        text = value if isinstance(value, str) else json.dumps(value)
        variable = f"EBBFLOW__{name.upper().replace('.', '__')}"
        lines.append(f"export {variable}={shlex.quote(text)}")
    return lines

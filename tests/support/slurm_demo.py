"""`make slurm-demo`: a run of two nodes on a real Slurm cluster of this machine.

Starts the cluster, runs the default job on two nodes of the preemptible partition, and preempts it
once by a job that keeps the nodes for a while. The run leaves that partition and finishes on the
safe one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.flow import ROOT
from tests.support.slurm_cluster import SlurmCluster, slurm_cluster, why_missing
from tests.support.slurm_flow import SlurmRunner

_RUNS = ROOT / "runs" / "slurm-demo"
_DEADLINE_SECONDS = 900.0
_OCCUPIED_SECONDS = 45  # by the job that preempts
_QUEUE_MINUTES = 0.4  # less, so that the run leaves the occupied partition
_STEPS = 400
_PARTITIONS = [
    {"name": "spot", "preemptible": True, "usd_per_node_hour": 12.0},
    {"name": "safe", "usd_per_node_hour": 20.0},
]


def main() -> int:
    missing = why_missing()
    if missing:
        print(f"make slurm-demo: {missing}", file=sys.stderr)
        return 3
    folder = Path(tempfile.mkdtemp(prefix="ebbflow-slurm-demo-"))
    try:
        with slurm_cluster(folder / "cluster") as cluster:
            version = cluster.ask("scontrol", "--version").strip()
            _say(f"{version}: two nodes, a preemptible partition (spot) and a safe one (safe)")
            runner = SlurmRunner(_RUNS, cluster)
            shutil.rmtree(runner.runs, ignore_errors=True)
            queue = ["--set", f"slurm.queue_minutes={_QUEUE_MINUTES}"]
            words = runner.words("demo", *queue, partitions=_PARTITIONS, steps=_STEPS)
            process = runner.start(*words)
            try:
                code = _follow(runner, cluster, process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            _say(f"the Slurm jobs ended because of: {', '.join(runner.causes())}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "ebbflow", "report", "demo"], env=_environment(runner))
    return code


def _follow(runner: SlurmRunner, cluster: SlurmCluster, process: subprocess.Popen[str]) -> int:
    """Print what the run prints, and preempt its job after the first commit. Return the exit code."""
    limit = time.monotonic() + _DEADLINE_SECONDS
    preempted = False
    with open(runner.log) as output:
        while process.poll() is None and time.monotonic() < limit:
            sys.stdout.write(output.read())
            sys.stdout.flush()
            if not preempted and (runner.runs / "jobs/demo/commits").is_dir():
                preempted = True
                job_id = cluster.preempt(_OCCUPIED_SECONDS)
                _say(f"job {job_id} in the partition safe wants both nodes for 45 s: a preemption")
            time.sleep(0.5)
        sys.stdout.write(output.read())
    return 1 if process.returncode is None else process.returncode


def _environment(runner: SlurmRunner) -> dict[str, str]:
    return {**os.environ, "EBBFLOW_RUNS": str(runner.runs), "PYTHONPATH": str(ROOT)}


def _say(text: str) -> None:
    print(f"— {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

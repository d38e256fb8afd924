"""`make kubernetes-demo`: a run of two Spot nodes "in a cluster" on this machine, one node taken
away in the middle.

Starts an S3 server and a local cluster, runs the flow with every step in a pod, takes the worker's
node away without notice after the first commit, and compares the weights with an uninterrupted run.
Nothing of it is a real cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.batch.demo import _print_new, _say, _store
from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import ROOT, FlowRunner, train_alone
from tests.support.kubernetes.fixture import LocalCluster
from tests.support.kubernetes.flow import KubernetesRunner, cluster

_RUNS = ROOT / "runs" / "kubernetes-demo"
_DEADLINE_SECONDS = 900.0
_STEP_SECONDS = 0.2


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make kubernetes-demo", description="A run on a local Kubernetes cluster."
    )
    parser.add_argument(
        "--with",
        default="kubernetes",
        dest="backend",
        help="kubernetes: every step; cloud: training",
    )
    parser.add_argument("--quiet", action="store_true", help="take no node away")
    parser.add_argument("--outputs", action="store_true", help="print what each pod wrote")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="ebbflow-kubernetes-demo-"))
    try:
        image = with_paced(folder)
        with _store() as store, cluster(folder / "cluster", store, image=image) as running:
            runner = KubernetesRunner(folder / "launcher", store, running)
            runner.environment |= {**image, "EBBFLOW_RUNS": str(_RUNS)}
            _say(f"S3 at {store.endpoint}, the API server at {running.endpoint}")
            settings = {
                **paced_settings(_STEP_SECONDS),
                "training__max_steps": 100,
                "checkpoint__interval_steps": 20,
            }
            process = runner.start("run", "--with", given.backend, *runner.options(**settings))
            try:
                code = _follow(runner, process, take=not given.quiet)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            _tell(running)
            if code == 0:
                _compare(folder, image, settings)
            if given.outputs:
                print(running.outputs())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _follow(runner: KubernetesRunner, process: subprocess.Popen[str], *, take: bool) -> int:
    """Print what the run prints, and take a node away once there is a commit. The exit code."""
    limit = time.monotonic() + _DEADLINE_SECONDS
    with open(runner.log) as output:
        while process.poll() is None and time.monotonic() < limit:
            _print_new(output)
            if take and any("/commits/" in key for key in runner.keys("")):
                pods = runner.cluster.training_pods()
                if pods:
                    node = pods[-1]["spec"]["nodeName"]
                    _say(
                        f"the node of {pods[-1]['metadata']['name']} ({node}) is gone, without "
                        "notice"
                    )
                    runner.cluster.ask("lose", {"node": node})
                    take = False
            time.sleep(0.5)
        _print_new(output)
    if process.poll() is None:
        _say(f"not done within {_DEADLINE_SECONDS:g} s: ended")
        return 1
    return process.returncode


def _compare(folder: Path, image: dict[str, str], settings: dict[str, object]) -> None:
    """Train the same job as two ranks of this machine, undisturbed, and compare the weights."""
    quiet = FlowRunner(folder / "quiet", environment=image)
    alone = train_alone(quiet, **{**settings, **paced_settings(0.0)}, ranks=2)
    report = json.loads((_RUNS / "latest" / "report.json").read_text())
    equal = report["weights_sha256"] == alone["weights_sha256"]
    _say(
        f"weights {report['weights_sha256'][:12]}: {'bit-equal to' if equal else 'NOT those of'} "
        "an uninterrupted run"
    )


def _tell(running: LocalCluster) -> None:
    _say("what the cluster has run:")
    past = running.past()
    for pod in past["pods"]:
        if pod["exit_code"] is None:
            code = "lost"
        else:
            code = f"exit {pod['exit_code']}"
        print(
            f"    {pod['pod']:<32} {pod['node']:<14} {pod['ended'] - pod['started']:6.1f} s  {code}"
        )
    for node in past["nodes"]:
        print(
            f"    node {node['node']:<14} {node['type']} {node['market']:<10} "
            f"{node['ended'] - node['made']:6.1f} s"
        )
    told = running.told()
    for text in [*told["problems"], *told["denied"]]:
        print(f"    {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

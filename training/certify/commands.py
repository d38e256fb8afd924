"""The command, and the same from a process that imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebbflow.infra.config.load import load_config
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import InfraError
from ebbflow.infra.machine import describe_machine
from ebbflow.infra.process import die_with_parent
from ebbflow.infra.program import PROJECT_ROOT, python_path
from ebbflow.training.certify.certificate import certificate, told
from ebbflow.training.certify.runs import (
    DEFAULT_STEPS,
    INTERRUPTIONS,
    NODE_LOST,
    PEACE,
    certified_run,
    recorded,
    small_config,
)
from ebbflow.training.errors import TrainingError

_FEWEST_STEPS = 12  # so that there is a commit before each interruption
_CHILD_SECONDS = 3600.0


def main(arguments: list[str]) -> int:
    """0 when the certificate holds, 1 when not; what could not be run at all has its own exit code."""
    parser = argparse.ArgumentParser(
        prog="ebbflow certify",
        description="Run a job small, with and without interruptions, and compare losses, samples and weights.",
    )
    parser.add_argument("config", nargs="?", help="YAML file, such as configs/laptop.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, model.num_layers=2")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"of each run (default {DEFAULT_STEPS})")
    parser.add_argument(
        "--only", action="append", choices=INTERRUPTIONS, help="one of the interruptions, as often as wanted (all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the certificate there as well")
    parser.add_argument("--folder", type=Path, help="where the runs are made (default: the temporary folder)")
    parser.add_argument("--resolved", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.steps < _FEWEST_STEPS:
        parser.error(f"--steps {given.steps}: at least {_FEWEST_STEPS}, or no commit comes before the interruptions")
    if given.config is None and given.resolved is None:
        parser.error("CONFIG is missing")
    try:
        only = given.only or tuple(INTERRUPTIONS)
        found = certify(_config(given), steps=given.steps, parent=given.folder, interruptions=only)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(told(found), flush=True)
    return 0 if found["holds"] else 1


def _config(given: argparse.Namespace) -> RunConfig:
    if given.resolved is not None:
        die_with_parent()
        return RunConfig.model_validate_json(given.resolved.read_text())
    return load_config(given.config, given.set, project_root=PROJECT_ROOT).config


def certify(
    config: RunConfig,
    *,
    steps: int = DEFAULT_STEPS,
    parent: Path | None = None,
    interruptions: Sequence[str] = tuple(INTERRUPTIONS),
) -> dict[str, Any]:
    """The certificate as JSON. Runs the job once in peace and once under each of `interruptions`; some minutes."""
    from ebbflow.infra.store import Store
    from ebbflow.training.gang import Gang
    from ebbflow.training.workloads.loader import prepare_data, workload_context

    with tempfile.TemporaryDirectory(prefix="ebbflow-certify-", dir=parent) as name:
        folder = Path(name)
        small = small_config(config, store=folder / "store", steps=steps)
        witnessed = recorded(small, folder)
        prepared = prepare_data(witnessed, workload_context(witnessed, Gang(), store=Store.open(small.store)))
        runs = []
        for interruption in (PEACE, *interruptions):
            if interruption == NODE_LOST and small.cluster.nodes == 1:
                continue  # it is the whole gang
            runs.append(certified_run(small, prepared, folder, interruption))
            print(f"{interruption}: step {runs[-1].outcome.step}, {runs[-1].starts} starts", flush=True)
        return certificate(config, small, runs, describe_machine())


def certify_in_child(
    config: RunConfig, *, steps: int = DEFAULT_STEPS, interruptions: Sequence[str] = tuple(INTERRUPTIONS)
) -> dict[str, Any]:
    """The same from a process that imports no torch. Raises TrainingError when no certificate could be made."""
    with tempfile.TemporaryDirectory(prefix="ebbflow-certify-") as folder:
        given, found = Path(folder, "config.json"), Path(folder, "certificate.json")
        given.write_text(config.model_dump_json())
        path = python_path(os.environ.get("PYTHONPATH"))
        command = [sys.executable, "-m", "ebbflow.training", "certify", "--resolved", str(given), "--json", str(found)]
        command += ["--steps", str(steps), *(f"--only={one}" for one in interruptions)]
        command += ["--folder", folder]  # which goes with this one, also when the child is killed
        try:
            done = subprocess.run(
                command, env=dict(os.environ, PYTHONPATH=path), stdin=subprocess.DEVNULL, timeout=_CHILD_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise TrainingError(f"certify: no certificate within {_CHILD_SECONDS:g} s") from None
        if not found.exists():
            raise TrainingError(f"certify: ended with exit code {done.returncode}; its output stands above")
        return json.loads(found.read_text())

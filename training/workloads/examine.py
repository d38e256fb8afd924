"""Check a user's workload in a child process, within a deadline. This module imports no torch.

`ebbflow examine CONFIG [--set KEY=VALUE ...] [--prepare]` prints the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.infra.config.load import load_config
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import InfraError
from ebbflow.infra.footprint import ModelShape
from ebbflow.infra.process import die_with_parent
from ebbflow.infra.program import PROJECT_ROOT, python_path
from ebbflow.training.errors import TrainingError, WorkloadError

EXAMINE_SECONDS = 90.0
# The deadline of a workload's `prepare`, which may download and convert data.
PREPARE_SECONDS = 6 * 3600.0
_LAST_LINES = 3


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Result of examining a workload: the checks that it passed, its measured shape, and its prepared data."""

    text: str  # the checks that were made, and their figures
    shape: ModelShape | None  # the measured shape of the model; None if it was not measured
    # the description of the data that `prepare` returned; None if `prepare` did not run
    prepared: dict[str, Any] | None


def examine(config: RunConfig, *, prepare: bool, seconds: float = EXAMINE_SECONDS) -> Examination:
    """Import, build and try out the configured workload in a child process, within `seconds`.

    With `prepare`, prepare the workload's data first, within 6 hours. Otherwise, a workload that has a `prepare` is
    only imported, because it cannot be tried without its data. Raises WorkloadError if the workload cannot be trained.
    """
    seconds = max(seconds, PREPARE_SECONDS) if prepare else seconds
    with tempfile.TemporaryDirectory(prefix="ebbflow-examine-") as folder:
        given, found = Path(folder, "config.json"), Path(folder, "found.json")
        given.write_text(config.model_dump_json())
        command = [sys.executable, "-m", "ebbflow.training", "examine"]
        command += ["--resolved", str(given), "--output", str(found)]
        what = f"workload {config.workload}"
        output = _run([*command, *(["--prepare"] if prepare else [])], seconds, what, shown=prepare)
        try:
            data = json.loads(found.read_text())
        except (OSError, ValueError):
            last = " | ".join(output.splitlines()[-_LAST_LINES:]) or "its output stands above"
            raise WorkloadError(f"{what}: the process that tried it ended: {last}") from None
    if "problem" in data:
        raise WorkloadError(data["problem"])
    shape = data["shape"] and ModelShape.from_json(data["shape"])
    return Examination(text=data["text"], shape=shape, prepared=data["prepared"])


def main(arguments: list[str]) -> int:
    """Run the command `ebbflow examine`. The child process of the function `examine` runs it too."""
    parser = argparse.ArgumentParser(
        prog="ebbflow examine", description="Try the configured workload and print its model's shape."
    )
    parser.add_argument("config", nargs="?", help="YAML file, such as configs/laptop.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override")
    parser.add_argument("--prepare", action="store_true", help="let it prepare its data first")
    parser.add_argument("--resolved", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    try:
        if given.resolved:
            die_with_parent()
            config = RunConfig.model_validate_json(Path(given.resolved).read_text())
        elif given.config:
            config = load_config(given.config, given.set, project_root=PROJECT_ROOT).config
        else:
            parser.error("CONFIG is missing")
        found = _examine_here(config, prepare=given.prepare)
    except (TrainingError, InfraError) as error:
        if not given.output:
            print(error, file=sys.stderr)
            return error.outcome.exit_code
        found = {"problem": str(error)}
    if given.output:
        Path(given.output).write_text(json.dumps(found))
    else:
        print(json.dumps(found, indent=1))
    return 0


def _examine_here(config: RunConfig, *, prepare: bool) -> dict[str, Any]:
    from dataclasses import replace

    from ebbflow.infra.store import Store
    from ebbflow.training.gang import Gang
    from ebbflow.training.workloads.loader import find_workload, has_prepare, prepare_data, workload_context
    from ebbflow.training.workloads.trial import try_workload

    door = find_workload(config)
    if has_prepare(door) and not prepare:
        text = f"{config.workload or 'text'}: loaded; it is tried once its data are prepared"
        return {"text": text, "shape": None, "prepared": None}
    context = workload_context(config, Gang(), store=Store.open(config.store))
    prepared = prepare_data(config, context)
    trial = try_workload(config, replace(context, prepared=prepared))
    return {**trial.to_json(), "prepared": prepared}


def _run(command: list[str], seconds: float, what: str, *, shown: bool) -> str:
    """Run a command and return its output, or "" if the output goes to the terminal.

    At the deadline, the command and all its children are killed, and a WorkloadError that names `what` is raised.
    """
    with subprocess.Popen(
        command,
        env=dict(os.environ, PYTHONPATH=python_path(), CUDA_VISIBLE_DEVICES=""),
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0] or ""
        except subprocess.TimeoutExpired:
            raise WorkloadError(
                f"{what} was not tried out within {seconds:g} s; fix: see what its module, model or data wait for"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

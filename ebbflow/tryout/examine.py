"""Check a user's workload in a child process, within a deadline. This module imports no torch.

`ebbflow examine CONFIG [--set KEY=VALUE ...] [--prepare]` prints the result as JSON.
"""

import argparse
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.footprint import ModelShape, local_gang
from ebbflow.core.process import die_with_parent
from ebbflow.core.program import PROJECT_ROOT, python_path
from ebbflow.core.store import Store
from ebbflow.training.attach.script_folder import find_script
from ebbflow.training.errors import TrainingError, WorkloadError

EXAMINE_SECONDS = 90.0
# Names the file into which an attached job writes the size of its first steps
PROBE_VARIABLE = "EBBFLOW_PROBE"
# The deadline of a workload's `prepare`, which may download and convert data.
PREPARE_SECONDS = 6 * 3600.0
_LAST_LINES = 3


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Result of examining a workload: passed checks, the model's measured shape, and a description
    of the data.
    """

    text: str  # the checks that were made, and their figures
    shape: ModelShape | None  # the measured shape of the model; None if it was not measured
    # the description of the data that `prepare` returned; None if `prepare` did not run
    prepared: dict[str, Any] | None


def examine(
    config: RunConfig,
    *,
    prepare: bool,
    seconds: float = EXAMINE_SECONDS,
    script_sha256: str | None = None,
) -> Examination:
    """Import, build and try out the configured workload in a child process, within `seconds`.

    If `prepare` is True, prepare the workload's data first, within 6 hours. If it is False, a
    workload that defines `prepare` is only imported, because it cannot be tried without its data.
    Raises WorkloadError if the workload cannot be trained.
    """
    if config.script is not None:
        return examine_script(config, script_sha256)
    if prepare:
        seconds = max(seconds, PREPARE_SECONDS)
    with tempfile.TemporaryDirectory(prefix="ebbflow-examine-") as folder:
        given = Path(folder, "config.json")
        found = Path(folder, "found.json")
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


def examine_script(config: RunConfig, sha256: str | None = None) -> Examination:
    """Run the script on the CPU as a single rank until its attached job has taken two steps, within
    90 s.

    If that fails, the returned shape has the kind "unknown", and the plan cannot estimate steps or
    hours. If the script is not on this machine, `sha256` is the hash of the archive of the script's
    folder.
    """
    assert config.script is not None
    words = {"script": config.script, "words": config.script_args, "script_sha256": sha256}
    prepared = {"fingerprint": "", "weight_unit": "samples", **words}
    script = find_script(config.script, sha256, Store.open(config.store))
    if not script.is_file():
        raise WorkloadError(f"script {script}: no such file; fix: give the path of a Python file")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ebbflow-examine-") as folder:
        found = Path(folder, "found.json")
        own = {
            PROBE_VARIABLE: str(found),
            "EBBFLOW__STORE": folder,
            "EBBFLOW_JOB": "examined",
            "EBBFLOW_SPEC": "",
        }
        own |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        own |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        output = ""
        command = [sys.executable, "-m", "ebbflow.integrations", str(script), *config.script_args]
        try:
            output = _run(
                command, EXAMINE_SECONDS, f"script {script.name}", shown=False, environment=own
            )
            measured = json.loads(found.read_text())
        except (OSError, ValueError, WorkloadError) as error:
            if isinstance(error, WorkloadError):
                last = str(error)
            else:
                last = " | ".join(output.splitlines()[-_LAST_LINES:])
            text = f"{script.name}: not measured, because its first two steps were not seen: {last}"
            return Examination(text=text, shape=_shape({}, config), prepared=prepared)
    shape = _shape(measured, config)
    text = (
        f"{script.name}: {shape.parameters:,} parameters, {shape.flops_per_sample:.3g} floating "
        "point operations per "
    )
    text += (
        f"sample, {shape.samples_per_step} samples per step of all ranks, "
        f"{shape.steps or 'unknown'} steps: measured"
    )
    return Examination(text=f"{text} on the CPU", shape=shape, prepared=prepared)


def _shape(measured: dict[str, Any], config: RunConfig) -> ModelShape:
    """Return a script's `ModelShape`, computed from the measurements of
    `ebbflow.training.attach.guards.probe`.
    """
    gang = local_gang(config)
    if gang is None:
        ranks = 1
    else:
        ranks = gang.ranks
    samples = measured.get("samples", 1.0)
    steps = measured.get("steps") or config.training.max_steps
    return ModelShape(
        parameters=measured.get("parameters", 0),
        largest_unit_parameters=measured.get("parameters", 0),
        activation_bytes_per_sample=0,
        logits_bytes_per_sample=0,
        flops_per_sample=measured.get("flops", 0.0) / samples,
        tokens_per_sample=1,
        units=1,
        weight_unit="samples",
        kind="measured" if measured else "unknown",
        steps=max(1, -(-steps // ranks) if measured.get("divided") else steps),
        samples_per_step=round(samples * ranks),
    )


def main(arguments: list[str]) -> int:
    """Run the command `ebbflow examine`.

    The function `examine` runs this command in its child process.
    """
    parser = argparse.ArgumentParser(
        prog="ebbflow examine",
        description="Try the configured workload and print its model's shape.",
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
        if config.script is not None:
            found = asdict(examine_script(config))
        else:
            found = _examine_here(config, prepare=given.prepare)
    except (TrainingError, InfraError) as error:
        if not given.output:
            raise
        found = {"problem": str(error)}
    if given.output:
        Path(given.output).write_text(json.dumps(found))
    else:
        print(json.dumps(found, indent=1))
    return 0


def _examine_here(config: RunConfig, *, prepare: bool) -> dict[str, Any]:
    from ebbflow.training.gang import Gang
    from ebbflow.training.workload_loader import (
        find_workload,
        has_prepare,
        prepare_data,
        user_code,
        workload_context,
    )
    from ebbflow.tryout.trial import try_workload

    door = find_workload(config)
    if has_prepare(door) and not prepare:
        text = f"{config.workload or 'text'}: loaded; it is tried once its data are prepared"
        # A class method, no method of the same name
        if inspect.ismethod(check := getattr(door, "check", None)):
            with user_code("check"):
                text += (
                    f"; {check(workload_context(config, Gang(), store=Store.open(config.store)))}"
                )
        return {"text": text, "shape": None, "prepared": None}
    context = workload_context(config, Gang(), store=Store.open(config.store))
    prepared = prepare_data(config, context)
    trial = try_workload(config, replace(context, prepared=prepared))
    return {**trial.to_json(), "prepared": prepared}


def _run(
    command: list[str],
    seconds: float,
    what: str,
    *,
    shown: bool,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its output, or "" if the output goes to the terminal.

    At the deadline, kill the command and all its children, and raise a WorkloadError that names
    `what`.
    """
    with subprocess.Popen(
        command,
        env=dict(
            os.environ, PYTHONPATH=python_path(), CUDA_VISIBLE_DEVICES="", **(environment or {})
        ),
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
                f"{what} was not tried out within {seconds:g} s; fix: see what its module, model "
                "or data wait for"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

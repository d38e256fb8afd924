"""`ebbflow examine CONFIG [--set KEY=VALUE ...] [--prepare]`: try a user's workload or script.

The trial runs in a child process with a deadline, and the result is printed as JSON. This module
imports no torch.
"""

import inspect
import json
import math
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.footprint import ModelShape, local_gang
from ebbflow.core.preflight import Check, CheckFinding, PreflightContext
from ebbflow.core.process import OwnProgram, own_program_line
from ebbflow.core.store import Store
from ebbflow.training.attach.script_folder import find_script
from ebbflow.training.errors import TrainingError, WorkloadError
from ebbflow.training.launch.messages import PROBE_VARIABLE
from ebbflow.training.limits import PREPARE_SECONDS
from ebbflow.tryout.harness import (
    ask_tool,
    config_parser,
    given_config,
    run_child,
    single_rank_context,
    torchrun_variables,
)

WORKLOAD_CHECK = "workload"
EXAMINE_SECONDS = 90.0
_LAST_LINES = 3
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


class MeasuredScript(TypedDict, total=False):
    """Measurements of a script's second step (`ebbflow.training.attach.guards.Probe`).

    It is {} if there is no second step. samples, flops: of one rank. divided: whether the ranks
    divide the steps among them.
    """

    samples: float
    steps: int
    divided: bool
    parameters: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Result of examining a workload: passed checks, measured model shape, and description of the
    data.
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
    """Import, build and try the configured workload in a child process, within `seconds`.

    If `prepare` is True, prepare the workload's data first, within 6 hours. If it is False, a
    workload that defines `prepare` is only imported, because it cannot be tried without its data.
    Raises WorkloadError if the workload cannot be trained.
    """
    if config.script is not None:
        return examine_script(config, script_sha256)
    words = []
    if prepare:
        words = ["--prepare"]
        seconds = max(seconds, PREPARE_SECONDS)
    name = f"workload {config.workload}"
    try:
        child = ask_tool(
            "examine", config, words, seconds=seconds, shown=prepare, environment=_WITHOUT_GPUS
        )
    except TimeoutError:
        raise WorkloadError(_too_slow(name, seconds)) from None
    if child.answer is None:
        last = _last_lines(child.output) or "its output stands above"
        raise WorkloadError(f"{name}: the process that tried it ended: {last}")
    if "problem" in child.answer:
        raise WorkloadError(child.answer["problem"])
    shape = child.answer["shape"]
    return Examination(
        text=child.answer["text"],
        shape=None if shape is None else ModelShape.from_json(shape),
        prepared=child.answer["prepared"],
    )


def examine_script(config: RunConfig, sha256: str | None = None) -> Examination:
    """Run the script on the CPU with one rank for two steps of its attached job, within 90 s.

    If that fails, the returned shape has the kind "unknown", and the plan cannot estimate steps or
    hours. If the script is not on this machine, `sha256` is the hash of the archive of the script's
    folder.
    """
    assert config.script is not None
    prepared = {
        "fingerprint": "",
        "weight_unit": "samples",
        "script": config.script,
        "words": config.script_args,
        "script_sha256": sha256,
    }
    script = find_script(config.script, sha256, Store.open(config.store))
    if not script.is_file():
        raise WorkloadError(f"script {script}: no such file; fix: give the path of a Python file")
    measured, problem = _measure_script(script, config.script_args)
    shape = script_shape(measured, config)
    if problem:
        text = f"{script.name}: not measured, because its first two steps were not seen: {problem}"
    else:
        text = (
            f"{script.name}: {shape.parameters:,} parameters, {shape.flops_per_sample:.3g} "
            f"floating point operations per sample, {shape.samples_per_step} samples per step of "
            f"all ranks, {shape.steps or 'unknown'} steps: measured on the CPU"
        )
    return Examination(text=text, shape=shape, prepared=prepared)


def script_shape(measured: MeasuredScript, config: RunConfig) -> ModelShape:
    """Compute a script's `ModelShape` from its measurements."""
    gang = local_gang(config)
    ranks = 1 if gang is None else gang.ranks
    samples = measured.get("samples", 1.0)
    steps = measured.get("steps") or config.training.max_steps
    if measured.get("divided"):
        steps = math.ceil(steps / ranks)
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
        steps=max(1, steps),
        samples_per_step=round(samples * ranks),
    )


def check_workload(context: PreflightContext) -> CheckFinding:
    """Check that your workload can be built and its loss is a sum, or that your script compiles.

    The workload is built in a child process.
    """
    config = context.config
    if config.script is not None:
        return _check_script(Path(config.script), sent_away=context.target not in (None, "local"))
    if config.user_code is None:
        return CheckFinding.skipped("no workload of your own is configured")
    try:
        found = examine(config, prepare=False)
    except WorkloadError as error:
        message, _, fix = str(error).partition("; fix: ")
        command = f"ebbflow examine {context.config_path or 'CONFIG'}"
        return CheckFinding.failed(message, fix or f"see docs/workloads.md, then: {command}")
    return CheckFinding.passed(found.text)


def main(arguments: list[str]) -> int:
    """Run `ebbflow examine`, also as the child process of `examine`."""
    parser = config_parser("examine", "Try the configured workload and print its model's shape.")
    parser.add_argument("--prepare", action="store_true", help="let it prepare its data first")
    given = parser.parse_args(arguments)
    try:
        config = given_config(parser, given)
        if config.script is not None:
            answer = asdict(examine_script(config))
        else:
            answer = _examine_here(config, prepare=given.prepare)
    except (TrainingError, InfraError) as error:
        if given.output is None:
            raise
        answer = {"problem": str(error)}
    if given.output is None:
        print(json.dumps(answer, indent=1))
    else:
        given.output.write_text(json.dumps(answer))
    return 0


def _measure_script(script: Path, words: list[str]) -> tuple[MeasuredScript, str]:
    """Measure a script's second step; return the measurements, or {} and the problem."""
    [variables] = torchrun_variables(1)
    with tempfile.TemporaryDirectory(prefix="ebbflow-examine-") as folder:
        figures = Path(folder, "figures.json")
        variables |= {
            PROBE_VARIABLE: str(figures),
            "EBBFLOW__STORE": folder,
            "EBBFLOW_JOB": "examined",
            "EBBFLOW_SPEC": "",
        }
        try:
            child = run_child(
                own_program_line(OwnProgram.SCRIPT_TRIAL, str(script), *words),
                figures,
                seconds=EXAMINE_SECONDS,
                shown=False,
                environment={**_WITHOUT_GPUS, **variables},
            )
        except TimeoutError:
            return {}, _too_slow(f"script {script.name}", EXAMINE_SECONDS)
    if child.answer is None:
        return {}, _last_lines(child.output)
    return cast(MeasuredScript, child.answer), ""


def _too_slow(name: str, seconds: float) -> str:
    return (
        f"{name} was not tried out within {seconds:g} s; fix: see what its module, model "
        "or data wait for"
    )


def _last_lines(output: str) -> str:
    return " | ".join(output.splitlines()[-_LAST_LINES:])


def _examine_here(config: RunConfig, *, prepare: bool) -> dict[str, Any]:
    from ebbflow.training.workload_loader import (
        find_workload,
        has_prepare,
        prepare_data,
        user_code,
    )
    from ebbflow.tryout.trial import try_workload

    factory = find_workload(config)
    if has_prepare(factory) and not prepare:
        text = f"{config.workload or 'text'}: loaded; it is tried once its data are prepared"
        check = getattr(factory, "check", None)
        # A class method, no method of the same name
        if inspect.ismethod(check):
            with user_code("check"):
                text += f"; {check(single_rank_context(config))}"
        return {"text": text, "shape": None, "prepared": None}
    context = single_rank_context(config)
    prepared = prepare_data(config, context)
    trial = try_workload(config, replace(context, prepared=prepared))
    return {**trial.to_json(), "prepared": prepared}


def _check_script(path: Path, *, sent_away: bool) -> CheckFinding:
    if not path.is_file():
        if sent_away:
            return CheckFinding.skipped(
                "the script is in the archive that the launcher has put into the store"
            )
        return CheckFinding.failed(f"script {path}: no such file", "give the path of a Python file")
    try:
        text = path.read_bytes()
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return CheckFinding.failed(f"{path}:{error.lineno}: {error.msg}", "mend the script")
    except (OSError, ValueError) as error:
        return CheckFinding.failed(f"{path}: {error}", "mend the script")
    if b"ebbflow" not in text:
        return CheckFinding.passed(
            f"{path}: never imports ebbflow, so each attempt starts from the beginning"
        )
    return CheckFinding.passed(f"{path}: valid Python, and imports ebbflow")


CHECKS = [
    Check(
        id=WORKLOAD_CHECK,
        title="own workload can be trained",
        severity="error",
        tier="full",  # it starts a process that imports torch
        deadline_seconds=EXAMINE_SECONDS + 10,
        symptoms=("A01", "D14"),
        run=check_workload,
    )
]

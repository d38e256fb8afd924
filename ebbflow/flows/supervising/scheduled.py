"""The supervisor as a step of a flow that a production scheduler has started."""

# Metaflow's stubs do not re-export its public names.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException

from ebbflow.core.errors import Outcome
from ebbflow.core.layout import plain_name
from ebbflow.core.program import PACKAGE_ROOT
from ebbflow.flows.supervising.child import FlowProcess

_SUPERVISOR = PACKAGE_ROOT / "flows" / "supervise.py"
_SCHEDULERS = ("argo-workflows", "step-functions")
_STARTS = ("schedule", "trigger")
_STORE_VARIABLE = "EBBFLOW__STORE"


class ScheduleError(MetaflowException):
    """Error: a job cannot be scheduled. The message names the fix."""

    headline = "scheduled flow"


def parse_settings(text: str) -> dict[str, str]:
    """Return the text of a configuration file and the store from EBBFLOW__STORE ("" if unset).

    They are in a mapping, as Metaflow's Config requires. The scheduler's container does not have
    the variable.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScheduleError(f"settings: no YAML: {' '.join(str(error).split())}") from error
    if document is not None and not isinstance(document, dict):
        raise ScheduleError("settings: the file has no keys; fix: --config settings FILE.yaml")
    return {"text": text, "store": os.environ.get(_STORE_VARIABLE, "")}


def read_starts(when: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arguments of `@schedule` and `@trigger` by name, for those that are given."""
    unknown = sorted(set(when) - set(_STARTS))
    if unknown:
        raise ScheduleError(
            f"when: {unknown[0]} is no way to start a flow; fix: schedule or trigger, such as "
            '{"schedule": {"daily": true}}'
        )
    return {name: dict(when[name]) for name in _STARTS if when.get(name)}


def check_deployment(arguments: Sequence[str], settings: Mapping[str, str]) -> None:
    """Refuse to deploy a job whose commits would be lost with the scheduler's container.

    settings: as `parse_settings` returns them.
    """
    if "create" not in arguments or not any(name in arguments for name in _SCHEDULERS):
        return
    in_file = (yaml.safe_load(settings["text"]) or {}).get("store")
    store = str(settings["store"] or in_file or "runs")
    source = _STORE_VARIABLE if settings["store"] else "settings"
    if "://" not in store:
        raise ScheduleError(
            f"{source}: store {store} is a folder, which the container does not keep; fix: store: "
            f"s3://bucket/prefix in the file, or {_STORE_VARIABLE}=s3://bucket/prefix"
        )


def supervise_job(settings: Mapping[str, str], job: str, options: str) -> str:
    """Supervise a job in a separate process until it is complete, and return its outcome.

    Args:
        settings: As `parse_settings` returned them when the job was deployed.
        options: Options of `ebbflow supervise` as on a command line.

    Raises:
        ScheduleError: The job did not complete, and a new attempt continues it.
        SystemExit: It has ended for good, after which Metaflow must not retry the step.
    """
    with tempfile.TemporaryDirectory(prefix="ebbflow-scheduled-") as folder:
        file = Path(folder, "settings.yaml")
        file.write_text(settings["text"])
        command = [sys.executable, str(_SUPERVISOR), str(file), "--job", plain_name(job)]
        if settings.get("store"):  # absent from a workflow of an older version
            command += ["--set", f"store={settings['store']}"]
        # The scheduler itself ends what does not leave
        process = FlowProcess(leave_seconds=math.inf)
        process.listen()  # SIGTERM of the scheduler lets the job save
        code = process.run([*command, *shlex.split(options)])
    outcome = next((outcome for outcome in Outcome if outcome.exit_code == code), None)
    if outcome is Outcome.COMPLETED:
        return str(outcome)
    text = f"job {job}: {outcome or 'ended'} (exit code {code}), as printed above"
    if outcome is None or not outcome.is_final:
        raise ScheduleError(text)
    print(text, file=sys.stderr, flush=True)
    raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY)

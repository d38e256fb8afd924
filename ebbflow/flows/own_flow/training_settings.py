"""The configuration of one training in a user's flow."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbflow.core.config.device_settings import most_even_ranks, renew_defaults
from ebbflow.core.config.load import LoadedConfig, load_config, read_given_values
from ebbflow.core.config.problems import ConfigError
from ebbflow.core.config.schema import RunConfig, TrainingConfig
from ebbflow.flows.metaflow_fixes import uses_local_metadata
from ebbflow.flows.own_flow.step_checks import CheckedStep, OwnFlowError
from ebbflow.flows.remote import in_container
from ebbflow.infra.checks.gpu import visible_gpus
from ebbflow.infra.slurm.partitions import gpus_per_node

_SOURCE = "@ebbflow"
_BUDGET = "cost.budget_usd"
GivenValues = dict[str, tuple[object, str]]  # (value, source) by key
# Settings that decide which weights a training ends with
_DECISIVE = (
    "script",
    "script_args",
    "workload",
    "workload_options",
    "model",
    "data",
    "training",
    "parallel",
    "fsdp",
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The checked configuration of one training.

    Attributes:
        config: The configuration.
        document: The job's config.json: "path", "config", "sources" and "script_text_sha256".
        is_own_loop: Whether the loop is the user's, in a script or in the step itself.
    """

    config: RunConfig
    document: dict[str, Any]
    is_own_loop: bool

    def with_budget(self, usd: float) -> TrainingSettings:
        """Return the settings with their budget set to a trial's share of a shared budget."""
        cost = {**self.document["config"]["cost"], "budget_usd": usd}
        config = {**self.document["config"], "cost": cost}
        sources = {**self.document["sources"], _BUDGET: f"{_SOURCE}(budget_of_all)"}
        return replace(
            self,
            config=RunConfig.model_validate_json(json.dumps(config)),
            document={**self.document, "config": config, "sources": sources},
        )

    def find_changes(self, former: dict[str, Any]) -> list[str]:
        """Return the keys of settings that differ from a former config.json and may change the
        weights.
        """
        before = renew_defaults(former)
        now = self.document["config"]
        changed = [key for key in _DECISIVE if before.get(key) != now.get(key)]
        key = "script_text_sha256"
        if former.get(key) != self.document[key]:
            changed.append("the script's text")
        return changed


def make_settings(
    step: CheckedStep,
    *,
    nodes: int,
    file: Path | None,
    overrides: Sequence[str] = (),
    script: Path | None = None,
    words: Sequence[str] = (),
    is_own_loop: bool = False,
) -> TrainingSettings:
    """Merge a configuration file, overrides and the options of `@ebbflow`.

    Args:
        file: YAML file; None for the defaults.
        overrides: "key=value" each.
        script: The script to run; None for a workload, and for a loop in the step itself.
        words: Arguments of the script.
        is_own_loop: Whether the loop is the user's, in a script or in the step.

    Raises:
        ConfigError: The configuration has problems.
        OwnFlowError: It contradicts the flow or the options of `@ebbflow`.
    """
    given = _read_given(step, file, overrides)
    _refuse_team_file(step, given)
    _check_metadata_fixes(step, given)
    on_slurm = _value(given, "cluster.plan_for", "local") == "slurm"
    own = {"store": step.store, **_plan_where_it_runs(step, given)}
    if on_slurm:
        _check_slurm(step, given, nodes, is_loop_in_step=is_own_loop and script is None)
    else:
        _check_contradictions(step, given, nodes)
        own["cluster.nodes"] = str(nodes)
    if step.options.ranks is not None:
        own["cluster.processes_per_node"] = str(step.options.ranks)
    elif on_slurm and _value(given, "cluster.processes_per_node", "auto") == "auto":
        slurm = _load(step, file, overrides).config.slurm
        own["cluster.processes_per_node"] = str(gpus_per_node(slurm))
    elif _value(given, "cluster.processes_per_node", "auto") == "auto":
        is_in_step = is_own_loop and script is None  # where the task is the node's only rank
        ranks = 1 if is_in_step else _fit_ranks(given, nodes, is_own_loop=is_own_loop)
        own["cluster.processes_per_node"] = str(ranks)
    if step.options.budget is not None:
        own[_BUDGET] = repr(step.options.budget)
    elif step.options.budget_of_all is not None and _value(given, _BUDGET, None) is None:
        own[_BUDGET] = repr(step.options.budget_of_all)  # until the trial holds a part of it
    if step.options.deadline is not None:
        own["cost.deadline_hours"] = repr(step.options.deadline)
    if script is not None:
        own["script"] = json.dumps(str(script))
        own["script_args"] = json.dumps(list(words))
    added = [f"{key}={value}" for key, value in own.items()]
    loaded = _load(step, file, [*overrides, *added])
    if is_own_loop:
        document = loaded.script_settings()
    else:
        document = loaded.config.model_dump(mode="json")
    text_sha256 = None
    if script is not None:
        text_sha256 = hashlib.sha256(script.read_bytes()).hexdigest()
    return TrainingSettings(
        config=RunConfig.model_validate_json(json.dumps(document)),
        document={
            "path": "" if file is None else str(file),
            "config": document,
            "sources": loaded.sources | dict.fromkeys(own, _SOURCE),
            "script_text_sha256": text_sha256,
        },
        is_own_loop=is_own_loop,
    )


def as_overrides(settings: Mapping[str, object]) -> list[str]:
    """Convert settings by key to "key=value" strings, as for --set."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def check_configurations(step: CheckedStep) -> None:
    """Check the configuration files that a step's source names, unless their overrides are
    computed.

    Raises OwnFlowError.
    """
    if step.is_gang and step.backend == "batch":
        config = None if step.options.config is None else step.find_file(step.options.config)
        _check_metadata_fixes(step, _read_given(step, config, ()))
    for call in step.calls:
        file = step.find_file(call.file)
        if call.kind != "train" or call.overrides is None or file is None or step.nodes is None:
            continue
        try:
            make_settings(step, nodes=step.nodes, file=file, overrides=as_overrides(call.overrides))
        except ConfigError as error:
            raise OwnFlowError(str(error)) from error


def _load(step: CheckedStep, file: Path | None, overrides: Sequence[str]) -> LoadedConfig:
    folder = step.flow_folder
    return load_config(file, overrides, project_root=folder, cwd=folder)


def _read_given(step: CheckedStep, file: Path | None, overrides: Sequence[str]) -> GivenValues:
    folder = step.flow_folder
    return read_given_values(file, overrides, project_root=folder, cwd=folder)


def _plan_where_it_runs(step: CheckedStep, given: GivenValues) -> dict[str, str]:
    planned = _value(given, "cluster.plan_for", None)
    if step.backend is not None and planned in (None, "local"):
        return {"cluster.plan_for": step.backend}
    if planned is not None:
        return {}
    if step.options.usd_per_node_hour is not None:
        return {"cluster.plan_for": "local"}  # AWS Batch keeps no machine after it
    return {}


def _value(given: GivenValues, key: str, default: object) -> object:
    if key in given:
        return given[key][0]
    return default


def _refuse_team_file(step: CheckedStep, given: GivenValues) -> None:
    key = "cost.team_file"
    if _value(given, key, None) is None:
        return
    (_, source) = given[key]
    raise OwnFlowError(
        f"{step.place}: {source} has {key}, and a step of your own flow reserves nothing in a team's "
        f"budget; fix: leave out {key}, and set cost.budget_usd"
    )


def _check_metadata_fixes(step: CheckedStep, given: GivenValues) -> None:
    """Check that `batch.metadata_fixes` does not refuse what a gang on AWS Batch needs.

    Raises OwnFlowError.
    """
    key = "batch.metadata_fixes"
    is_batch_gang = step.is_gang and step.backend == "batch"
    if not is_batch_gang or _value(given, key, "auto") != "refuse":
        return
    if not uses_local_metadata(sys.argv):
        return
    (_, source) = given[key]
    raise OwnFlowError(
        f"{step.place}: {source} has {key}: refuse, and the gang of step {step.name} runs on AWS "
        "Batch, where Metaflow needs the fixes with local metadata; fix: set "
        "METAFLOW_DEFAULT_METADATA=service and METAFLOW_SERVICE_URL, or leave out the key"
    )


def _check_slurm(
    step: CheckedStep, given: GivenValues, nodes: int, *, is_loop_in_step: bool
) -> None:
    """Check that a training can run on Slurm. Raises OwnFlowError."""
    (_, source) = given["cluster.plan_for"]
    where = f"{step.place}: {source} has cluster.plan_for slurm"
    if is_loop_in_step:
        raise OwnFlowError(
            f"{where}, and current.ebbflow.attach trains in the step itself; fix: "
            "current.ebbflow.run('train.py'), or start the flow inside an allocation (salloc)"
        )
    if nodes > 1:
        raise OwnFlowError(
            f"{where}, and step {step.name} runs on {nodes} nodes (num_parallel); fix: call the step "
            "without num_parallel, and set cluster.nodes"
        )
    if step.options.budget_of_all is not None:
        raise OwnFlowError(
            f"{where}, and budget_of_all needs the cost of a trial before it starts, which Slurm does "
            "not tell; fix: budget= for each trial and usd_per_node_hour of slurm.partitions, or "
            "slurm.budget_node_hours"
        )
    if not isinstance(_value(given, "cluster.nodes", "auto"), int):
        raise OwnFlowError(f"{where} and no number of nodes; fix: cluster.nodes: N")


def _check_contradictions(step: CheckedStep, given: GivenValues, nodes: int) -> None:
    key = "cluster.nodes"
    if _value(given, key, "auto") not in ("auto", nodes):
        (value, source) = given[key]
        raise OwnFlowError(
            f"{step.place}: step {step.name} runs on {nodes} nodes (num_parallel), and {source} "
            f"has {key} {value}; fix: num_parallel={value} before the step, or leave out {key}"
        )
    _check_equal(step, given, _BUDGET, "budget", step.options.budget)
    _check_equal(step, given, "cost.deadline_hours", "deadline", step.options.deadline)
    _check_equal(step, given, "cluster.processes_per_node", "ranks", step.options.ranks)


def _check_equal(
    step: CheckedStep, given: GivenValues, key: str, name: str, option: float | None
) -> None:
    if option is None or _value(given, key, None) in (None, "auto", option):
        return
    (value, source) = given[key]
    raise OwnFlowError(
        f"{step.place}: @ebbflow has {name}={option:g}, and {source} has {key} {value}; fix: give "
        "one of them"
    )


def _fit_ranks(given: GivenValues, nodes: int, *, is_own_loop: bool) -> int:
    """Return the number of ranks per node: at most one per GPU, such that they divide the batch
    evenly.

    A user's own loop, whose batch is unknown, gets one rank per GPU. Without GPUs there is one
    rank.
    """
    if _value(given, "cluster.device", "auto") == "cpu":
        return 1
    gpus = visible_gpus()
    if not in_container():
        gpus = gpus // nodes  # all nodes are on this machine
    defaults = TrainingConfig()
    batch = _value(given, "training.batch_size", defaults.batch_size)
    parts = _value(
        given,
        "training.gradient_accumulation_steps",
        defaults.gradient_accumulation_steps,
    )
    if is_own_loop or not isinstance(batch, int) or not isinstance(parts, int):
        return max(1, gpus)
    return most_even_ranks(gpus, batch, parts * nodes) or 1

"""The configuration of one training in a user's flow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.core.config.load import LoadedConfig, load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.flows.own_flow.step_checks import CheckedStep, OwnFlowError
from ebbflow.flows.remote import in_container
from ebbflow.infra.checks.gpu import visible_gpus

_DEFAULT = "default"  # source of a key that the user did not set
_SOURCE = "@ebbflow"
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

    def find_changes(self, former: dict[str, Any]) -> list[str]:
        """Return the settings that differ from a former config.json and may change the weights."""
        before = former.get("config", {})
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
    given = _load(step, file, overrides)
    _check_contradictions(step, given, nodes)
    own = {
        "store": step.store,
        "cluster.nodes": str(nodes),
        "cluster.processes_per_node": str(_choose_ranks(step, given, nodes, is_own_loop)),
    }
    if step.options.budget is not None:
        own["cost.budget_usd"] = repr(step.options.budget)
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


def _load(step: CheckedStep, file: Path | None, overrides: Sequence[str]) -> LoadedConfig:
    folder = step.flow_folder
    return load_config(file, overrides, project_root=folder, cwd=folder)


def _check_contradictions(step: CheckedStep, given: LoadedConfig, nodes: int) -> None:
    cluster = given.config.cluster
    source = given.sources["cluster.nodes"]
    if source != _DEFAULT and cluster.nodes not in ("auto", nodes):
        raise OwnFlowError(
            f"{step.place}: step {step.name} runs on {nodes} nodes (num_parallel), and {source} "
            f"has cluster.nodes {cluster.nodes}; fix: num_parallel={cluster.nodes} before the "
            "step, or leave out cluster.nodes"
        )
    _check_equal(step, given, "cost.budget_usd", "budget", step.options.budget)
    _check_equal(step, given, "cost.deadline_hours", "deadline", step.options.deadline)
    _check_equal(step, given, "cluster.processes_per_node", "ranks", step.options.ranks)


def _check_equal(
    step: CheckedStep, given: LoadedConfig, key: str, name: str, option: float | None
) -> None:
    section, _, field = key.partition(".")
    value = getattr(getattr(given.config, section), field)
    source = given.sources[key]
    if option is not None and source != _DEFAULT and value not in (None, "auto", option):
        raise OwnFlowError(
            f"{step.place}: @ebbflow has {name}={option:g}, and {source} has {key} {value}; fix: "
            "give one of them"
        )


def _choose_ranks(step: CheckedStep, given: LoadedConfig, nodes: int, is_own_loop: bool) -> int:
    """Return the ranks per node: as chosen, else one per GPU, as far as they divide the batch."""
    cluster = given.config.cluster
    if step.options.ranks is not None:
        return step.options.ranks
    chosen = cluster.processes_per_node
    if isinstance(chosen, int) and given.sources["cluster.processes_per_node"] != _DEFAULT:
        return chosen
    if cluster.device == "cpu":
        return 1
    gpus = visible_gpus()
    if not in_container():
        gpus = gpus // nodes  # all nodes are on this machine
    training = given.config.training
    parts = training.gradient_accumulation_steps * nodes
    for ranks in range(gpus, 1, -1):
        if is_own_loop or training.batch_size % (parts * ranks) == 0:
            return ranks
    return 1

"""The two files that adopting writes: a configuration to build a job on, and Metaflow's settings for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import yaml

from infra.aws.adopt.choosing import Choice
from infra.batch import QueueState
from infra.batch.machines import BATCHS_CHOICE


def configuration_text(choice: Choice, now_utc: float) -> str:
    """YAML that the loader takes as it is: store, cluster.backend, cost.regions and the section batch."""
    document: dict[str, Any] = {} if choice.store is None else {"store": choice.store}
    document |= {"cluster": {"backend": "batch", "nodes": "auto", "processes_per_node": "auto"}}
    document |= {"cost": {"regions": [choice.region]}}
    batch: dict[str, Any] = {"region": choice.region, "queues": [_queue(state, choice) for state in choice.queues]}
    optional = {"light_queue": choice.light_queue, "image": choice.image, "job_role": choice.job_role}
    document["batch"] = batch | {name: value for name, value in optional.items() if value}
    head = [
        "# yaml-language-server: $schema=schema.json",
        f"# Read from account {choice.account} in {choice.region} on {_day(now_utc)} by `python -m infra adopt`.",
        "# Add what is to be trained (model, training, data …), then: python -m infra preflight THIS_FILE",
        *_notes(choice),
        "",
    ]
    return "\n".join(head) + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def settings_text(choice: Choice, now_utc: float) -> str:
    """Lines for a shell: `. FILE`. No secret is among them."""
    head = f"# Metaflow's settings for account {choice.account} in {choice.region}, read on {_day(now_utc)}."
    return "\n".join([head, *_exports(choice.settings)]) + "\n"


def notes_text(choice: Choice) -> str:
    """What a person should know, one line each."""
    return "\n".join(f"adopt: {note}" for note in choice.notes)


def _queue(state: QueueState, choice: Choice) -> dict[str, Any]:
    """As the configuration has it; what is its default is left out."""
    entry: dict[str, Any] = {"name": state.name, "market": state.market}
    if state.instance_types and not set(BATCHS_CHOICE) & set(state.instance_types):  # those nobody can list
        entry["instance_types"] = list(state.instance_types)
    return entry | ({"multi_node": True} if state.name in choice.gang_queues else {})


def _exports(settings: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]


def _notes(choice: Choice) -> list[str]:
    return [f"# - {note}" for note in choice.notes]


def _day(now_utc: float) -> str:
    return datetime.fromtimestamp(now_utc, UTC).strftime("%Y-%m-%d")

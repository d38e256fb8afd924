"""Orders of attempts in Metaflow's Client: also of an attempt whose process was killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from metaflow import Task, namespace
from metaflow.client.core import current_metadata, default_metadata, metadata
from metaflow.metaflow_environment import MetaflowEnvironment
from metaflow.plugins.metadata_providers.local import LocalMetadataProvider

from ebbflow.flows import decorators
from ebbflow.flows.attempts import order as orders
from ebbflow.flows.attempts import placement
from ebbflow.flows.attempts.order import AttemptName, AttemptOrder, try_to_show_in_client
from ebbflow.flows.attempts.placement import PlacementResult


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Metaflow's records in a folder, with one task of a run, which no process ever ran."""
    before = current_metadata
    monkeypatch.setattr(
        "metaflow.plugins.datastores.local_storage.LocalStorage.datastore_root", None
    )
    (tmp_path / ".metaflow").mkdir()
    metadata(f"local@{tmp_path}")
    namespace(None)
    flow = SimpleNamespace(name="Orders")
    environment = MetaflowEnvironment(flow)
    monkeypatch.setenv("USERNAME", "tester")
    made = LocalMetadataProvider(environment, flow, None, None)
    made.register_run_id("r")
    made.register_task_id("r", "train", "t")
    yield made
    metadata(before) if before else default_metadata()


def name_of(attempt: int) -> AttemptName:
    return AttemptName(run="r", step="train", task="t", attempt=attempt)


def orders_in_client() -> list[Any]:
    metadata = sorted(Task("Orders/r/train/t").metadata, key=lambda datum: datum.created_at)
    return [json.loads(datum.value) for datum in metadata if datum.name == "attempt_order"]


def test_the_client_has_the_order_of_each_attempt_of_a_task(provider: Any) -> None:
    for attempt in (0, 1):
        assert try_to_show_in_client(provider, name_of(attempt), {"nodes": attempt + 1}) == ""
        time.sleep(0.002)  # local records are named by the millisecond
    assert orders_in_client() == [{"attempt": 0, "nodes": 1}, {"attempt": 1, "nodes": 2}]


def test_an_attempt_is_sent_after_its_order_is_in_the_client(
    provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the attempt itself has run then, so that its death changes nothing."""
    order = AttemptOrder.stop(orders.Outcome.BUDGET, "spent")
    monkeypatch.setattr(placement, "place_attempt", lambda _: PlacementResult(order=order))
    seen: list[Any] = []

    class Decorator(decorators.CapacityDecorator):
        def __init__(self) -> None:
            self._step = "train"
            self._named = False
            self._parallel = True
            artifacts = dict.fromkeys(("job", "settings", "capacity", "examined"), None)
            parent = {**artifacts, "rounds": 0, "num_nodes": 2}
            self._store = SimpleNamespace(get_task_datastore=lambda *_: parent)

        def _send(self, *_: object) -> None:
            seen.extend(orders_in_client())

    task = SimpleNamespace(
        run_id="r",
        task_id="t",
        input_paths=["r/prepare/p"],
        metadata=provider,
        log=lambda *_, **__: None,
    )
    cli_args = SimpleNamespace(commands=["batch", "step"], task=task, env={})
    Decorator().runtime_step_cli(cli_args, 1, 4, None)  # type: ignore[arg-type]
    assert seen == [{"attempt": 1, **order.brief()}]


def test_metadata_that_hang_or_fail_hold_up_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_CLIENT_SECONDS", 0.05)

    def refuse(*_: object) -> None:
        raise OSError("down")

    silent = SimpleNamespace(register_metadata=lambda *_: time.sleep(5))
    refusing = SimpleNamespace(register_metadata=refuse)
    began = time.monotonic()
    assert "no answer within 0.05 s" in try_to_show_in_client(silent, name_of(0), {})  # type: ignore[arg-type]
    assert "OSError: down" in try_to_show_in_client(refusing, name_of(0), {})  # type: ignore[arg-type]
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("verb", ["gang", "again"])
def test_an_order_of_an_older_ebbflow_is_read(verb: str) -> None:
    order = AttemptOrder.model_validate_json(json.dumps({"does": verb, "nodes": 2}))
    assert (order.does, order.nodes) == ("next", 2)

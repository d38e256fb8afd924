"""What the fixes of Metaflow need of a release: `make metaflow-releases` runs this on several."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from botocore import handlers
from metaflow.datastore.flow_datastore import FlowDataStore
from metaflow.plugins.aws.batch.batch_decorator import BatchDecorator

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.preflight import PreflightContext
from ebbflow.flows import metaflow_fixes
from ebbflow.flows.command_line import CommandLine
from ebbflow.flows.metaflow_fixes import (
    broken_contract,
    check_metadata,
    correct_node_commands,
    fix_process_of_batch,
    needs_fixes,
)

LOCAL = ["train_flow.py", "--metadata", "local", "batch", "step", "train"]


def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("METAFLOW_DEFAULT_METADATA", raising=False)
    config = RunConfig.model_validate(
        {"store": "s3://bucket/prefix", "batch": {"queues": [{"name": "q", "market": "spot"}]}}
    )
    context = PreflightContext(config=config, project_root=Path(), target="batch")
    return check_metadata(context)


def test_the_installed_release_has_all_that_the_fixes_need() -> None:
    assert broken_contract() == "", version("metaflow")


def test_a_release_that_was_never_tried_works_if_its_contracts_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metaflow_fixes, "KNOWN", ((1, 0, 0),))
    assert needs_fixes(LOCAL)
    found = check(monkeypatch)
    assert found.status == "passed" and "was never tried" in found.detail


@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (BatchDecorator, "_wait_for_mapper_tasks", "has no BatchDecorator._wait_for_mapper_tasks"),
        (FlowDataStore, "get_task_datastore", "has no parameter run_id, step_name, task_id"),
    ],
)
def test_a_release_whose_parts_have_changed_is_refused_with_their_name(
    owner: type, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metaflow_fixes, "KNOWN", ((1, 0, 0),))
    if "parameter" in told:
        monkeypatch.setattr(owner, name, lambda self, pathspec: None)
    else:
        monkeypatch.delattr(owner, name)
    assert told in broken_contract()
    assert not needs_fixes(LOCAL)
    found = check(monkeypatch)
    assert found.status == "failed" and told in found.detail
    assert "install a known release (1.0.0)" in (found.fix or "")


@pytest.mark.parametrize(
    ("words", "is_fixed"),
    [
        (["flow.py", "--metadata", "service", "batch", "step", "train"], True),
        (["flow.py", "--metadata", "service", "run", "--with", "batch"], False),
        (["flow.py", "--metadata", "service", "--with", "batch", "step", "train"], False),
    ],
)
def test_only_the_process_that_submits_a_gang_to_batch_corrects_its_request(
    words: list[str], is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "BUILTIN_HANDLERS", [])
    fix_process_of_batch(CommandLine.parse(words))
    called = [handler for _, handler, *_ in handlers.BUILTIN_HANDLERS]
    assert (correct_node_commands in called) == is_fixed

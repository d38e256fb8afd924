"""The records of checkpoints that pass from one part to another: nobody changes one, or mixes up
its fields.
"""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from ebbflow.training.checkpoint import lineage, manifest, reader, restore, retention

RECORDS = {
    kind.__name__: kind
    for module in (lineage, manifest, reader, restore, retention)
    for kind in vars(module).values()
    if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
}
CHANGING = {"GenerationOpening", "ReadFigures", "_Loaded"}
POSITIONAL = {
    "Generation",
    "CommitRef",
    "TracedCommit",
    "WantedRange",
    "_Part",
    "ChunkRead",
    "RetentionChoice",
    "_Reader",
}


@pytest.mark.parametrize("name", sorted(RECORDS.keys() - CHANGING))
def test_a_record_of_a_checkpoint_cannot_be_changed(name: str) -> None:
    kind = RECORDS[name]
    record = object.__new__(kind)
    field = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, None)


@pytest.mark.parametrize("name", sorted(RECORDS.keys() - CHANGING - POSITIONAL))
def test_a_record_of_a_checkpoint_is_made_by_names_only(name: str) -> None:
    parameters = inspect.signature(RECORDS[name]).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (lineage.Generation, {"parent": None, "parent_step": 0}),
        (lineage.TracedCommit, {"refused": False}),
        (
            retention.RetentionPolicy,
            {
                "keep_last": 3,
                "keep_every_steps": None,
                "keep_best": 0,
                "best_metric": "held_out_loss",
                "best_mode": "min",
                "max_total_bytes": None,
                "orphan_seconds": 86_400.0,
            },
        ),
        (retention.WholeCommit, {"metric": None, "pinned": False}),
        (restore.RejectedCommit, {"extra": None}),
    ],
)
def test_the_defaults_of_a_record_are_these(kind: type, defaults: dict[str, object]) -> None:
    fields = dataclasses.fields(kind)
    found = {
        field.name: field.default for field in fields if field.default is not dataclasses.MISSING
    }
    assert found == defaults

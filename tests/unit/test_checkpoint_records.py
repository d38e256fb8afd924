"""The records of checkpoints that pass from one part to another: nobody changes one, or mixes up its fields."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from ebbflow.training.checkpoint import lineage, manifest, reader, restore, retention

NAMED = [
    manifest.CheckpointId,
    manifest.IndexEntry,
    manifest.DataObject,
    manifest.RankIndex,
    manifest.TensorPiece,
    manifest.TensorEntry,
    manifest.Manifest,
    retention.RetentionPolicy,
    retention.WholeCommit,
    restore.RejectedCommit,
    restore.RestoreSeconds,
    restore.RestoreResult,
]
POSITIONAL = [
    lineage.Generation,
    lineage.CommitRef,
    lineage.TracedCommit,
    reader.WantedRange,
    reader.ChunkRead,
    retention.RetentionChoice,
]


@pytest.mark.parametrize("kind", [*NAMED, *POSITIONAL])
def test_a_record_of_a_checkpoint_cannot_be_changed(kind: type) -> None:
    record = object.__new__(kind)
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)


@pytest.mark.parametrize("kind", NAMED)
def test_a_record_of_a_checkpoint_is_made_by_names_only(kind: type) -> None:
    parameters = inspect.signature(kind).parameters.values()
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
    found = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    assert found == defaults

"""Which releases of torch are accepted, and what a new one must have."""

from __future__ import annotations

import pytest
import torch
from torch._C import _distributed_c10d

from ebbflow.training.errors import UnsupportedTorch
from ebbflow.training.torch_names import describe_release, find_missing_names
from ebbflow.training.worker import accept_release


def test_this_release_has_every_name() -> None:
    assert find_missing_names() == []


def test_a_newer_release_is_accepted_with_a_note_and_an_older_one_without() -> None:
    assert describe_release("2.13.1+cu130", (2, 13)) == describe_release("2.7.0", (2, 13)) == ""
    for version in ("2.15.0+cu140", "3.0.0"):
        assert describe_release(version, (2, 13)) == (
            f"torch {version} is newer than the tested 2.13, and has the names that Ebbflow uses"
        )


def test_a_newer_release_without_a_name_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    monkeypatch.delattr(_distributed_c10d, "_WorkerServer")
    assert accept_release("2.13.0") == ""
    with pytest.raises(UnsupportedTorch) as refused:
        accept_release("2.99.0")
    assert str(refused.value) == (
        "torch 2.99.0 is newer than the tested 2.13 and lacks torch.cuda.memory._dump_snapshot; "
        "fix: pip install torch==2.13.0"
    )
    monkeypatch.undo()
    monkeypatch.delattr(_distributed_c10d, "_WorkerServer")
    assert accept_release("2.99.0").endswith(
        "; without torch._C._distributed_c10d._WorkerServer, a hang is explained with less evidence"
    )

"""A store whose listings are late misleads nobody: reports are whole, and no generation's number is
given twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.core.errors import StoreUnavailable
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import Origin, read_events
from ebbflow.core.layout import data_key, index_key
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.training.checkpoint import lineage
from ebbflow.training.checkpoint.commit import await_commit
from ebbflow.training.checkpoint.lineage import (
    newest_generation_number,
    open_generation,
    reachable_commits,
)
from ebbflow.training.checkpoint.manifest import CheckpointId, DataObject, RankIndex
from ebbflow.training.checkpoint.verified_io import Deadline, put_verified
from ebbflow.training.errors import CheckpointError


class LaggingStore(Store):
    """A folder that passes for a remote store, whose listings leave out the keys with `late` in
    them `times` times.
    """

    def __init__(self, folder: Path, late: tuple[str, ...], times: int = 10**6) -> None:
        self.__dict__.update(Store.open(str(folder)).__dict__)
        self.late = late
        self.times = times

    def pages(self, prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        self.times -= 1
        for page in super().pages(prefix, after=after):
            yield [
                meta
                for meta in page
                if self.times < 0 or not any(part in meta.key for part in self.late)
            ]

    def local_path(self, key: str) -> None:
        return None


def write(folder: Path, *, rank: int, steps: int) -> None:
    """One segment for each step."""
    with EventLog(
        Store.open(str(folder)), Origin(job="test", generation=1, node=rank, rank=rank)
    ) as log:
        for step in range(1, steps + 1):
            log.emit("step", step=step, flush=True)


def write_agents(
    folder: Path, *, nodes: int, culprit: str = "", reason: str = "completed", **ended: bool
) -> None:
    for node in range(nodes):
        with EventLog(
            Store.open(str(folder)), Origin(job="test", generation=1, node=node, process="agent")
        ) as log:
            if node == 0:
                log.emit(
                    "generation_started",
                    parent=None,
                    parent_step=0,
                    nodes=nodes,
                    processes_per_node=1,
                )
            log.emit("node_started", ranks=[node], host="here")
            if node == 0:
                log.emit(
                    "generation_ended", reason=reason, culprit=culprit, user_code=False, **ended
                )


def steps_of(store: Store, rank: int) -> list[int | None]:
    return [event.step for event in read_events(store) if event.rank == rank]


@pytest.mark.parametrize(
    "late", [("-000001.",), ("-000003.", "-000004."), ("-000000.", "-000002.")]
)
def test_segments_that_a_listing_left_out_are_asked_for_by_name(
    tmp_path: Path, late: tuple[str, ...]
) -> None:
    write(tmp_path, rank=0, steps=5)
    write(tmp_path, rank=1, steps=4)
    store = LaggingStore(tmp_path, late)
    assert steps_of(store, 0) == [1, 2, 3, 4, 5]
    assert steps_of(store, 1) == [1, 2, 3, 4]


def test_the_log_reader_waits_for_a_rank_that_the_store_does_not_list_yet(tmp_path: Path) -> None:
    write_agents(tmp_path, nodes=2)
    write(tmp_path, rank=0, steps=1)
    write(tmp_path, rank=1, steps=2)
    assert steps_of(LaggingStore(tmp_path, ("/1-1-", "/1-agent-"), times=2), 1) == [1, 2]


def test_a_rank_without_events_is_reported_unless_it_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for folder, culprit in ((tmp_path / "planned", ""), (tmp_path / "killed", "rank 1: killed")):
        write_agents(folder, nodes=2, culprit=culprit)
        write(folder, rank=0, steps=3)
        assert steps_of(LaggingStore(folder, ()), 0) == [1, 2, 3]
        assert ("nothing is listed of events/000001/1-1" in capsys.readouterr().err) is (
            not culprit
        )


def test_ranks_that_were_never_started_are_not_awaited(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_agents(tmp_path, nodes=2, reason="budget", ranks_started=False)
    began = time.monotonic()
    assert steps_of(LaggingStore(tmp_path, ()), 0) == []
    assert time.monotonic() - began < 3.0 and "nothing is listed" not in capsys.readouterr().err


def test_a_generation_continues_once_the_store_lists_it(tmp_path: Path) -> None:
    store = LaggingStore(tmp_path, ("generations/",), times=4)
    assert open_generation(store, run="r", attempt=0).number == 1
    assert store.times < 0, "it did not look again"
    assert newest_generation_number(store) == 1
    assert open_generation(store, run="r", attempt=1).number == 2


def test_a_generation_that_is_never_listed_is_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "LISTING_SECONDS", 0.2)
    with pytest.raises(
        StoreUnavailable, match=r"000001-\w+\.json was put and is not listed within 0\.2 s"
    ):
        open_generation(LaggingStore(tmp_path, ("generations/",)), run="r", attempt=0)


def indexed_save(store: Store) -> CheckpointId:
    """A save of one rank that has nothing, up to its index."""
    generation = open_generation(store, run="r", attempt=0)
    save = CheckpointId(job="test", generation=generation.name, step=5, world_size=1)
    key = data_key(save.generation, save.step, 0)
    data = DataObject(key=key, size=0, crc64nvme="0" * 16, chunk_bytes=1 << 20, chunks=())
    common = {"extra": {}, "optimizer": None, "parent": None}
    put_verified(
        store,
        index_key(save.generation, save.step, 0),
        RankIndex(save=save, rank=0, data=data, items=(), common=common).to_bytes(),
    )
    return save


def test_a_commit_is_reported_once_the_store_lists_it(tmp_path: Path) -> None:
    save = indexed_save(Store.open(str(tmp_path)))
    store = LaggingStore(tmp_path, ("commits/",), times=3)
    attempt = await_commit(store, save, Deadline(30.0))
    assert store.times < 0, "it did not look again"
    assert reachable_commits(store) == [attempt.commit]


def test_a_commit_that_is_never_listed_fails_at_its_deadline(tmp_path: Path) -> None:
    save = indexed_save(Store.open(str(tmp_path)))
    with pytest.raises(
        CheckpointError, match=r"commits/\S+\.json was put and is not listed within 0\.5 s"
    ):
        await_commit(LaggingStore(tmp_path, ("commits/",)), save, Deadline(0.5))

"""The log of events against stores that are slow, away or odd: nothing is doubled, nothing is lost in silence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from infra.errors import StoreError
from infra.event_log import EventLog
from infra.events import EndReason, Event, Origin, read_events
from infra.outcome import Outcome
from infra.store import Store

ORIGIN = Origin(job="test", generation=1, rank=0)
NEVER = 3600.0


class TroubledStore(Store):
    """A local store whose `put` asks `trouble`, which may raise or hang: before the bytes arrive, or after it."""

    def __init__(self, folder: Path, trouble: Callable[[], None], *, arrives: bool = False) -> None:
        inner = Store.open(str(folder))
        self.__dict__.update(inner.__dict__)
        self.trouble, self.arrives = trouble, arrives
        self.puts = 0

    def put(self, key: str, data: bytes) -> None:
        self.puts += 1
        if self.arrives:
            super().put(key, data)
        self.trouble()
        if not self.arrives:
            super().put(key, data)


def failing(times: int, error: BaseException) -> Callable[[], None]:
    """Raises `error` so many times, then nothing."""
    left = [times]

    def trouble() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error

    return trouble


def names(folder: Path) -> list[str]:
    return [event.name for event in read_events(Store.open(str(folder)))]


def test_what_is_written_is_strict_json_and_a_foreign_object_is_refused_at_once(tmp_path: Path) -> None:
    with EventLog(Store.open(str(tmp_path)), ORIGIN) as log:
        log.emit("step", step=1, loss=float("nan"), norms=[1.0, float("inf")], nested={"x": (float("-inf"), 2)})
        for foreign in (Decimal("1"), np.float32(1), Path("x"), object(), {1, 2}):
            with pytest.raises(TypeError):
                log.emit("step", step=2, loss=foreign)
        log.emit("step", step=3, loss=1.5)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = [line for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    data = [json.loads(line, parse_constant=refuse)["data"] for line in lines]
    assert data == [{"loss": None, "norms": [1.0, None], "nested": {"x": [None, 2]}}, {"loss": 1.5}]


@pytest.mark.parametrize("error", [StoreError("away"), RuntimeError("odd"), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("arrives", [False, True])
def test_whatever_a_put_raises_every_event_arrives_once(tmp_path: Path, error: BaseException, arrives: bool) -> None:
    """Also when the put had arrived and only its answer was lost."""
    with EventLog(TroubledStore(tmp_path, failing(3, error), arrives=arrives), ORIGIN, flush_seconds=0.01) as log:
        for number in range(20):
            log.emit(f"{number:02d}")
            time.sleep(0.005)
        log.emit("last", flush=True)
        assert names(tmp_path)[-1] == "last", "durable before emit returns"
    assert names(tmp_path) == [*(f"{number:02d}" for number in range(20)), "last"]


def test_a_flush_that_cannot_be_kept_is_said_within_its_deadline_even_if_the_store_hangs(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    gate = threading.Event()
    log = EventLog(TroubledStore(tmp_path, gate.wait), ORIGIN, flush_seconds=NEVER)
    log.emit("one")
    with pytest.raises(StoreError, match=r"1 events not durable within 0\.1 s: the store has not answered yet"):
        log.flush(deadline_seconds=0.1)
    log.emit("two")
    gate.set()
    log.flush()
    assert names(tmp_path) == ["one", "two"], "nothing was dropped"
    log.close()
    assert capfd.readouterr().err == ""


def test_closing_never_raises_and_tells_how_many_events_are_lost(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    hangs = threading.Event()
    for trouble, cause in ((failing(10**6, StoreError("disk full")), "disk full"), (hangs.wait, "has not answered")):
        log = EventLog(TroubledStore(tmp_path, trouble), ORIGIN, flush_seconds=NEVER)
        for name in ("a", "b", "c"):
            log.emit(name)
        log.close(deadline_seconds=0.3)
        log.close()
        log.emit("late")
        said = capfd.readouterr().err
        assert "3 events lost" in said and cause in said and "'late' was emitted after the log was closed" in said
    hangs.set()


def test_a_remote_store_is_put_to_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local log puts of itself within seconds; a remote one, where each put is paid for, waits longer."""
    stores = [TroubledStore(tmp_path / kind, lambda: None) for kind in ("local", "remote")]
    monkeypatch.setattr(stores[1], "local_path", lambda key: None)
    logs = [EventLog(store, ORIGIN) for store in stores]
    for log in logs:
        log.emit("event")
    limit = time.monotonic() + 8
    while stores[0].puts == 0:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert stores[1].puts == 0
    for log in logs:
        log.close()
    assert [store.puts for store in stores] == [1, 1]


def test_reading_keeps_the_order_of_time_and_does_not_go_one_by_one(tmp_path: Path) -> None:
    """Two reads must be under way at once for any to return."""
    for rank in range(6):
        with EventLog(Store.open(str(tmp_path)), Origin(job="test", generation=1, rank=rank)) as log:
            for number in range(3):
                log.emit("step", step=number * 6 + rank, at=(1000.0 + number * 6 + rank, 0.0))
    together = threading.Barrier(2, timeout=10)
    store = TroubledStore(tmp_path, lambda: None)
    get = store.get

    def get_together(key: str) -> bytes:
        together.wait()
        return get(key)

    store.get = get_together  # type: ignore[method-assign]
    assert [event.step for event in read_events(store)] == list(range(18))
    (tmp_path / "events/000001/0-0-torn.jsonl").write_text('{"name": "st')
    assert [event.step for event in read_events(Store.open(str(tmp_path)))] == list(range(18))
    assert read_events(Store.open(str(tmp_path / "empty"))) == []


def test_an_event_read_back_is_the_event(tmp_path: Path) -> None:
    with EventLog(Store.open(str(tmp_path)), ORIGIN) as log:
        written = log.emit("generation_ended", reason=EndReason.HANG, culprit="×·", outcome=Outcome.FAILED)
    assert read_events(Store.open(str(tmp_path))) == [written] == [Event.from_json(written.to_json())]
    assert not {*map(str, EndReason)} & {*map(str, Outcome)}, "an end is a reason or an outcome, never both"


def test_what_came_before_a_save_is_put_with_it(tmp_path: Path) -> None:
    """A commit whose steps nobody has heard of would leave a hole in the curve of a job that is killed then."""
    with EventLog(Store.open(str(tmp_path)), ORIGIN, flush_seconds=NEVER) as log:
        log.emit("step", step=1)
        log.emit("staged", step=1, bytes=10)
        limit = time.monotonic() + 30
        while names(tmp_path) != ["step", "staged"]:
            assert time.monotonic() < limit, "not put although nobody waits for more"
            time.sleep(0.01)

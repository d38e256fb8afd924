"""The log of events against stores that are slow, away or odd: nothing is doubled, nothing is lost
in silence.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import ebbflow.core.events
from ebbflow.core.errors import Outcome, StoreError, StoreTimeout
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import EndReason, Event, Origin, read_events, read_log
from ebbflow.core.layout import event_key
from ebbflow.core.segments import Damage, seal_segment
from ebbflow.core.store import Store
from ebbflow.cost.__main__ import main as cost_main
from ebbflow.cost.jobs import read_job_log
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.report import build_report
from tests.support.flow import wait_until
from tests.support.timelines import GangLog
from tests.support.timelines import event as made_event
from tests.unit.test_ledger import gang_with_phases_emitted_together
from tests.unit.test_report import interrupted_job

ORIGIN = Origin(job="test", generation=1, rank=0)
NEVER = 3600.0

KINDS = ["lost", "emptied", "truncated", "without its seal", "overwritten", "joined", "copied"]
ENTRIES = ["directory", "pipe", "socket", "loop"]

WRONG = [
    ("step", {"seconds": {"useful_step": "2"}}, "data.seconds.useful_step is '2'"),
    ("step", {"seconds": {"coffee": 2.0}}, "data.seconds.coffee (key) is 'coffee'"),
    ("phase", {"class": "startup"}, "data.seconds is missing"),
    ("generation_started", {"nodes": "two"}, "data.nodes is 'two'"),
    ("node_started", {"ranks": [0, "1"]}, "data.ranks[1] is '1'"),
    (
        "plan",
        {"chosen": {"instance_type": "g5.xlarge", "market": "spot", "usd_per_hour": "free"}},
        "usd_per_hour",
    ),
    (
        "prices",
        {"pools": [{"instance_type": "a", "market": "spot", "changes": [[1, "x"]]}]},
        "changes[0][1] is 'x'",
    ),
    ("outcome", {"outcome": "fine"}, "data.outcome is 'fine'"),
    ("configured", {"settings": "none"}, "data.settings is 'none'"),
    ("batch_attempt", {"job_id": "j", "nodes": None, "node_times": 3}, "data.node_times is 3"),
    ("budget", {}, "data.threshold is missing"),
    ("node_ended", {"seconds": True}, "data.seconds is True"),
    ("node_ended", {"seconds": 1e300}, "data.seconds is 1e+300"),
]


class TroubledStore(Store):
    """A local store whose `put` asks `trouble`, which may raise or hang: before the bytes arrive,
    or after it.
    """

    def __init__(self, folder: Path, trouble: Callable[[], None], *, arrives: bool = False) -> None:
        inner = Store.open(str(folder))
        self.__dict__.update(inner.__dict__)
        self.trouble = trouble
        self.arrives = arrives
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


def test_an_event_is_strict_json_and_foreign_objects_are_refused(
    tmp_path: Path,
) -> None:
    with EventLog(Store.open(str(tmp_path)), ORIGIN) as log:
        log.emit(
            "step",
            step=1,
            loss=float("nan"),
            norms=[1.0, float("inf")],
            nested={"x": (float("-inf"), 2)},
        )
        for foreign in (Decimal("1"), np.float32(1), Path("x"), object(), {1, 2}):
            with pytest.raises(TypeError):
                log.emit("step", step=2, loss=foreign)
        log.emit("step", step=3, loss=1.5)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = []
    for path in tmp_path.rglob("*.jsonl"):
        lines += path.read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    data = [line["data"] for line in found if "seal" not in line]
    assert data == [{"loss": None, "norms": [1.0, None], "nested": {"x": [None, 2]}}, {"loss": 1.5}]


@pytest.mark.parametrize(
    "error", [StoreError("away"), RuntimeError("odd"), SystemExit(1)], ids=repr
)
@pytest.mark.parametrize("arrives", [False, True])
def test_whatever_a_put_raises_every_event_arrives_once(
    tmp_path: Path, error: BaseException, arrives: bool
) -> None:
    """Also when the put had arrived and only its answer was lost."""
    with EventLog(
        TroubledStore(tmp_path, failing(3, error), arrives=arrives), ORIGIN, flush_seconds=0.01
    ) as log:
        for number in range(20):
            log.emit(f"{number:02d}")
            time.sleep(0.005)
        log.emit("last", flush=True)
        assert names(tmp_path)[-1] == "last", "durable before emit returns"
    assert names(tmp_path) == [*(f"{number:02d}" for number in range(20)), "last"]


def test_a_put_that_lands_late_replaces_nothing(tmp_path: Path) -> None:
    """A put without an answer writes its bytes whenever the store comes back, also after the next
    segments.
    """
    unanswered: list[tuple[str, bytes]] = []
    store = TroubledStore(tmp_path, lambda: None)
    away = True
    put = store.put

    def put_or_hang(key: str, data: bytes) -> None:
        if away:
            unanswered.append((key, data))
            raise StoreTimeout("no answer")
        put(key, data)

    store.put = put_or_hang  # type: ignore[method-assign]
    with EventLog(store, ORIGIN, flush_seconds=NEVER) as log:
        log.emit("one")
        with pytest.raises(StoreError):
            log.flush(deadline_seconds=0)
        wait_until("the first put", lambda: unanswered)
        log.emit("two")
        away = False
        log.emit("three", flush=True)
    put(*unanswered[0])
    content = read_log(Store.open(str(tmp_path)))
    assert ([event.name for event in content.events], content.damage) == (
        ["one", "two", "three"],
        (),
    )


def test_a_failed_flush_is_reported_within_its_deadline(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    gate = threading.Event()
    log = EventLog(TroubledStore(tmp_path, gate.wait), ORIGIN, flush_seconds=NEVER)
    log.emit("one")
    with pytest.raises(
        StoreError, match=r"1 events not durable within 0\.1 s: the store has not answered yet"
    ):
        log.flush(deadline_seconds=0.1)
    log.emit("two")
    gate.set()
    log.flush()
    assert names(tmp_path) == ["one", "two"], "nothing was dropped"
    log.close()
    assert capfd.readouterr().err == ""


def test_closing_an_event_log_never_raises_and_counts_lost_events(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    hangs = threading.Event()
    for trouble, cause in (
        (failing(10**6, StoreError("disk full")), "disk full"),
        (hangs.wait, "has not answered"),
    ):
        log = EventLog(TroubledStore(tmp_path, trouble), ORIGIN, flush_seconds=NEVER)
        for name in ("a", "b", "c"):
            log.emit(name)
        log.close(deadline_seconds=1.0)
        log.close()
        log.emit("late")
        said = capfd.readouterr().err
        assert (
            "3 events lost" in said
            and cause in said
            and "'late' was emitted after the log was closed" in said
        )
    hangs.set()


def test_a_remote_store_is_put_to_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local log puts of itself within seconds; a remote one, where each put is paid for, waits
    longer.
    """
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
    assert [store.puts for store in stores] == [2, 1], "the local one once more, to mark its end"


def test_reading_keeps_the_order_of_time_and_does_not_go_one_by_one(tmp_path: Path) -> None:
    """Two reads must be under way at once for any to return."""
    for rank in range(6):
        with EventLog(
            Store.open(str(tmp_path)), Origin(job="test", generation=1, rank=rank)
        ) as log:
            for number in range(3):
                log.emit("step", step=number * 6 + rank, at=(1000.0 + number * 6 + rank, 0.0))
    together = threading.Barrier(2, timeout=60)
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
        written = log.emit(
            "generation_ended", reason=EndReason.HANG, culprit="×·", outcome=Outcome.FAILED
        )
    assert (
        read_events(Store.open(str(tmp_path))) == [written] == [Event.from_json(written.to_json())]
    )
    assert not {*map(str, EndReason)} & {*map(str, Outcome)}, (
        "an end is a reason or an outcome, never both"
    )


def test_events_before_a_save_are_stored_with_it(tmp_path: Path) -> None:
    """A commit whose steps nobody has heard of would leave a hole in the curve of a job that is
    killed then.
    """
    with EventLog(Store.open(str(tmp_path)), ORIGIN, flush_seconds=NEVER) as log:
        log.emit("step", step=1)
        log.emit("staged", step=1, bytes=10)
        limit = time.monotonic() + 30
        while names(tmp_path) != ["step", "staged"]:
            assert time.monotonic() < limit, "not put although nobody waits for more"
            time.sleep(0.01)


def sealed_job(folder: Path, events: Sequence[Event] | None = None) -> None:
    """A job as its agents, ranks and flow steps seal it, a few events to a segment, and its report."""
    store = Store.open(str(folder))
    writers: dict[Origin, EventLog] = {}
    steps = {"preflight": "preflight", "plan": "plan", "prepared": "prepare"}
    for number, event in enumerate(events or interrupted_job()):
        if event.generation:
            process = "agent"
        else:
            process = steps[event.name]
        where = {
            "job": event.job,
            "run": event.run,
            "attempt": event.attempt,
            "generation": event.generation,
        }
        origin = Origin(**where, node=event.node, rank=event.rank, process=process)
        log = writers.setdefault(origin, EventLog(store, origin, flush_seconds=NEVER))
        log.emit(event.name, step=event.step, at=(event.t_wall, event.t_mono), **event.data)
        if number % 5 == 0:
            log.flush()
    for log in writers.values():
        log.close()
    report = build_report(read_log(store).events)
    store.put("report.json", json.dumps(report.to_json(), allow_nan=False).encode())


def folded(folder: Path) -> tuple[str, list[str]]:
    """What the ledger, the figures and the money come to, and the damage that is reported."""
    content = read_job_log(str(folder))
    if content.damage:
        return "", [damage.text for damage in content.damage]
    report = build_report(content.events).to_json()
    return json.dumps({**report, "events": None}), []


@pytest.mark.slow
def test_no_single_bit_flip_changes_the_ledger_in_silence(tmp_path: Path) -> None:
    sealed_job(tmp_path)
    sound, damage = folded(tmp_path)
    assert damage == []
    files = sorted(tmp_path.rglob("events/**/*.jsonl"))
    contents = [path.read_bytes() for path in files]
    chance = random.Random(20261122)
    said = 0
    for _ in range(250):
        (path, content), *_ = chance.choices(
            list(zip(files, contents, strict=True)), [len(part) for part in contents]
        )
        flipped = bytearray(content)
        flipped[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        found, damage = folded(tmp_path)
        assert damage or found == sound, path
        assert all(
            path.name in text or "report.json" in text or "events/" in text for text in damage
        )
        said += bool(damage)
        path.write_bytes(content)
    assert said == 250, "each byte is under a checksum"


def test_a_report_is_rendered_whichever_event_a_bit_flip_destroys(tmp_path: Path, capsys) -> None:
    sealed_job(tmp_path, gang_with_phases_emitted_together())
    destroyed = 0
    for path in sorted(tmp_path.rglob("events/000001/*.jsonl")):
        content = path.read_bytes()
        at = 0
        for line in content.split(b"\n")[:-2]:
            if b'"name":"node_' in line or b'"startup"' in line:
                path.write_bytes(
                    content[: at + 10] + bytes([content[at + 10] ^ 1]) + content[at + 11 :]
                )
                assert cost_main(["report", str(tmp_path)]) == 0, line
                assert f"damaged: events/{path.parent.name}/{path.name}" in capsys.readouterr().out
                destroyed += 1
            at += len(line) + 1
        path.write_bytes(content)
    assert destroyed == 8, "the starts, heartbeats and ends of 2 nodes, the start-ups of 2 ranks"


def placed_job(
    folder: Path, lose: str, events: Sequence[Event] = (), keep_open: str = ""
) -> tuple[Damage, ...]:
    """The damage of a sealed job (`interrupted_job` by default) without the logs of writers that
    `lose` matches.
    """
    sealed_job(folder, events)
    (folder / "report.json").unlink()
    for path in folder.rglob("events/**/*.jsonl"):
        writer = f"{path.parent.name}/{path.name.rsplit('-', 1)[0]}"
        if lose and re.fullmatch(lose, writer):
            path.unlink()
        elif keep_open and re.fullmatch(keep_open, writer):
            lines = path.read_text().splitlines()[:-1]
            path.write_bytes(seal_segment(path.relative_to(folder).as_posix(), lines, last=False))
    return read_log(Store.open(str(folder))).damage


def gang_of_two(reason: str, *, steps: int, seconds: float) -> list[Event]:
    gang = GangLog(1, 10.0, [[0, 1]])
    if steps:
        gang.phase("startup", 5.0)
        gang.steps(1, steps, useful_step=seconds)
    gang.ended(reason, gang.now + 1.0 - gang.start)
    return gang.events


@pytest.mark.parametrize("reason", ["budget", "completed"])
@pytest.mark.parametrize("steps", [0, 2])
def test_ranks_of_a_start_that_is_not_affordable_are_not_missed(
    tmp_path: Path, reason: str, steps: int
) -> None:
    """Their agents open a start, find no money left, and end it with no rank started."""
    damage = placed_job(
        tmp_path, "000001/0-1" if steps else "", gang_of_two(reason, steps=steps, seconds=1.0)
    )
    missed = {damaged.segment for damaged in damage}
    if steps:
        assert missed == {"events/000001/0-1"}
    else:
        assert missed == (
            set() if reason == "budget" else {"events/000001/0-0", "events/000001/0-1"}
        )


@pytest.mark.parametrize(("seconds", "missed"), [(1.0, []), (20.0, ["events/000001/0-1"])])
def test_a_rank_that_may_have_been_killed_before_its_first_put_is_not_missed(
    tmp_path: Path, seconds: float, missed: list[str]
) -> None:
    """Rank 0 began long before the steps did: only steps, which all take together, show that rank 1
    wrote.
    """
    early = made_event("configured", -90.0, generation=1, rank=0, settings=[])
    events = [early, *gang_of_two("rank_killed", steps=3, seconds=seconds)]
    assert [attempt.segment for attempt in placed_job(tmp_path, "000001/0-1", events)] == missed


def test_a_job_of_the_flow_may_go_on_without_agents(tmp_path: Path) -> None:
    """`torchrun -m training --job` has none."""
    events = interrupted_job()
    bare = [
        made_event("step", 100.0 + step, generation=3, rank=0, step=step, loss=1.0, seconds={})
        for step in (9, 10)
    ]
    assert placed_job(tmp_path / "whole", "", [*events, *bare]) == ()
    lost = placed_job(tmp_path / "lost", "000001/1-agent", [*events, *bare])
    assert [damaged.segment for damaged in lost] == ["events/000001/1-agent"]


@pytest.mark.parametrize(
    "process", ["placing-train-3-0", "leftovers", "settle", "submit-train-3-0", "prepare"]
)
def test_a_process_of_the_flow_that_was_killed_is_no_damage(tmp_path: Path, process: str) -> None:
    sealed_job(tmp_path)
    store = Store.open(str(tmp_path))
    lines = [made_event("note", -100.0).to_json()]
    key = event_key(0, 0, process, "000000.killed")
    store.put(key, seal_segment(key, lines, last=False))
    assert read_log(store).damage == (), "of `prepare`, another try is there"


def test_a_step_of_the_flow_without_its_end_is_damage(tmp_path: Path) -> None:
    events = interrupted_job()
    late = made_event("node_heartbeat", 200.0, generation=2, node=0, seconds=1.0)
    (damage,) = placed_job(tmp_path, "", [*events, late], keep_open="000000/0-prepare")
    assert damage.segment == "events/000000/0-prepare" and "no end" in damage.what


def test_large_finite_measurements_are_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Losses and norms just before an overflow are up to 3e38 in float32 and bfloat16."""
    events = interrupted_job()
    large = {"loss": 3.3e38, "gradient_norm": 1.7e308, "learning_rate": -1e300}
    steps = [
        replace(event, data=event.data | large)
        if event.name == "step" and event.step == 7
        else event
        for event in events
    ]
    negative = [
        replace(step, data=step.data | {"loss": -3.4e38})
        if step.step == 8 and "loss" in step.data
        else step
        for step in steps
    ]
    assert placed_job(tmp_path, "", negative) == ()
    assert build_report(read_events(Store.open(str(tmp_path)))).loss_curve[-2:] == [
        (7, 3.3e38),
        (8, -3.4e38),
    ]
    assert (
        cost_main(["report", str(tmp_path)]) == cost_main(["report", str(tmp_path), "--json"]) == 0
    )
    assert "DAMAGED" not in capsys.readouterr().out
    page = render_html(build_report(read_events(Store.open(str(tmp_path)))))
    assert "<polyline " in page and "nan" not in page[page.index("<svg") : page.index("</svg>")]


def replaced_by(kind: str) -> Callable[[Path, Path], None]:
    def make(path: Path, other: Path) -> None:
        content = path.read_bytes()
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                here = os.getcwd()
                os.chdir(path.parent)  # a socket's path must be short
                listening.bind(path.name)
                os.chdir(here)
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "emptied":
            path.write_bytes(b"")
        elif kind == "truncated":
            path.write_bytes(content[: len(content) // 2])
        elif kind == "without its seal":
            path.write_bytes(b"\n".join(content.split(b"\n")[:-2]) + b"\n")
        elif kind == "overwritten":
            path.write_bytes(other.read_bytes())
        elif kind == "joined":
            path.write_bytes(content + other.read_bytes())
        elif kind == "copied":
            path.write_bytes(content)
            path.with_name(path.name.replace("-0000", "-0001")).write_bytes(content)

    return make


@pytest.mark.parametrize("kind", KINDS + ENTRIES)
@pytest.mark.slow
def test_a_changed_event_segment_is_reported(tmp_path: Path, kind: str) -> None:
    sealed_job(tmp_path / "sound")
    sound, _ = folded(tmp_path / "sound")
    files = sorted((tmp_path / "sound").rglob("events/**/*.jsonl"))
    for number, path in enumerate(files):
        folder = tmp_path / str(number)
        for source in [*files, tmp_path / "sound/report.json"]:
            place = folder / source.relative_to(tmp_path / "sound")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.read_bytes())
        victim = folder / path.relative_to(tmp_path / "sound")
        replaced_by(kind)(victim, files[number - 1])
        found, damage = folded(folder)
        writer = victim.name[: victim.name.index("-0000")]
        named = any(writer in text or "report.json" in text for text in damage)
        assert named or (kind == "lost" and found == sound), (path.name, damage)


def test_the_report_command_lists_damaged_segments_and_reports_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sealed_job(tmp_path)
    path = next(tmp_path.rglob("events/000001/0-0-*.jsonl"))
    path.unlink()
    path.mkdir()
    assert cost_main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "DAMAGED: the event log is damaged in" in said
    assert f"events/000001/{path.name}: not a segment but a directory" in said
    assert cost_main(["report", str(tmp_path), "--json"]) == 0
    damage = json.loads(capsys.readouterr().out)["events"]["damage"]
    assert {"segment", "line", "what"} == set(damage[0])


@pytest.mark.parametrize(("name", "data", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_a_value_of_the_wrong_type_is_damage_and_no_traceback(
    tmp_path: Path, name: str, data: dict, said: str, capsys: pytest.CaptureFixture
) -> None:
    """In a sealed segment, as another program may write it, and in one of version 1."""
    store = Store.open(str(tmp_path))
    with EventLog(store, Origin(job="demo", generation=1, process="agent")) as log:
        log.emit(name, **data)
        log.emit("node_heartbeat", seconds=1.0)
    old = json.dumps({**made_event(name, 1.0, generation=1, **data).__dict__, "v": 1})
    store.put(event_key(1, 1, "agent", "000000.a"), f"{old}\n".encode())
    content = read_log(store)
    assert [event.name for event in content.events] == ["node_heartbeat"]
    assert [said in damage.what for damage in content.damage] == [True, True], content.damage
    assert cost_main(["report", str(tmp_path)]) == 0
    assert "DAMAGED: the event log is damaged in 2 places" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "null",
        '"x"',
        "[" * 100_000,
        '{"name": 1}',
        '{"t_wall": NaN}',
        "\\ud800",
        '{"name": "x", "job": 1}',
    ],
)
def test_a_line_that_is_no_event_is_damage(tmp_path: Path, line: str) -> None:
    store = Store.open(str(tmp_path))
    store.put(event_key(1, 0, "agent", "000000.a"), f"{line}\n".encode())
    content = read_log(store)
    assert content.events == [] and len(content.damage) == 1


def test_segments_of_version_1_are_read_as_they_are(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    lines = [json.dumps({**event.__dict__, "v": 1}) for event in interrupted_job()]
    for number in range(3):
        content = "\n".join(lines[number::3]) + "\n"
        store.put(event_key(1, 0, "test", f"{number:06d}.a"), content.encode())
    content = read_log(store)
    assert (len(content.events), content.damage) == (len(lines), ())
    (tmp_path / event_key(1, 0, "test", "000001.a")).unlink()
    assert [damage.segment for damage in read_log(store).damage] == [
        event_key(1, 0, "test", "000001.a")
    ]


def test_a_number_that_an_early_log_wrote_as_nan_is_read_as_null(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    line = json.dumps({**made_event("step", 1.0, rank=0, loss=float("nan")).__dict__, "v": 1})
    assert "NaN" in line
    store.put(event_key(1, 0, "0", "000000.a"), f"{line}\n".encode())
    content = read_log(store)
    assert (content.events[0].data, content.damage) == ({"loss": None}, ())


def test_the_types_of_every_event_are_declared() -> None:
    ours = {
        value
        for name, value in vars(ebbflow.core.events).items()
        if name.isupper() and isinstance(value, str)
    }
    assert ours == set(ebbflow.core.events.PAYLOADS)


def test_a_segment_with_a_huge_number_costs_no_million_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(str(tmp_path))
    key = event_key(1, 0, 0, "999999.ab")
    store.put(key, seal_segment(key, [], last=True))
    asked = []
    get = store.get

    def counted(key: str) -> bytes:
        asked.append(key)
        assert len(asked) < 2000
        return get(key)

    monkeypatch.setattr(store, "get", counted)
    log = read_log(store)
    assert len(log.damage) == 1001
    assert "998999 more segments before it are missing, or its number is wrong" in {
        damage.what for damage in log.damage
    }

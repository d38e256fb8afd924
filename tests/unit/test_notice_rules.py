"""Sources of notices and the thread that polls them, by a clock of their own: times, repetitions,
retries, answers.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ebbflow.infra import notices
from ebbflow.infra.instance import MetadataService
from ebbflow.infra.notices import (
    EffectiveTime,
    MetadataSource,
    MetaflowSource,
    Notice,
    NoticeSource,
    NoticeWatcher,
    RehearsalSource,
    rehearse_notice,
)
from tests.support.clock import StandingClock

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

# The thread. Its waits move the clock, so that it polls as fast as it can.

Script = list[list[Notice] | Exception]

BROKEN = OSError("no answer")

# The metadata service.

INTERRUPTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
Answer = tuple[int, str] | Exception

ADDRESS = "http://127.0.0.1:1"

FAILURES: list[Answer] = [
    (500, ""),
    TimeoutError("x"),
    ConnectionError("x"),
    http.client.BadStatusLine("x"),
    ValueError("x"),
]


class Scripted:
    """A source whose looks have these results; the last look waits until the test is over."""

    may_begin_later = False

    def __init__(
        self,
        clock: StandingClock,
        script: Script,
        *,
        name: str = "scripted",
        poll_seconds: float = 2.0,
    ) -> None:
        self.name = name
        self.poll_seconds = poll_seconds
        self.looks: list[float] = []
        self.done = threading.Event()
        self.released = threading.Event()
        self._clock = clock
        self._script = list(script)

    def begin(self) -> str:
        return ""

    def look(self) -> list[Notice]:
        if not self._script:
            self.done.set()
            self.released.wait(60)
            return []
        self.looks.append(self._clock.seconds)
        result = self._script.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


class Watching:
    def __init__(self, clock: StandingClock) -> None:
        self.clock = clock
        self.began = clock.seconds
        self.watchers: list[NoticeWatcher] = []
        self.sources: list[Scripted] = []

    def run(self, script: Script, **known: Any) -> tuple[NoticeWatcher, list[float]]:
        """Play a script. Returns the watcher, and when each look was made, from the start."""
        source = Scripted(self.clock, script, **known)
        watcher = self.watch(source)
        assert source.done.wait(60)
        return watcher, [seconds - self.began for seconds in source.looks]

    def watch(self, *sources: Any) -> NoticeWatcher:
        self.sources += [source for source in sources if isinstance(source, Scripted)]
        watcher = NoticeWatcher(sources)
        self.watchers.append(watcher)
        return watcher

    def close(self) -> None:
        for source in self.sources:
            source.released.set()
        for watcher in self.watchers:
            watcher.close()


class Service:
    """EC2's metadata service as its client sees it: `tokens` and `answers` come next, the last of
    them forever.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[Answer] = [(200, "a-token")]
        self.answers: dict[str, list[Answer]] = {INTERRUPTION: [(404, "")], REBALANCE: [(404, "")]}
        self.asked: list[tuple[str, str, float]] = []  # what, token or time to live, deadline
        monkeypatch.setattr(MetadataService, "token", self.give_token)
        monkeypatch.setattr(MetadataService, "get", self.give)

    def give_token(self, *, ttl_seconds: int, seconds: float) -> tuple[int, str]:
        self.asked.append(("token", str(ttl_seconds), seconds))
        return self._next(self.tokens)

    def give(self, path: str, token: str, *, seconds: float) -> tuple[int, str]:
        self.asked.append((path, token, seconds))
        return self._next(self.answers[path])

    def _next(self, coming: list[Answer]) -> tuple[int, str]:
        if len(coming) > 1:
            answer = coming.pop(0)
        else:
            answer = coming[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def interrupt(self, document: object) -> None:
        if isinstance(document, str):
            text = document
        else:
            text = json.dumps(document)
        self.answers[INTERRUPTION] = [(200, text)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    return StandingClock(monkeypatch, notices)


def notice_of(
    ends_at: float, *, action: str = "terminate", source: NoticeSource = NoticeSource.METADATA
) -> Notice:
    return Notice(source=source, action=action, ends_at=ends_at)


@pytest.mark.parametrize(
    ("action", "reclaims"),
    [
        ("terminate", True),
        ("stop", True),
        ("hibernate", True),
        ("rebalance", False),
        ("leave", False),
    ],
)
def test_a_notice_reclaims_the_machine_by_three_actions(
    action: str, reclaims: bool, clock: StandingClock
) -> None:
    assert notice_of(clock.seconds + 9.5, action=action).reclaims is reclaims


def test_a_notice_has_no_seconds_left_after_its_time(clock: StandingClock) -> None:
    notice = notice_of(clock.seconds + 9.5)
    assert (notice.seconds_left, notice.detail) == (9.5, "")
    clock.seconds += 9.5
    assert notice.seconds_left == 0.0
    clock.seconds += 0.5
    assert notice.seconds_left == 0.0


@pytest.fixture
def watching(clock: StandingClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread().name != "notices":
                return super().wait(timeout)
            clock.sleep(timeout or 0.0)
            return self.is_set()

    monkeypatch.setattr(notices, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    watching = Watching(clock)
    yield watching
    watching.close()


def test_a_healthy_source_is_polled_at_its_interval(watching: Watching) -> None:
    assert watching.run([[]] * 4)[1] == [0.0, 2.0, 4.0, 6.0]


def test_a_source_that_fails_is_polled_ever_more_rarely_up_to_ten_seconds(
    watching: Watching,
) -> None:
    looks = watching.run([[], BROKEN, BROKEN, BROKEN, BROKEN, [], []])[1]
    assert looks == [0.0, 2.0, 6.0, 14.0, 24.0, 34.0, 36.0]


def test_an_interval_is_doubled_eight_times_at_most(watching: Watching) -> None:
    looks = watching.run([BROKEN] * 11, poll_seconds=0.03125)[1]
    pauses = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert pauses == [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_the_thread_sleeps_for_a_fiftieth_of_a_second_at_least(watching: Watching) -> None:
    assert watching.run([[]] * 3, poll_seconds=0.001)[1] == pytest.approx([0.0, 0.02, 0.04])


def test_a_source_that_blocks_delays_no_other(watching: Watching) -> None:
    blocked = Scripted(watching.clock, [], name="blocked")
    fine = Scripted(watching.clock, [[]] * 3, name="fine")
    watching.watch(blocked, fine)
    assert blocked.done.wait(60) and fine.done.wait(60)


def test_a_source_that_is_not_there_yet_is_started_again_until_it_is(watching: Watching) -> None:
    class Late(Scripted):
        may_begin_later = True
        starts: ClassVar[list[float]] = []

        def begin(self) -> str:
            self.starts.append(watching.clock.seconds - watching.began)
            return "not yet" if len(self.starts) < 9 else ""

    late = Late(watching.clock, [[notice_of(1e9)]])
    watcher = watching.watch(late)
    assert late.done.wait(60)
    assert late.starts == [0.0, 0.25, 0.75, 1.75, 3.75, 7.75, 12.75, 17.75, 22.75]
    assert watcher.problems() == ["scripted: not yet; asked again every 5 s"]
    assert watcher.source_problems() == {"scripted": ""}
    assert len(watcher.new_notices()) == 1


@pytest.mark.parametrize(
    ("script", "problems"),
    [
        ([BROKEN] * 4, 0),
        ([BROKEN] * 5, 1),
        ([BROKEN] * 9, 1),
        ([*[BROKEN] * 4, [], *[BROKEN] * 4], 0),
        ([*[BROKEN] * 5, [], *[BROKEN] * 5], 2),
    ],
)
def test_five_failures_in_a_row_are_a_problem(
    script: Script, problems: int, watching: Watching
) -> None:
    watcher, _ = watching.run(script)
    assert (
        watcher.problems()
        == ["scripted: 5 requests in a row failed, the last: no answer"] * problems
    )
    assert watcher.problems() == []


@pytest.mark.parametrize("error", [OSError("x"), ValueError("x"), RuntimeError("x"), KeyError("x")])
def test_no_error_of_a_source_ends_the_thread(error: Exception, watching: Watching) -> None:
    watcher, _ = watching.run([error, [notice_of(1e9)]])
    assert len(watcher.new_notices()) == 1


@pytest.mark.parametrize(
    ("ends_at", "heard"),
    [(100.0, False), (99.0, False), (98.9375, True), (101.0, False), (1000.0, False)],
)
def test_a_repeated_notice_is_new_if_it_comes_more_than_a_second_sooner(
    ends_at: float, heard: bool, watching: Watching
) -> None:
    began = watching.began
    watcher, _ = watching.run([[notice_of(began + 100.0)], [notice_of(began + ends_at)]])
    assert [notice.ends_at - began for notice in watcher.new_notices()] == [100.0] + [
        ends_at
    ] * heard
    assert watcher.new_notices() == []


@pytest.mark.parametrize(
    ("known", "ends_at", "heard"),
    [
        (-8.0625, 100.0, True),  # at the second look, 2 s later, its time has passed 10.0625 s ago
        (-8.0, 100.0, False),
        (-9.0, -7.9375, True),
        (-9.0, -8.0, False),  # void itself
    ],
)
def test_a_repeated_notice_is_new_if_the_known_one_is_void(
    known: float, ends_at: float, heard: bool, watching: Watching
) -> None:
    began = watching.began
    watcher, _ = watching.run([[notice_of(began + known)], [notice_of(began + ends_at)]])
    assert [notice.ends_at - began for notice in watcher.new_notices()] == [known] + [
        ends_at
    ] * heard


def test_a_repeated_notice_is_compared_with_the_newest_time(watching: Watching) -> None:
    times = [100.0, 50.0, 60.0, 48.5]
    watcher, _ = watching.run([[notice_of(watching.began + seconds)] for seconds in times])
    assert [notice.ends_at - watching.began for notice in watcher.new_notices()] == [
        100.0,
        50.0,
        48.5,
    ]


def test_notices_of_another_source_or_action_are_no_repetition(watching: Watching) -> None:
    first = notice_of(1e9)
    others = [notice_of(1e9, action="stop"), notice_of(1e9, source=NoticeSource.METAFLOW)]
    watcher, _ = watching.run([[first, *others], [*others, first]])
    assert watcher.new_notices() == [first, *others]


def test_sources_are_unavailable_for_the_reason_that_they_give(watching: Watching) -> None:
    class Refusing(Scripted):
        def __init__(self, name: str, answer: str | Exception) -> None:
            super().__init__(watching.clock, [], name=name)
            self.answer = answer

        def begin(self) -> str:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    refusing = [
        Refusing("a", "not here"),
        Refusing("b", PermissionError("no entry")),
        Refusing("c", KeyError()),
    ]
    watcher = watching.watch(*refusing)
    assert watcher.wait_for_first_poll(60), "there is nothing to poll"
    assert watcher.source_problems() == {
        "a": "not here",
        "b": "cannot be watched: no entry",
        "c": "cannot be watched: KeyError",
    }
    assert not any(source.done.is_set() for source in refusing), "none of them is polled"
    watcher.close()


def test_a_notice_watcher_gains_sources_as_they_start(watching: Watching) -> None:
    begins = threading.Event()

    class Slow(Scripted):
        def begin(self) -> str:
            begins.wait(60)
            return ""

    slow = Slow(watching.clock, [[notice_of(1e9)]])
    watcher = watching.watch(slow)
    assert watcher.source_problems() is None and not watcher.wait_for_first_poll(0.0)
    begins.set()
    assert slow.done.wait(60) and watcher.wait_for_first_poll(60)
    assert watcher.source_problems() == {"scripted": ""}
    assert len(watcher.new_notices()) == 1


def test_a_closed_watcher_has_no_thread(watching: Watching) -> None:
    watcher, _ = watching.run([[]])
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "notices"] == [True]
    for source in watching.sources:
        source.released.set()
    watcher.close()
    assert "notices" not in [thread.name for thread in threading.enumerate()]


# Times.


def text_of(clock: StandingClock, seconds: float) -> str:
    return datetime.fromtimestamp(clock.time() + seconds, UTC).isoformat().replace("+00:00", "Z")


def test_a_time_is_converted_once_for_as_long_as_it_is_repeated(clock: StandingClock) -> None:
    ending = EffectiveTime()
    text = text_of(clock, 90.5)
    due = clock.seconds + 90.5
    assert ending.of(text) == pytest.approx(due, abs=1e-3)
    before = ending.of(text)
    clock.seconds += 7.0
    clock.EPOCH = StandingClock.EPOCH + 3600.0  # the system's clock is set
    assert ending.of(text) == before
    assert ending.of(text_of(clock, 90.5)) == pytest.approx(clock.seconds + 90.5, abs=1e-3)


def test_a_time_that_cannot_be_read_is_half_a_minute_away(clock: StandingClock) -> None:
    ending = EffectiveTime()
    began = clock.seconds
    assert ending.of(None) == began + 30.0
    clock.seconds += 5.0
    assert ending.of(None) == began + 30.0
    assert ending.of("soon") == clock.seconds + 30.0


@pytest.mark.parametrize("zone", ["Z", "+00:00", "", "+02:00"])
def test_a_time_is_read_in_its_zone_or_else_in_utc(zone: str, clock: StandingClock) -> None:
    if zone == "+02:00":
        local = 7200.0
    else:
        local = 0.0
    text = text_of(clock, 60.0 + local).removesuffix("Z") + zone
    assert EffectiveTime().of(text) == pytest.approx(clock.seconds + 60.0, abs=1e-3)


# Metaflow's file, and rehearsals.


@pytest.mark.parametrize(("seconds", "heard"), [(60.0, True), (-9.5, True), (-10.5, False)])
def test_metaflows_notice_is_void_ten_seconds_after_its_time(
    seconds: float, heard: bool, clock: StandingClock, tmp_path: Path
) -> None:
    file = tmp_path / "notice"
    text = text_of(clock, seconds)
    file.write_text(f"  {text}\n")
    found = MetaflowSource(file).look()
    assert len(found) == heard
    for notice in found:
        assert (notice.source, notice.action, notice.detail) == (
            "metaflow",
            "terminate",
            f"{file}: {text}",
        )
        assert notice.ends_at == pytest.approx(clock.seconds + seconds, abs=1e-3)


def test_metaflows_file_may_be_missing_empty_or_foreign(
    clock: StandingClock, tmp_path: Path
) -> None:
    file = tmp_path / "notice"
    source = MetaflowSource(file)
    assert (source.begin(), source.look(), source.poll_seconds) == ("", [], 0.5)
    file.write_text(" \n")
    assert source.look() == []
    file.write_bytes(b"\xff" + b"x" * 300)
    [notice] = source.look()
    assert notice.ends_at == clock.seconds + 30.0 and len(notice.detail) == len(f"{file}: ") + 100
    assert (
        MetaflowSource(tmp_path / "missing" / "notice").begin()
        == f"no folder {tmp_path / 'missing'}"
    )


def test_a_rehearsed_notice_is_taken_from_its_file(clock: StandingClock, tmp_path: Path) -> None:
    file = tmp_path / "notice.json"
    rehearse_notice(file, action="stop", seconds=40.0)
    source = RehearsalSource(file)
    assert (source.begin(), source.look(), source.poll_seconds) == ("", [], 0.1)
    assert not file.exists(), "an earlier attempt left it"
    rehearse_notice(file, action="stop", seconds=40.0)
    began = clock.seconds
    clock.seconds += 3.0
    [notice] = source.look()
    assert (notice.source, notice.action, notice.ends_at, notice.heard_at) == (
        "rehearsal",
        "stop",
        began + 40.0,
        began,
    )
    assert not file.exists() and source.look() == []
    file.write_text("{")
    with pytest.raises(OSError, match=r"notice\.json: Expecting"):
        source.look()


@pytest.fixture
def service(clock: StandingClock, monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(monkeypatch)


def open_source() -> MetadataSource:
    return MetadataSource({"AWS_EC2_METADATA_SERVICE_ENDPOINT": ADDRESS})


def begun() -> MetadataSource:
    source = open_source()
    assert source.begin() == ""
    return source


def kinds(service: Service) -> list[str]:
    return [kind for kind, _, _ in service.asked]


def test_a_service_is_asked_for_a_token_and_then_for_both_paths(service: Service) -> None:
    source = begun()
    assert service.asked == [("token", "21600", 0.5)]
    assert source.poll_seconds == 2.0
    service.asked.clear()
    assert source.look() == []
    assert service.asked == [(INTERRUPTION, "a-token", 5.0), (REBALANCE, "a-token", 5.0)]


def test_outside_of_ec2_nothing_is_asked(service: Service, tmp_path: Path) -> None:
    assert MetadataSource({}, system=tmp_path).begin() == "this machine is not on EC2"
    assert service.asked == []


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ((403, ""), f"{ADDRESS} is turned off (403)"),
        ((401, ""), f"{ADDRESS} gives no token: status 401"),
        ((500, ""), f"{ADDRESS} gives no token: status 500"),
        ((200, ""), f"{ADDRESS} gives no token: status 200"),
        (ConnectionError("refused"), f"{ADDRESS} does not answer: refused"),
        (OSError(), f"{ADDRESS} does not answer: OSError"),
        (http.client.BadStatusLine("x"), f"{ADDRESS} does not answer: x"),
        (ValueError("no port"), f"{ADDRESS} does not answer: no port"),
    ],
)
def test_a_service_that_refuses_a_token_is_not_watched(
    token: Answer, why: str, service: Service
) -> None:
    service.tokens = [token]
    assert open_source().begin() == why
    assert kinds(service) == ["token"], "it is not asked without a token"


@pytest.mark.parametrize(
    "token", [(400, "a"), (404, "a"), (405, "a"), (501, "a"), TimeoutError("x")]
)
@pytest.mark.parametrize("status", [200, 404])
def test_a_service_without_tokens_is_watched_by_version_1(
    token: Answer, status: int, service: Service
) -> None:
    service.tokens = [token]
    service.answers[INTERRUPTION] = [(status, "{}")]
    source = begun()
    assert service.asked[1:] == [(INTERRUPTION, "", 1.0)]
    service.asked.clear()
    assert len(source.look()) == (1 if status == 200 else 0)
    assert service.asked == [(INTERRUPTION, "", 5.0), (REBALANCE, "", 5.0)], (
        "it is asked for no token any more"
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (TimeoutError("x"), ", and no other answer"),
        (http.client.BadStatusLine("x"), ", and no other answer"),
        (ValueError("x"), ", and no other answer"),
        ((401, ""), ", while it answers 401 without one"),
        ((500, ""), ", while it answers 500 without one"),
    ],
)
def test_a_service_that_answers_neither_way_is_not_watched(
    answer: Answer, why: str, service: Service
) -> None:
    service.tokens = [TimeoutError("x")]
    service.answers[INTERRUPTION] = [answer]
    assert open_source().begin() == f"{ADDRESS} gave no token within 0.5 s{why}"


def test_the_hop_limit_is_named_only_if_no_request_for_a_token_was_answered(
    service: Service,
) -> None:
    service.answers[INTERRUPTION] = [(401, "")]
    service.tokens = [TimeoutError("x")]
    source = open_source()
    reasons = [source.begin() for _ in range(4)]
    deadlines = [seconds for kind, _, seconds in service.asked if kind == "token"]
    assert deadlines == [0.5, 2.0, 5.0, 5.0]
    named = ["--http-put-response-hop-limit" in reason for reason in reasons]
    assert named == [False, False, True, True]
    service.tokens = [(503, ""), TimeoutError("x")]
    assert "status 503" in source.begin()
    assert "hop" not in source.begin(), "the service did answer"


def test_a_token_is_renewed_after_half_its_life(service: Service, clock: StandingClock) -> None:
    source = begun()
    clock.seconds += 3 * 3600 - 0.5
    source.look()
    assert kinds(service).count("token") == 1
    clock.seconds += 0.5
    service.tokens = [(200, "new")]
    service.asked.clear()
    source.look()
    assert service.asked[:2] == [("token", "21600", 5.0), (INTERRUPTION, "new", 5.0)]
    clock.seconds += 3 * 3600
    service.tokens = [(500, "")]
    with pytest.raises(OSError, match="gives no token: status 500"):
        source.look()


def test_a_refused_token_is_renewed_once(service: Service) -> None:
    source = begun()
    service.tokens = [(200, "new")]
    service.answers[INTERRUPTION] = [(401, ""), (200, "{}"), (401, "")]
    service.asked.clear()
    assert len(source.look()) == 1
    assert service.asked[:3] == [
        (INTERRUPTION, "a-token", 5.0),
        ("token", "21600", 5.0),
        (INTERRUPTION, "new", 5.0),
    ]
    service.asked.clear()
    with pytest.raises(OSError, match=f"{INTERRUPTION} answers 401"):
        source.look()
    assert kinds(service) == [INTERRUPTION, "token", INTERRUPTION]
    service.tokens = [(403, "")]
    with pytest.raises(OSError, match="is turned off"):
        source.look()


def test_version_1_has_no_token_to_renew(service: Service) -> None:
    service.tokens = [(404, "")]
    source = begun()
    service.answers[INTERRUPTION] = [(401, "")]
    service.asked.clear()
    with pytest.raises(OSError, match=f"{INTERRUPTION} answers 401"):
        source.look()
    assert kinds(service) == [INTERRUPTION]


@pytest.mark.parametrize("answer", FAILURES)
def test_a_first_request_that_fails_is_an_error(answer: Answer, service: Service) -> None:
    source = begun()
    service.answers[INTERRUPTION] = [answer]
    service.answers[REBALANCE] = [(200, "{}")]
    with pytest.raises(OSError):
        source.look()
    assert REBALANCE not in kinds(service)


@pytest.mark.parametrize("answer", FAILURES)
def test_an_interruption_counts_although_the_second_request_fails(
    answer: Answer, service: Service
) -> None:
    source = begun()
    service.answers[REBALANCE] = [answer]
    with pytest.raises(OSError):
        source.look()
    service.interrupt({"action": "stop"})
    assert [notice.action for notice in source.look()] == ["stop"]


def test_an_interruption_and_a_recommendation_are_two_notices(
    service: Service, clock: StandingClock
) -> None:
    source = begun()
    service.interrupt({"action": "hibernate", "time": text_of(clock, 120.0)})
    service.answers[REBALANCE] = [(200, "r" * 300)]
    interruption, recommendation = source.look()
    assert (interruption.source, interruption.action) == ("metadata", "hibernate")
    assert interruption.ends_at == pytest.approx(clock.seconds + 120.0, abs=1e-3)
    assert '"hibernate"' in interruption.detail
    assert (recommendation.source, recommendation.action) == ("metadata", "rebalance")
    assert (recommendation.ends_at, recommendation.detail) == (float("inf"), "r" * 200)


@pytest.mark.parametrize(
    ("document", "action"),
    [
        ({"action": "terminate"}, "terminate"),
        ({"action": "stop"}, "stop"),
        ({"action": "rebalance"}, "terminate"),
        ({"action": ""}, "terminate"),
        ({"action": []}, "terminate"),
        ({}, "terminate"),
        ([], "terminate"),
        ("x" * 300, "terminate"),
    ],
)
def test_an_interruption_that_cannot_be_read_takes_the_machine_in_half_a_minute(
    document: object, action: str, service: Service, clock: StandingClock
) -> None:
    source = begun()
    service.interrupt(document)
    [notice] = source.look()
    assert (notice.action, notice.ends_at) == (action, clock.seconds + 30.0)
    assert notice.detail == (document if isinstance(document, str) else json.dumps(document))[:200]


@pytest.mark.parametrize(("seconds", "heard"), [(-9.5, True), (-10.5, False)])
def test_an_interruption_is_void_ten_seconds_after_its_time(
    seconds: float, heard: bool, service: Service, clock: StandingClock
) -> None:
    source = begun()
    service.interrupt({"action": "stop", "time": text_of(clock, seconds)})
    assert len(source.look()) == heard

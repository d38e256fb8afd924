"""Notices that a machine is about to go: each source, healthy and broken, and the one thread that
watches them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.infra import notices as notices_module
from ebbflow.infra.instance import MetadataService
from ebbflow.infra.notices import (
    MetadataSource,
    MetaflowSource,
    Notice,
    NoticeWatcher,
    RehearsalSource,
    Source,
    rehearse_notice,
)
from tests.support.flow import wait_until
from tests.support.imds import FakeMetadata

SOON = 0.05
Watching = Callable[..., NoticeWatcher]


@pytest.fixture
def service() -> Iterator[FakeMetadata]:
    with FakeMetadata() as fake:
        yield fake


def source_of(service: FakeMetadata) -> MetadataSource:
    return MetadataSource({"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.address}, poll_seconds=SOON)


def first(watcher: NoticeWatcher) -> Notice:
    return wait_until("a notice", watcher.new_notices, timeout=60)[0]


@pytest.fixture
def watching() -> Iterator[Watching]:
    started: list[NoticeWatcher] = []

    def start(*sources: Source) -> NoticeWatcher:
        watcher = NoticeWatcher(sources)
        started.append(watcher)
        wait_until("the decision", lambda: watcher.source_problems() is not None, timeout=60)
        return watcher

    yield start
    for watcher in started:
        watcher.close()


def test_a_source_that_cannot_be_begun_silences_no_other(
    tmp_path: Path, watching: Watching
) -> None:
    class Refused(MetaflowSource):
        def begin(self) -> str:
            raise PermissionError("no entry")  # what a folder of somebody else's gives

    path = tmp_path / "rehearsed.json"
    watcher = watching(Refused(tmp_path / "metaflow"), RehearsalSource(path))
    assert watcher.source_problems() == {"metaflow": "cannot be watched: no entry", "rehearsal": ""}
    rehearse_notice(path, action="terminate", seconds=60)
    assert first(watcher).source == "rehearsal"


def test_a_time_without_a_zone_is_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metaflow"
    path.write_text(time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 60)))
    monkeypatch.setenv("TZ", "UTC-5")
    time.tzset()
    try:
        [notice] = MetaflowSource(path).look()
    finally:
        monkeypatch.undo()
        time.tzset()
    assert 40 < notice.seconds_left <= 60


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_a_spot_interruption_notice_has_its_time(
    service: FakeMetadata, action: str, watching: Watching
) -> None:
    watcher = watching(source_of(service))
    assert watcher.source_problems() == {"metadata": ""}
    service.interrupt(120, action)
    notice = first(watcher)
    assert (notice.source, notice.action, notice.reclaims) == ("metadata", action, True)
    assert 100 < notice.seconds_left < 122
    time.sleep(4 * SOON)
    assert watcher.new_notices() == [], "the same notice is no news"
    service.interrupt(60, action)
    assert first(watcher).seconds_left < 62, "one that comes sooner is"


def test_words_that_cannot_be_read_are_a_notice_all_the_same(
    service: FakeMetadata, watching: Watching
) -> None:
    service.answers["/latest/meta-data/spot/instance-action"] = "<html>"
    [notice] = wait_until("a notice", watching(source_of(service)).new_notices, timeout=60)
    assert notice.action == "terminate" and 0 < notice.seconds_left <= 30


def test_a_recommendation_has_no_time_and_takes_no_machine(
    service: FakeMetadata, watching: Watching
) -> None:
    service.recommend_rebalance()
    notice = first(watching(source_of(service)))
    assert (notice.action, notice.reclaims, notice.ends_at) == ("rebalance", False, math.inf)


def test_a_token_that_is_refused_is_replaced(service: FakeMetadata, watching: Watching) -> None:
    watcher = watching(source_of(service))
    service.token = "another"
    service.interrupt(120)
    assert first(watcher).action == "terminate"
    assert sum(method == "PUT" for method, _ in service.asked) == 2


def test_without_a_token_version_1_is_watched_where_it_answers(
    service: FakeMetadata, watching: Watching
) -> None:
    service.hop_limit = service.version_1 = True
    watcher = watching(source_of(service))
    assert watcher.source_problems() == {"metadata": ""}
    service.interrupt(120)
    assert first(watcher).action == "terminate"


def test_a_service_that_knows_no_tokens_is_watched_by_version_1(
    service: FakeMetadata, watching: Watching
) -> None:
    service.token_status = 405
    service.version_1 = True
    watcher = watching(source_of(service))
    assert watcher.source_problems() == {"metadata": ""}
    service.interrupt(120)
    assert first(watcher).action == "terminate"


def test_a_spot_notice_survives_a_failed_second_request(
    service: FakeMetadata, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = MetadataService.get

    def refuse(
        self: MetadataService, path: str, *args: object, **options: float
    ) -> tuple[int, str]:
        if "recommendations" in path:
            return (500, "")
        return get(self, path, *args, **options)

    monkeypatch.setattr(MetadataService, "get", refuse)
    watcher = watching(source_of(service))
    service.interrupt(120)
    assert first(watcher).action == "terminate"


@pytest.mark.parametrize("kind", ["silent", "gone", "off", "elsewhere"])
def test_a_service_that_is_not_there_is_found_out_at_once(
    service: FakeMetadata, kind: str, tmp_path: Path, watching: Watching
) -> None:
    source: Source = source_of(service)
    service.silent = kind == "silent"
    if kind == "off":
        service.token_status = 403
    else:
        service.token_status = 200
    if kind == "gone":
        service.close()
    if kind == "elsewhere":
        source = MetadataSource({}, system=tmp_path)
    began = time.monotonic()
    [why] = (watching(source).source_problems() or {}).values()
    assert time.monotonic() - began < 20
    said = {
        "silent": "no token within 0.5 s, and no other answer",
        "gone": "does not answer",
        "off": "turned off",
        "elsewhere": "not on EC2",
    }
    assert said[kind] in why


def test_a_silent_notice_source_is_reported_once_and_recovers(
    service: FakeMetadata, watching: Watching
) -> None:
    watcher = watching(source_of(service))
    service.token_status = 500
    service.token = "another"
    [problem] = wait_until("the problem", watcher.problems, timeout=60)
    assert "metadata: 5 requests in a row failed" in problem
    service.token_status = 200
    service.interrupt(120)
    assert first(watcher).action == "terminate"
    assert watcher.problems() == []


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def test_metaflows_file_counts_when_it_is_whole_and_not_past(
    tmp_path: Path, watching: Watching
) -> None:
    file = tmp_path / "spot_termination_notice"
    file.write_text(moment(-3600))
    watcher = watching(MetaflowSource(file))
    file.write_text("")
    time.sleep(1.2)
    assert watcher.new_notices() == []
    file.write_text(moment(100))
    notice = first(watcher)
    assert notice.source == "metaflow" and 80 < notice.seconds_left < 101
    assert MetaflowSource(tmp_path / "nowhere" / "file").begin().startswith("no folder")


def test_a_notice_after_an_expired_one_is_reported(
    service: FakeMetadata, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was left alone after all, and is noticed again."""
    service.interrupt(-3600)
    assert source_of(service).look() == [], "of an earlier life of this machine"
    monkeypatch.setattr(notices_module, "STALE_SECONDS", 0.1)
    service.interrupt(2.0)
    watcher = watching(source_of(service))
    assert watcher.wait_for_first_poll(10) and [
        notice.action for notice in watcher.new_notices()
    ] == ["terminate"]
    time.sleep(3.2)
    assert watcher.new_notices() == [], "the same one again"
    service.interrupt(120)
    assert 100 < first(watcher).seconds_left < 122


def test_a_rehearsed_notice_is_reported_once_and_a_leftover_one_never(
    tmp_path: Path, watching: Watching
) -> None:
    path = tmp_path / "notice.json"
    rehearse_notice(path, action="terminate", seconds=50)
    watcher = watching(RehearsalSource(path))
    assert watcher.new_notices() == [] and not path.exists()
    rehearse_notice(path, action="terminate", seconds=50)
    assert 30 < first(watcher).seconds_left <= 50
    wait_until("that it is taken away", lambda: not path.exists(), timeout=60)


def test_a_source_that_breaks_does_not_silence_the_others(
    tmp_path: Path, watching: Watching
) -> None:
    class Broken(RehearsalSource):
        name = "broken"  # type: ignore[assignment]

        def look(self) -> list[Notice]:
            raise RuntimeError("out of order")

    path = tmp_path / "notice.json"
    watcher = watching(Broken(tmp_path / "other"), RehearsalSource(path))
    rehearse_notice(path, action="terminate", seconds=50)
    assert first(watcher).source == "rehearsal"
    assert wait_until("the problem", watcher.problems, timeout=60)[0].endswith("out of order")

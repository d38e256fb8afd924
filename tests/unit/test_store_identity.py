"""A store's marker: which folder is the store of a job, and which is only at its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import JobNotInStore, Outcome, WrongStore
from ebbflow.core.layout import KnownJob, known_job, marker_key, remember_job
from ebbflow.core.store import Store
from ebbflow.core.store.identity import adopt_if_it_answers, adopt_store
from ebbflow.core.store.marker import VARIABLE, expect_marker, expected_marker_id, find_marker
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.flows.job import Job, JobArtifacts

JOB = "job"
GENERATION = "jobs/job/generations/000001-aaaa.json"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # restored after the test, whatever it expects


def adopt_and_remember(place: Path, runs: Path) -> str:
    marker = adopt_store(str(place), JOB, runs)
    remember_job(runs, KnownJob(JOB, str(place), marker))
    return marker


def write_report(runs: Path, steps: int) -> None:
    curve = [[step, 1.0] for step in range(1, steps + 1)]
    (runs / JOB / "report.json").write_text(json.dumps({"loss_curve": curve}))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_store_gets_one_marker_that_later_starts_find(place: Path, runs: Path) -> None:
    first = adopt_store(str(place), JOB, runs)
    assert adopt_store(str(place), "another", runs) == first
    assert files_below(place) == ["_store", marker_key(first)]
    assert expected_marker_id(str(place)) == first


def test_a_store_of_today_gets_its_marker_and_keeps_its_jobs(place: Path, runs: Path) -> None:
    Store.open(str(place)).put(GENERATION, b"{}")
    remember_job(runs, KnownJob(JOB, str(place)))
    write_report(runs, 7)
    marker = adopt_store(str(place), JOB, runs)
    assert Store.open(str(place)).get(GENERATION) == b"{}"
    known = known_job(runs / JOB)
    assert known is not None and known.marker == marker, "the next start compares it"


@pytest.mark.parametrize("loss", ["renamed", "emptied", "replaced", "other store"])
def test_every_operation_fails_in_a_folder_that_is_not_the_store(
    place: Path, runs: Path, loss: str
) -> None:
    adopt_store(str(place), JOB, runs)
    job_store = Store.open(f"{place}/jobs/job")
    job_store.put("commits/x", b"before")
    whole = place.with_name("whole")
    place.rename(whole)
    seen = "there is no such folder"
    if loss != "renamed":
        place.mkdir()
        seen = "the folder is empty"
    if loss == "replaced":
        (place / "lost+found").mkdir()
        seen = "the folder has 1 other entries (lost+found)"
    if loss == "other store":
        (place / "_store").mkdir()
        (place / "_store" / "0123.json").write_text("{}")
        seen = "it has the marker of another store (0123.json)"
    before = files_below(place)
    sink = open_sink(job_store.uri, Throttle())
    operations = [
        lambda: job_store.put("commits/y", b"lost"),
        lambda: job_store.create("commits/y", b"lost"),
        lambda: job_store.get("commits/x"),
        lambda: job_store.get_range("commits/x", 0, 1),
        lambda: job_store.head("commits/x"),
        lambda: job_store.list("commits"),
        lambda: job_store.delete("commits/x"),
        lambda: job_store.check_marker(),
        lambda: Store.open(f"{place}/jobs/job").put("commits/y", b"lost"),
        lambda: sink.begin("data/y", 3, parts=1, seconds=5.0),
    ]
    for operation in operations:
        with pytest.raises(WrongStore) as error:
            operation()
        assert seen in str(error.value) and "\n" not in str(error.value)
    assert files_below(place) == before, "nothing may be written there"
    shutil.rmtree(place, ignore_errors=True)
    whole.rename(place)
    assert job_store.get("commits/x") == b"before"
    job_store.put("commits/y", b"after")


def test_a_put_that_began_before_the_store_went_away_is_not_reported_as_done(
    place: Path, runs: Path
) -> None:
    adopt_store(str(place), JOB, runs)
    sink = open_sink(f"{place}/jobs/job", Throttle())
    begun = sink.begin("data/y", 3, parts=1, seconds=5.0)
    part = sink.put_part(begun, 1, 0, b"abc", 0, seconds=5.0)
    (place / "_store").rename(place / "elsewhere")
    with pytest.raises(WrongStore):
        sink.finish(begun, [part], [0], 0, seconds=5.0)


def test_a_child_process_expects_the_same_store(place: Path, runs: Path) -> None:
    adopt_store(str(place), JOB, runs)
    place.rename(place.with_name("gone"))
    program = (
        "import sys\n"
        "from ebbflow.core.errors import WrongStore\n"
        "from ebbflow.core.store import Store\n"
        "try:\n"
        "    Store.open(sys.argv[1]).put('commits/x', b'lost')\n"
        "except WrongStore:\n"
        "    print('refused')\n"
    )
    command = [sys.executable, "-c", program, f"{place}/jobs/job"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert not place.exists()


def test_another_store_is_not_measured_by_this_marker(
    place: Path, runs: Path, tmp_path: Path
) -> None:
    adopt_store(str(place), JOB, runs)
    for other in ("store2", "other"):
        assert find_marker(str(tmp_path / other)) is None
        Store.open(str(tmp_path / other)).put("x", b"1")


def test_a_store_is_known_by_its_link_and_by_its_folder(place: Path, tmp_path: Path) -> None:
    place.mkdir()
    link = tmp_path / "link"
    link.symlink_to(place)
    expect_marker(str(link), "0123")
    for spelling in (f"{link}", f"{place}", f"file://{link}", f"{link}/jobs/job"):
        marker = find_marker(spelling)
        assert marker is not None and marker.id == "0123"


@pytest.mark.parametrize("begun_by", ["marker", "report"])
def test_a_known_job_never_begins_anew_in_an_empty_store(
    place: Path, runs: Path, begun_by: str
) -> None:
    adopt_and_remember(place, runs)
    if begun_by == "report":  # of a release that knew no markers
        remember_job(runs, KnownJob(JOB, str(place)))
    write_report(runs, 120)
    os.environ[VARIABLE] = ""  # the machine was booted without the mount
    shutil.rmtree(place)
    place.mkdir()
    for start in (adopt_store, adopt_if_it_answers):
        with pytest.raises(JobNotInStore) as error:
            start(str(place), JOB, runs)
        assert "step 120" in str(error.value) and "--from-scratch" in str(error.value)
        assert str(runs / JOB / "job.json") in str(error.value)
    assert error.value.outcome is Outcome.PREFLIGHT
    assert files_below(place) == []
    new = adopt_store(str(place), JOB, runs, from_scratch=True)
    assert adopt_store(str(place), JOB, runs) == new, "the permission is given once"


def test_a_known_job_never_begins_anew_where_only_its_commits_are_gone(
    place: Path, runs: Path
) -> None:
    """The marker is there, and `jobs/` was emptied, or is a mount of its own."""
    adopt_and_remember(place, runs)
    write_report(runs, 120)
    shutil.rmtree(place / "jobs", ignore_errors=True)

    with pytest.raises(
        JobNotInStore, match="has nothing of this job, and the job reached step 120"
    ):
        adopt_store(str(place), JOB, runs)
    adopt_store(str(place), JOB, runs, from_scratch=True)
    adopt_store(str(place), JOB, runs)


def test_a_resumed_run_works_in_the_store_that_its_launcher_found(place: Path, runs: Path) -> None:
    old = adopt_and_remember(place, runs)
    os.environ[VARIABLE] = ""
    (place / marker_key(old)).unlink()
    found = adopt_store(str(place), JOB, runs, from_scratch=True)
    config = RunConfig(store=str(place)).model_dump(mode="json")
    kept = {"config": config, "path": "job.yaml", "store_marker": old}
    flow = cast(JobArtifacts, SimpleNamespace(settings=kept, job=JOB))
    resumed = Job.of(flow, "run")
    assert found != old and expected_marker_id(str(place)) == found
    resumed.store.put("generations/1", b"{}")
    os.environ[VARIABLE] = ""  # another machine has the settings alone
    Job.of(flow, "run")
    assert expected_marker_id(str(place)) == old


def test_a_known_job_is_not_continued_in_another_store_of_its_address(
    place: Path, runs: Path
) -> None:
    adopt_and_remember(place, runs)
    os.environ[VARIABLE] = ""
    shutil.rmtree(place)
    Store.open(str(place)).put(marker_key("0123"), b"{}")
    Store.open(str(place)).put(GENERATION, b"{}")
    with pytest.raises(JobNotInStore, match="the marker of another store \\(0123\\)"):
        adopt_store(str(place), JOB, runs)
    assert adopt_store(str(place), "unknown-here", runs) == "0123"


def test_a_job_of_that_name_in_a_store_of_another_address_is_another_job(
    place: Path, runs: Path, tmp_path: Path
) -> None:
    adopt_and_remember(place, runs)
    assert adopt_store(str(tmp_path / "new"), JOB, runs)


def test_a_store_with_two_markers_is_right_for_both_launchers(place: Path, runs: Path) -> None:
    store = Store.open(str(place))
    store.put(marker_key("aaaa"), b"{}")
    store.put(marker_key("bbbb"), b"{}")
    remember_job(runs, KnownJob(JOB, str(place), "bbbb"))
    assert adopt_store(str(place), JOB, runs) == "bbbb"
    assert adopt_store(str(place), "new", runs) == "aaaa"


def test_a_marker_costs_one_stat_per_operation_on_a_folder(
    place: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = adopt_store(str(place), JOB, runs)
    store = Store.open(str(place))
    looks = list[str]()
    stat = os.stat

    def counted(path: str | Path, *rest: object, **more: object) -> os.stat_result:
        if str(path).endswith(marker_key(marker)):
            looks.append(str(path))
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", counted)
    store.put("x", b"1")
    assert len(looks) == 2, "before the first byte, and after the last"
    store.get("x")
    assert len(looks) == 4, "a get asks for the size first"

"""What is known of a job's next start before machines are paid for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.event_log import EventLog
from ebbflow.core.events import COMMIT, GENERATION_STARTED, Origin
from ebbflow.core.layout import data_key
from ebbflow.core.signing_key import NAME_VARIABLE
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import open_generation
from ebbflow.training.checkpoint.lineage import FROM_SCRATCH, CommitRef, Generation
from ebbflow.training.checkpoint.rollback import record_permits
from ebbflow.training.checkpoint.signing import signer, use_signing_key
from ebbflow.training.errors import CommitMismatch, DataError, NothingToRestore, RolledBack
from ebbflow.training.start_check import FITS_RANKS, check_start
from tests.support.commits import put_commit, put_whole_commit

KEY = "a key of more than sixteen bytes"
EXPECTED = {"seed": 1, "data_fingerprint": "abc"}


@pytest.fixture
def job(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "jobs" / "job"))


@pytest.fixture
def generation(job: Store) -> Generation:
    return open_generation(job, run="r", attempt=0)


def test_a_new_job_restores_nothing(job: Store) -> None:
    assert check_start(job, expected=EXPECTED, ranks=2) is None


def test_the_newest_whole_commit_is_what_a_start_restores(
    job: Store, generation: Generation
) -> None:
    for step in (1, 2):
        newest = put_whole_commit(job, generation, step, extra={**EXPECTED, "cursor": step})
    assert check_start(job, expected=EXPECTED, ranks=7) == newest
    assert len(job.list("generations")) == 1, "no generation is opened"


@pytest.mark.parametrize("left", [None, 0, 99])
def test_a_commit_whose_data_were_cut_is_passed_over_with_its_bytes(
    job: Store, generation: Generation, capsys: pytest.CaptureFixture[str], left: int | None
) -> None:
    older = put_whole_commit(job, generation, 1)
    put_whole_commit(job, generation, 2)
    key = data_key(generation.name, 2, 0)
    if left is None:
        job.delete(key)
    else:
        job.put(key, bytes(left))
    assert check_start(job) == older
    warning = capsys.readouterr().err
    seen = f"{key} is missing" if left is None else f"{key} has {left} of 100 bytes"
    assert f"the commit of step 2 is not whole: {seen}; the start goes on from step 1" in warning


def test_a_job_without_a_whole_commit_is_refused_unless_a_person_permits_it(
    job: Store, generation: Generation
) -> None:
    for step in (1, 2):
        put_whole_commit(job, generation, step)
        job.put(data_key(generation.name, step, 0), b"")
    with pytest.raises(NothingToRestore, match=r"step 2 is not whole: .* has 0 of 100 bytes"):
        check_start(job)
    record_permits(job, FROM_SCRATCH)
    assert check_start(job) is None


def test_an_unreadable_newest_commit_is_passed_over_and_named(
    job: Store, generation: Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    older = put_whole_commit(job, generation, 1)
    newest = put_whole_commit(job, generation, 2)
    job.put(newest.key, b"{}")
    assert check_start(job) == older
    assert f"passed over as a parent: {newest.key}" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [{"seed": 2}, {"data_fingerprint": "other"}])
def test_changed_data_are_refused(
    job: Store, generation: Generation, changed: dict[str, Any]
) -> None:
    put_whole_commit(job, generation, 1, extra={**EXPECTED, **changed, "cursor": 5})
    with pytest.raises(DataError, match="sample 5 would be another"):
        check_start(job, expected=EXPECTED)


def test_a_commit_that_fits_one_number_of_ranks_is_refused_on_another(
    job: Store, generation: Generation
) -> None:
    ref = put_whole_commit(job, generation, 1, extra={FITS_RANKS: 8})
    with pytest.raises(CommitMismatch, match="saved by 8 ranks and fits no other number") as error:
        check_start(job, ranks=6)
    assert "this start has 6; fix: start 8 ranks" in str(error.value)
    assert check_start(job, ranks=8) == check_start(job) == ref


def test_a_store_that_was_rolled_back_is_refused(job: Store, generation: Generation) -> None:
    put_whole_commit(job, generation, 1)
    newer = put_commit(job, generation, 2)
    origin = Origin(job="job", run="r", attempt=0, generation=generation.number, process="agent")
    with EventLog(job, origin) as log:
        log.emit(GENERATION_STARTED)
        log.emit(COMMIT, step=2, key=newer.key)
    job.delete(newer.key)
    with pytest.raises(RolledBack):
        check_start(job)


def signed(job: Store, generation: Generation, monkeypatch: pytest.MonkeyPatch) -> CommitRef:
    monkeypatch.setenv("KEY_OF_TEST", KEY)
    ref = put_whole_commit(job, generation, 1)
    use_signing_key("KEY_OF_TEST")
    signs = signer()
    assert signs is not None
    signs.sign(job, ref.key)
    use_signing_key(None)
    return ref


def test_a_wrong_signing_key_is_refused_and_a_missing_one_is_left_to_the_ranks(
    job: Store, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = signed(job, generation, monkeypatch)
    assert check_start(job, signing_key_env="KEY_OF_TEST") == ref
    monkeypatch.setenv("KEY_OF_TEST", KEY[::-1])
    with pytest.raises(NothingToRestore, match="its signature is wrong"):
        check_start(job, signing_key_env="KEY_OF_TEST")
    monkeypatch.delenv("KEY_OF_TEST")
    monkeypatch.setenv(NAME_VARIABLE, "OTHER")
    assert check_start(job, signing_key_env="KEY_OF_TEST") == ref
    monkeypatch.delenv(NAME_VARIABLE)

"""Environment variables of a rank: those of the user are kept."""

import pytest

from ebbflow.training.launch.evidence import recorder_variables
from ebbflow.training.launch.workers import make_environment, threads_per_rank


@pytest.mark.parametrize("given", [None, "3"])
def test_a_rank_has_the_users_threads_else_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    environment = make_environment(("127.0.0.1", 1), 2, 2, 2)
    assert environment["OMP_NUM_THREADS"] == (given or "4")
    assert threads_per_rank(16) == "1"


@pytest.mark.parametrize("release", ["2.8.0", "2.13.0+cpu", "3.0.1"])
def test_the_recorders_old_variable_is_not_set_for_a_torch_that_warns_about_it(
    release: str,
) -> None:
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in recorder_variables(release)
    assert recorder_variables(release)["TORCH_FR_BUFFER_SIZE"] == "512"
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in recorder_variables("2.7.1")

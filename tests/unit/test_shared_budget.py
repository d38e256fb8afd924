"""The budget that the trials of a sweep share, and their ranking."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ebbflow.core.errors import StoreError
from ebbflow.core.layout import shared_budget_key
from ebbflow.core.store import Store
from ebbflow.flows.own_flow.ranking import RankingError, rank_trials
from ebbflow.flows.own_flow.shared_budget import SharedBudget
from ebbflow.flows.own_flow.step_checks import CheckedStep, OwnFlowError
from ebbflow.flows.own_flow.step_options import StepOptions
from ebbflow.flows.own_flow.trained_model import TrainedModel
from ebbflow.flows.own_flow.training_settings import make_settings


def open_budget(folder: Path, limit_usd: float = 10.0) -> SharedBudget:
    return SharedBudget(store=Store.open(str(folder)), name="sweep", limit_usd=limit_usd)


def make_model(job: str, *, usd: float, losses: list[float], **metrics: float) -> TrainedModel:
    report = {
        "actual": {"metrics": metrics, "held_out_loss": None},
        "loss_curve": list(enumerate(losses)),
    }
    return TrainedModel(
        job=job,
        store="",
        outcome="completed" if losses else "budget",
        commit=None,
        best=None,
        steps=len(losses),
        weights_sha256=None,
        usd=usd,
        price_kind="simulated",
        hours=1.0,
        interruptions=0,
        report=report,  # type: ignore[arg-type]
    )


def test_a_trial_holds_what_it_wants_or_what_is_left_and_none_beyond(tmp_path: Path) -> None:
    budget = open_budget(tmp_path)
    assert budget.hold("a", needed_usd=3, wanted_usd=6) == 6
    assert budget.hold("b", needed_usd=3, wanted_usd=6) == 4
    assert budget.hold("c", needed_usd=0.01, wanted_usd=1) is None
    assert budget.describe("c") == (
        "$0.0000 of $10.0000 are left to it ($0.0000 spent by 0 ended trials, $10.0000 held by 2 "
        "others)"
    )


def test_what_an_ended_trial_did_not_spend_is_left_to_the_others(tmp_path: Path) -> None:
    budget = open_budget(tmp_path)
    budget.hold("a", needed_usd=10, wanted_usd=10)
    budget.settle("a", 2.5)
    budget.settle("a", 2.5)
    assert budget.hold("b", needed_usd=7.5, wanted_usd=9) == 7.5
    # Another process, such as a resumed run, sees the same, and may have a larger limit
    again = open_budget(tmp_path, limit_usd=12)
    held = again.find_hold("b")
    assert held is not None and (held.usd, held.has_ended) == (7.5, False)
    assert again.hold("b", needed_usd=8, wanted_usd=20) == 9.5


def test_trials_that_ask_at_the_same_time_never_hold_more_than_the_budget(tmp_path: Path) -> None:
    granted: dict[str, float | None] = {}
    start = threading.Barrier(16)

    def ask(trial: str) -> None:
        budget = open_budget(tmp_path)
        start.wait()
        granted[trial] = budget.hold(trial, needed_usd=1, wanted_usd=1.5)

    threads = [threading.Thread(target=ask, args=(f"trial-{number}",)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [usd for usd in granted.values() if usd is not None]
    assert sum(held) <= 10
    assert len(held) == 7  # six with 1.5, and the last one with 1
    records = Store.open(str(tmp_path)).list("shared-budgets/sweep")
    assert len(records) == len(held)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.put(shared_budget_key("sweep", 1), b"{}")
    with pytest.raises(StoreError, match=r"sweep/000001.json is no record of a budget: "):
        open_budget(tmp_path).find_hold("a")


def test_trials_are_ranked_by_how_much_a_dollar_lowered_their_loss() -> None:
    cheap = make_model("cheap", usd=1.0, losses=[2.0, 1.0], accuracy=0.5)
    good = make_model("good", usd=4.0, losses=[2.0, 0.4], accuracy=0.8)
    late = make_model("late", usd=0.0, losses=[])
    trials = [(model.job, model) for model in (late, good, cheap)]

    ranking = rank_trials(trials, metric=None, mode=None)
    assert [trial.label for trial in ranking.trials] == ["cheap", "good", "late"]
    assert [trial.gain_per_usd for trial in ranking.trials] == [1.0, 0.4, None]
    assert ranking.best is good
    assert ranking.usd == 5.0
    assert "3 trials, $5.0000 (simulated), by loss (min) per dollar" in ranking.to_text()

    by_accuracy = rank_trials(trials, metric="accuracy", mode="max")
    assert [trial.gain_per_usd for trial in by_accuracy.trials] == [0.5, 0.2, None]
    assert "<td>cheap</td>" in by_accuracy.to_html()
    with pytest.raises(RankingError, match="which value is the best; fix: "):
        rank_trials(trials, metric="accuracy", mode=None)
    with pytest.raises(RankingError, match=r"metric 'acc'; fix: job.log\(acc=…\).*: accuracy"):
        rank_trials(trials, metric="acc", mode="max")
    with pytest.raises(RankingError, match="no input has a trained model"):
        rank_trials([], metric=None, mode=None)


def test_a_training_on_slurm_shares_no_budget_and_is_refused_in_one_line(tmp_path: Path) -> None:
    step = CheckedStep(
        name="train",
        place="flow.py:11",
        options=StepOptions.parse({"budget_of_all": 40}),
        store=str(tmp_path),
        datastore="local",
        flow_folder=tmp_path,
        is_gang=False,
        is_caught=False,
        backend=None,
        nodes=1,
        calls=(),
        files=(),
    )
    overrides = ["cluster.plan_for=slurm", "cluster.nodes=2"]
    with pytest.raises(OwnFlowError, match=r"flow.py:11: .*budget_of_all.*; fix: budget=") as error:
        make_settings(step, nodes=1, file=None, overrides=overrides)
    assert "\n" not in str(error.value)

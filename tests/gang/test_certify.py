"""The resume certificate: it holds for a job that resumes exactly, and says what differs for one
that does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ebbflow.tryout.certify
from ebbflow.core.config.schema import ClusterConfig, ParallelConfig, RunConfig
from ebbflow.core.events import CERTIFICATE, Event, read_events
from ebbflow.core.events import OUTCOME as OUTCOME_EVENT
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.cost.report.figure_text import format_key_figures
from ebbflow.cost.report.report import build_report
from ebbflow.flows import steps
from ebbflow.training.launch.messages import GangOutcome
from ebbflow.tryout.certify import (
    CertifiedRun,
    build_certificate,
    config_sha256,
    content_sha256,
    format_certificate,
)
from ebbflow.tryout.compare import compare_modes, format_comparison
from ebbflow.tryout.harness import gang_size, small_config
from ebbflow.workloads.language.language_model import TextBatch
from tests.support.timelines import event
from tests.unit.test_report import interrupted_job

OUTCOME = GangOutcome(outcome="completed", step=3, generation=2, weights_sha256="feed")


def run_of(steps: tuple[int, ...], *, generations: int) -> CertifiedRun:
    """Two ranks with a batch of two samples each."""
    return CertifiedRun(
        interruption="a rank is killed" if generations > 1 else "none",
        outcome=OUTCOME,
        steps=[(step, {"loss": 1.0 / step}) for step in steps],
        samples=[(rank, 4 * step + 2 * rank, f"{step}{rank}") for step in steps for rank in (0, 1)],
        starts=1,
        generations=generations,
        resumed=[1] if generations > 1 else [],
    )


QUIET = run_of((1, 2, 3), generations=1)
KILLED = run_of((1, 2, 2, 3), generations=2)


def certified(run: CertifiedRun) -> dict:
    config = RunConfig()
    return build_certificate(
        config, small_config(config, store=Path("store"), steps=12), [QUIET, run], {}
    )


def test_equal_runs_make_a_certificate_that_the_report_shows() -> None:
    found = certified(KILLED)
    assert found["holds"] and found["interruptions"][0]["redone_steps"] == 1
    assert "holds" in format_certificate(found) and "bit for bit" in format_certificate(found)
    report = build_report([*interrupted_job(), event(CERTIFICATE, 0.0, **found)])
    assert (
        format_key_figures(report)["certificate"]
        == "resume holds: 1 interruption of 3 steps, bit for bit"
    )
    assert "certificate" not in format_key_figures(build_report(interrupted_job()))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: replace(run, steps=[*run.steps, (2, {"loss": 0.5000001})]), "step 2: "),
        (lambda run: replace(run, steps=run.steps[:-1]), "1 steps have no record, the first is 3"),
        (
            lambda run: replace(run, samples=[*run.samples, (1, 10, "other")]),
            "rank 1: the batch from sample 10 on",
        ),
        (lambda run: replace(run, samples=run.samples[:-1]), "rank 1 never read sample 14"),
        (
            lambda run: replace(run, outcome=replace(OUTCOME, weights_sha256="beef")),
            "weights_sha256: feed uninterr",
        ),
        (
            lambda run: replace(run, outcome=replace(OUTCOME, weights_sha256=None)),
            "weights_sha256: feed uninterrupted",
        ),
        (lambda run: replace(run, generations=1), "never interrupted"),
    ],
)
def test_any_difference_is_named_and_invalidates_the_certificate(
    spoil: Callable[[CertifiedRun], CertifiedRun], says: str
) -> None:
    found = certified(spoil(KILLED))
    assert (
        not found["holds"]
        and says in format_certificate(found)
        and "DOES NOT HOLD" in format_certificate(found)
    )


def test_a_batch_is_known_by_what_it_holds() -> None:
    tokens = torch.arange(12).view(2, 6)
    same = TextBatch(tokens.clone(), tokens)
    other = TextBatch(tokens, tokens.clone())
    assert content_sha256(same) == content_sha256(other)
    other.targets[1, 5] = 0
    assert content_sha256(same) != content_sha256(other)
    assert content_sha256(TextBatch(tokens.view(6, 2), tokens)) != content_sha256(same)


def test_a_small_job_keeps_all_that_decides_its_numbers() -> None:
    config = RunConfig(
        training={"batch_size": 6, "seed": 5, "max_steps": 10_000},
        cluster={"nodes": 16, "min_nodes": 1},
    )
    small = small_config(config, store=Path("store"), steps=24)
    assert (small.training.batch_size, small.training.seed, small.training.max_steps) == (6, 5, 24)
    assert small.model == config.model and small.parallel == config.parallel
    assert gang_size(config)[0] == 2
    assert small.cluster.min_nodes is None, "after a loss as many ranks add up as before"
    assert config_sha256(small) != config_sha256(config)


def flow_of(config: RunConfig) -> SimpleNamespace:
    return SimpleNamespace(
        certify=True, job="job", settings={"config": config.model_dump(mode="json")}
    )


def told_by(config: RunConfig) -> list[Event]:
    return read_events(Store.open(config.store).sub(job_prefix("job")))


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(run_id="7", step_name="prepare")
    monkeypatch.setattr(steps, "current", now)


@pytest.mark.usefixtures("in_a_run")
def test_the_flow_certifies_a_job_that_is_killed_and_the_report_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with --certify True, from processes of its own; only one of the interruptions, and half
    the steps.
    """
    (tmp_path / "text").mkdir()
    for number in range(12):
        lines = (f"{number * line} is {number} times {line}.\n" for line in range(80))
        (tmp_path / "text" / f"{number}.py").write_text("".join(lines))
    config = RunConfig(
        store=str(tmp_path / "store"),
        model={"hidden_size": 32, "num_layers": 1, "num_heads": 2, "sequence_length": 32},
        training={"batch_size": 4},
        data={"path": str(tmp_path / "text"), "held_out_fraction": 0.3, "held_out_samples": 4},
        cluster={"nodes": 1},
    )
    fewer = functools.partial(
        ebbflow.tryout.certify.certify_in_child, steps=12, interruptions=["a rank is killed"]
    )
    monkeypatch.setattr(ebbflow.tryout.certify, "certify_in_child", fewer)
    found = steps.certify(flow_of(config))
    assert found is not None and found["holds"], format_certificate(found)
    [killed] = found["interruptions"]
    assert (
        killed["generations"] == 2
        and killed["redone_steps"] >= 1
        and killed["resumed_from"][-1] >= 2
    )
    assert (
        found["workload"] == "text"
        and found["weights_sha256"]
        and found["config_sha256"] == config_sha256(config)
    )
    events = told_by(config)
    assert [event.name for event in events] == [CERTIFICATE] and events[0].data == found
    figures = format_key_figures(build_report([*interrupted_job(), *events]))
    assert figures["certificate"] == "resume holds: 1 interruption of 12 steps, bit for bit"


@pytest.mark.usefixtures("in_a_run")
def test_a_certificate_that_does_not_hold_ends_the_run_before_the_gang_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = certified(replace(KILLED, samples=KILLED.samples[:-1]))
    monkeypatch.setattr(ebbflow.tryout.certify, "certify_in_child", lambda config: spoiled)
    config = RunConfig(store=str(tmp_path / "store"))
    with pytest.raises(steps.StepFailed, match="would not resume exactly"):
        steps.certify(flow_of(config))
    assert [(event.name, event.data.get("outcome")) for event in told_by(config)] == [
        (CERTIFICATE, None),
        (OUTCOME_EVENT, "failed"),
    ]
    assert steps.certify(SimpleNamespace(certify=False)) is None


def test_modes_are_compared_on_the_same_job(tmp_path: Path) -> None:
    parallel = ParallelConfig(shard_size=2)
    cluster = ClusterConfig(nodes=1, processes_per_node=2)
    config = RunConfig(
        workload="tests.support.workload_cases:Sound", parallel=parallel, cluster=cluster
    )
    found = compare_modes(config, ["ddp"], steps=6, rounds=1, parent=tmp_path)
    figures = found["modes"]["ddp"]
    assert all(
        figures[name]["median"] > 0
        for name in ("tokens_per_second", "step_seconds", "commit_bytes")
    )
    assert figures["restore_seconds"]["median"] > 0 and figures["startup_seconds"]["median"] > 0
    text = format_comparison(
        found | {"modes": {"ddp": figures, "hsdp": "3 ranks are no multiple of 2"}}
    )
    assert "1 × 2 ranks" in text and "hsdp: not supported: 3 ranks" in text
    assert not list(tmp_path.iterdir()), "its folder is removed"

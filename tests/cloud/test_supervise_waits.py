"""The supervisor's loop over a program that is refused again and again, as `run` is while AWS Batch
is away.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.core.errors import JobIsRunning, Outcome
from ebbflow.core.events import (
    BATCH_SUBMITTED,
    GENERATION_STARTED,
    PLAN,
    PREFLIGHT,
    SUPERVISED,
    read_events,
)
from ebbflow.core.launchers import Claim, Launcher, claim_job
from ebbflow.core.layout import launcher_key
from ebbflow.flows.job import Job
from ebbflow.flows.supervising import supervisor
from ebbflow.flows.supervising.options import SupervisorOptions, read_options
from ebbflow.flows.supervising.supervisor import Supervisor
from tests.support.timelines import plan_event

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import pathlib, sys
counts = pathlib.Path(__file__).with_suffix(".count")
tries = len(counts.read_bytes()) if counts.exists() else 0
counts.write_bytes(b"x" * (tries + 1))
sys.exit(3 if tries < {refusals} else 0)
"""


def options(folder: Path, *words: str) -> SupervisorOptions:
    chosen = ["--job", "j", "--pause-seconds", "0", "--set", f"store={folder / 'store'}", *words]
    return read_options([str(ROOT / "ebbflow/configs" / "laptop.yaml"), *chosen], project_root=ROOT)


def flow(folder: Path, *, refusals: int) -> Path:
    path = folder / "flow.py"
    path.write_text(PROGRAM.format(refusals=refusals))
    return path


def has_begun(
    options: SupervisorOptions,
    *,
    under: SupervisorOptions | None = None,
    trained: bool = True,
    hours_ago: float = 0.0,
) -> Job:
    """under: the settings that passed preflight; others have not."""
    job = Job(name="j", run="1", config=options.config)
    with job.events("test") as log:
        log.emit(PREFLIGHT, results=[])
        log.emit(PLAN, **plan_event().data, started_utc=time.time() - 3600 * hours_ago)
        if trained:
            log.emit(GENERATION_STARTED, parent=None, parent_step=0, nodes=1, processes_per_node=1)
            settings = {"config": (under or options).config.model_dump(mode="json")}
            job.store.put("config.json", json.dumps(settings).encode())
    return job


def test_a_job_that_passed_preflight_once_is_retried_after_a_refusal(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    asked = options(tmp_path)
    job = has_begun(asked)
    assert Supervisor(asked, said.append, flow=flow(tmp_path, refusals=3)).supervise() == 0
    refused = [line for line in said if line.startswith("preflight refused ")]
    assert [line.split()[2] for line in refused] == ["1", "2", "3"]
    verdicts = [
        event.data["verdict"] for event in read_events(job.store) if event.name == SUPERVISED
    ]
    assert verdicts == ["not_ready"] * 3 + ["completed"]


@pytest.mark.parametrize("trained", [False, True])
def test_the_first_refusal_of_a_job_or_of_changed_settings_is_final(
    tmp_path: Path, trained: bool
) -> None:
    said: list[str] = []
    asked = options(tmp_path)
    has_begun(asked, trained=trained, under=options(tmp_path, "--set", "training.max_steps=500"))
    program = flow(tmp_path, refusals=9)
    assert Supervisor(asked, said.append, flow=program).supervise() == Outcome.PREFLIGHT.exit_code
    assert program.with_suffix(".count").read_bytes() == b"x"
    assert any(line.startswith("stopped, preflight (exit code 3)") for line in said)


@pytest.mark.parametrize(
    ("words", "outcome", "why"),
    [
        (("--wait-hours", "0"), Outcome.PREFLIGHT, "refused by preflight for 0.0 h"),
        (("--set", "cost.deadline_hours=1"), Outcome.DEADLINE, "while preflight refused to go on"),
    ],
)
def test_the_supervisor_stops_retrying_after_its_limit(
    tmp_path: Path, words: tuple[str, ...], outcome: Outcome, why: str
) -> None:
    said: list[str] = []
    asked = options(tmp_path, *words)
    has_begun(asked, hours_ago=2.0)
    assert (
        Supervisor(asked, said.append, flow=flow(tmp_path, refusals=9)).supervise()
        == outcome.exit_code
    )
    assert why in said[-1]


def runs_in_batch(asked: SupervisorOptions) -> Job:
    job = has_begun(asked)
    with job.events("submit") as log:
        log.emit(BATCH_SUBMITTED, job_id="x-1", job_name="train", step="train_node", task="5")
    return job


def test_a_supervisor_that_is_refused_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(supervisor, "end_leftovers", lambda job, say: ended.append(job.name))
    asked = options(tmp_path, "--from-scratch")
    job = runs_in_batch(asked)
    other = claim_job(job.store, "j", "run")
    program = flow(tmp_path, refusals=0)
    with pytest.raises(JobIsRunning):
        Supervisor(asked, list[str]().append, flow=program).supervise()
    assert not ended and not program.with_suffix(".count").exists()
    assert not job.store.list("permits"), "nothing is given up by a launcher that is refused"
    other.release()
    assert Supervisor(asked, list[str]().append, flow=program).supervise() == 0
    assert ended == ["j", "j"], "before the first run and after it"
    assert len(job.store.list("permits")) == 1


def test_a_supervisor_whose_job_was_taken_over_leaves_the_successors_batch_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off: it has not looked at its claim since."""
    ended = list[str]()
    said = list[str]()
    monkeypatch.setattr(Claim, "_keep", lambda claim: None)
    monkeypatch.setattr(supervisor, "end_leftovers", lambda job, say: ended.append(job.name))
    asked = options(tmp_path)
    job = has_begun(asked)

    def take_over(*_: object) -> int:
        successor = Launcher(
            number=2, id="b", command="supervise", host="node-7", user="ann", pid=1, since_utc=0.0
        )
        job.store.put(launcher_key(2), successor.to_json())
        runs_in_batch(asked)
        return Outcome.PREFLIGHT.exit_code

    monkeypatch.setattr(supervisor.FlowProcess, "run", take_over)
    assert Supervisor(asked, said.append).supervise() == Outcome.INTERRUPTED.exit_code
    assert not ended and said[-1].startswith("job taken over by `supervise` of ann on host node-7")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The supervisor handles its process's signals, which here is pytest's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

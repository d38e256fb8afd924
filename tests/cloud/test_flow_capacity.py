"""What an attempt of a training step is told, how its command line changes, and what is mended of
Metaflow.
"""

from __future__ import annotations

import os
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from metaflow.plugins.aws.batch.batch_decorator import BatchDecorator

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import BATCH_ATTEMPT, COMMIT, Event
from ebbflow.core.events import PLACED as PLACED_EVENT
from ebbflow.core.store import Store
from ebbflow.cost.capacity import AttemptHistory, PastAttempt, Placement, read_attempts
from ebbflow.cost.prices.quote import PoolPrice
from ebbflow.flows.attempts.order import AttemptName, AttemptOrder
from ebbflow.flows.attempts.placement import give_up_reason
from ebbflow.flows.decorators import CapacityDecorator, apply_to_batch, cloud, run_locally
from ebbflow.flows.gang import train_node
from ebbflow.flows.metaflow_fixes import (
    correct_node_commands,
    is_known_release,
    needs_fixes,
    node_command,
)
from ebbflow.flows.remote import (
    UNPLACED_VARIABLE,
    refusal_reason,
    requested_backend,
    set_environment,
)
from ebbflow.flows.steps import StepFailed

PLACED = Placement(
    queue="spot-g5",
    market="spot",
    instance_type="g5.xlarge",
    region="us-east-1",
    zone=None,
    nodes=1,
    processes_per_node=1,
    cpu=4,
    gpu=1,
    memory_mib=15000,
    wall_seconds=7200,
    runnable_seconds=1800,
    price=PoolPrice(usd_per_hour=Decimal("0.4"), kind="recorded"),
    expected_hours=1.0,
    expected_usd=0.4,
    reason="cheapest",
)
# As Metaflow 2.19.39 makes it for task 3 of a step with three nodes, shortened.
MAIN = (
    "true && mkdir -p $PWD/.logs && export PYTHONUNBUFFERED=x MF_PATHSPEC=TrainFlow/1733/train/3 "
    "MF_DATASTORE=s3 MF_ATTEMPT=0 MFLOG_STDOUT=$PWD/.logs/mflog_stdout && python3 -m x 3.11 && "
    "(python -u train_flow.py --metadata local step train --run-id 1733 --task-id 3 "
    "--input-paths ${METAFLOW_INPUT_PATHS_0} --retry-count 3 --ubf-context ubf_control "
    "--split-index 0) 1>> >(python -m metaflow.mflog.tee TrainFlow/3); c=$?; exit $c"
)


def command_line(**options: Any) -> SimpleNamespace:
    usual = {
        "run-id": "1733",
        "task-id": "3",
        "queue": "static",
        "gpu": "0",
        "memory": "4096",
        "tag": ["a"],
    }
    return SimpleNamespace(
        commands=["batch", "step"],
        command_args=["train", "meta", "sha", "url"],
        command_options={**usual, **options},
    )


def test_another_nodes_command_differs_in_its_own_name_alone() -> None:
    node = node_command(MAIN)
    assert "--run-id 1733 --task-id 3-node-$AWS_BATCH_JOB_NODE_INDEX --input-paths" in node
    assert "MF_PATHSPEC=TrainFlow/1733/train/3-node-$AWS_BATCH_JOB_NODE_INDEX MF_DATASTORE" in node
    assert "--ubf-context ubf_task --split-index $AWS_BATCH_JOB_NODE_INDEX) 1>>" in node
    for kept in (
        "-m x 3.11",
        "--retry-count 3",
        "tee TrainFlow/3)",
        "mflog_stdout",
        "; c=$?; exit $c",
    ):
        assert kept in node
    assert node_command("sleep 3") == "sleep 3"


def test_a_command_with_a_damaged_task_number_is_corrected_and_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Task 3: Metaflow also renames the 3 of the run, of Python and of the retry count."""
    spoilt = MAIN.replace("3", "3-node-$AWS_BATCH_JOB_NODE_INDEX").replace(
        "ubf_control", "ubf_task"
    )
    nodes = [
        {"containerOverrides": {"command": ["bash", "-c", command]}} for command in (MAIN, spoilt)
    ]
    request = {"nodeOverrides": {"nodePropertyOverrides": nodes}}
    correct_node_commands(request)
    commands = [node["containerOverrides"]["command"] for node in nodes]
    assert commands == [["bash", "-c", MAIN], ["bash", "-c", node_command(MAIN)]]
    assert "#2564" in capsys.readouterr().err
    correct_node_commands(request)
    assert [node["containerOverrides"]["command"] for node in nodes] == commands
    assert capsys.readouterr().err == "", "there is nothing more to correct"


def test_the_options_of_with_cloud_exist_in_every_metaflow_release() -> None:
    """Older ones do not begin what a mutator adds: @batch then had no tags, and its first attempt
    ended the run.
    """
    step = SimpleNamespace(decorators=[])
    mutable = SimpleNamespace(
        decorator_specs=[("capacity", "ebbflow.flows.decorators", [], {})],
        add_decorator=lambda name: step.decorators.append(BatchDecorator()),
        _my_step=step,
    )
    cloud.mutate(None, mutable)
    assert [decorator.attributes["aws_batch_tags"] for decorator in step.decorators] == [{}]


def test_an_order_is_read_as_written_and_an_unplaced_attempt_has_none(
    tmp_path: Path,
) -> None:
    store = Store.open(str(tmp_path))
    order = AttemptOrder(does="train", nodes=2, processes_per_node=4, placement=PLACED)
    name = AttemptName(run="1733", step="train", task="3", attempt=1)
    order.put(store, name)
    assert AttemptOrder.get(store, name) == order
    assert (
        AttemptOrder.get(store, AttemptName(run="1733", step="train", task="3", attempt=2)) is None
    )


@pytest.mark.parametrize(("nodes", "asked"), [(1, "0"), (3, "3")])
def test_a_placement_becomes_command_line_options(nodes: int, asked: str) -> None:
    """One node of a @parallel step is a plain job: Batch runs no job of several nodes on Spot, were
    it one node.
    """
    line = command_line(**{"num-parallel": "2", "aws-batch-tag": ["team=a"]})
    batch = {"tags": {"job": "x"}, "efa_interfaces": 4, "image": "repo:1"}
    config = RunConfig.model_validate({"batch": batch})
    apply_to_batch(line, replace(PLACED, nodes=nodes), config)
    options = line.command_options
    assert (options["queue"], options["cpu"], options["gpu"], options["memory"]) == (
        "spot-g5",
        "4",
        "1",
        "15000",
    )
    assert (options["num-parallel"], options["run-time-limit"], options["image"]) == (
        asked,
        7200,
        "repo:1",
    )
    assert options["aws-batch-tag"] == ["team=a", "job=x"]
    assert options["efa"] is None, "a g5.xlarge has no adapter"
    for kind, efa in (
        ("g5.48xlarge", 1),
        ("p4d.24xlarge", 4),
        ("p5.48xlarge", 32),
        ("x9.large", 32),
    ):
        many = config.changed("batch", efa_interfaces=32)
        apply_to_batch(line, replace(PLACED, nodes=nodes, instance_type=kind), many)
        assert options["efa"] == (efa if nodes > 1 else None)


def test_a_step_that_only_branches_runs_on_the_schedulers_machine() -> None:
    line = command_line(efa=4)
    run_locally(line, "train_node")
    assert line.commands == ["step"] and line.command_args == ["train_node"]
    assert line.command_options == {"run-id": "1733", "task-id": "3", "tag": ["a"]}


@pytest.mark.parametrize(("queue", "command"), [("light", ["step"]), ("gpus", ["batch", "step"])])
def test_an_attempt_that_cannot_be_placed_does_not_go_to_the_light_steps(
    queue: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where @batch names a queue itself.

    Here the artifacts of the step before cannot be read.
    """

    class Flow:
        def train_node(self) -> None: ...

    Flow.train_node.decorators = []  # type: ignore[attr-defined]
    monkeypatch.setattr("metaflow.metaflow_config.BATCH_JOB_QUEUE", "light")
    decorator = CapacityDecorator()
    said = []
    batch = SimpleNamespace(name="batch", attributes={"queue": queue})
    graph = {"train_node": SimpleNamespace(parallel_step=False)}
    decorator.step_init(Flow(), graph, "train_node", [batch, decorator], None, None, None)
    line = command_line(queue=queue)
    line.env = {}
    line.task = SimpleNamespace(
        input_paths=["1733/prepare/4"], log=lambda text, **_: said.append(text)
    )
    decorator.runtime_step_cli(line, 0, 4, None)
    assert line.commands == command and len(said) == 1
    assert (UNPLACED_VARIABLE in line.env) is (command == ["step"])


def test_a_step_without_a_placement_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(UNPLACED_VARIABLE, "the store is away")
    step = SimpleNamespace(decorators=[SimpleNamespace(name="batch")])
    with pytest.raises(StepFailed, match="could not be placed: the store is away"):
        train_node(SimpleNamespace(rounds=0, train=step, train_node=step), SimpleNamespace())


def history(
    *causes: str, started: float | None = 10.0, run: str = "r", after: int = 0
) -> AttemptHistory:
    """after: the generation that was the newest when they were placed."""
    attempts = tuple(
        PastAttempt(
            placement=PLACED,
            placed_utc=float(number),
            job_id=f"job-{number}",
            cause=cause,
            started_utc=None if cause == "never_started" else started,
            run=run,
            after_generation=after,
        )
        for number, cause in enumerate(causes, 1)
    )
    return AttemptHistory(attempts=attempts)


def vain(known: AttemptHistory, *events: Event, **more: Any) -> tuple[Outcome, str] | None:
    return give_up_reason(known, events, run="r", **more)


def told(name: str, t_wall: float, generation: int = 0, **data: Any) -> Event:
    fields = {"job": "j", "run": "r", "attempt": 0, "node": 0, "rank": -1, "step": 8, "t_mono": 0.0}
    return Event(name=name, t_wall=t_wall, generation=generation, data=data, **fields)


def test_an_attempt_that_never_ran_is_retried_at_most_five_times() -> None:
    failed = vain(history(*["user_code"] * 5))
    assert failed is not None and failed[0] is Outcome.FAILED
    assert vain(history(*["user_code"] * 4)) is None
    waited = vain(history(*["never_started"] * 5))
    assert waited is not None and waited[0] is Outcome.NO_CAPACITY and "spot-g5" in waited[1]
    without_one = [
        replace(attempt, started_utc=attempt.placed_utc)
        for attempt in history(*["never_started"] * 5).attempts
    ]
    # Pods ran on Kubernetes, and others had no machine
    incomplete = vain(AttemptHistory(attempts=tuple(without_one)))
    assert incomplete is not None and incomplete[0] is Outcome.NO_CAPACITY


@pytest.mark.parametrize("cause", ["user_code", "not_made"])
def test_a_container_that_is_never_made_with_capacity_there_is_tried_twice(cause: str) -> None:
    """Without its image it cannot be, wherever it goes; and each try pays for a machine that waits
    for it.
    """
    found = vain(history(cause, cause, started=None), on_demand_comes=True)
    assert found is not None and found[0] is Outcome.FAILED
    assert vain(history(cause, started=None)) is None


def test_the_message_has_batchs_last_status_reason() -> None:
    first, last = history("user_code", "user_code", started=None).attempts
    found = vain(
        AttemptHistory(
            attempts=(first, replace(last, reason="CannotPullContainerError: no such manifest"))
        )
    )
    assert found is not None and found[1].endswith(
        "; the last one: CannotPullContainerError: no such manifest"
    )


def test_spot_is_waited_for_until_the_deadline_brings_on_demand() -> None:
    assert PLACED.market == "spot"
    assert vain(history(*["never_started"] * 50), on_demand_comes=True) is None
    assert vain(history(*["user_code"] * 5), on_demand_comes=True) is not None
    assert vain(history("unknown", *["never_started"] * 5), on_demand_comes=True) is None, (
        "on demand is untried"
    )
    mixed = ["unknown", "never_started", "never_started"] * 5
    assert vain(history(*mixed), on_demand_comes=True) is not None
    refused = history(*["never_started"] * 5)
    reserved = [
        replace(attempt, placement=replace(PLACED, market="on_demand", reservation="cr-1"))
        for attempt in refused.attempts
    ]
    assert vain(AttemptHistory(attempts=tuple(reserved)), on_demand_comes=True) is None
    plain = [
        replace(attempt, placement=replace(PLACED, market="on_demand"))
        for attempt in refused.attempts
    ]
    assert vain(AttemptHistory(attempts=tuple(plain)), on_demand_comes=True) is not None


def test_a_reclaim_and_a_commit_are_no_failures() -> None:
    assert vain(history(*["reclaimed"] * 9)) is None
    assert (
        vain(history("user_code", "user_code", "reclaimed", "user_code", "user_code", "user_code"))
        is None
    )
    assert vain(history(*["unknown"] * 9, after=2), told(COMMIT, 8.5, generation=3)) is None
    assert vain(history(*["unknown"] * 9, after=3), told(COMMIT, 8.5, generation=3)) is not None


@pytest.mark.parametrize("skew", [-7200.0, -300.0, 0.0, 300.0, 7200.0])
def test_clocks_minutes_apart_change_nothing_in_what_led_to_a_commit(skew: float) -> None:
    """The first attempt commits, and those after it come to nothing; agents' clocks are not the
    launcher's.
    """
    events = [told(COMMIT, 160.0 + skew, generation=1)]
    for number in range(6):
        known = {
            "placement": PLACED.to_json(),
            "attempt": number,
            "after_generation": min(number, 1),
        }
        # One was placed by the plan of the run, and knew of no generation
        known["after_generation"] *= number != 3
        events.append(told(PLACED_EVENT, 100.0 * (number + 1), **known))
        events.append(
            told(
                BATCH_ATTEMPT,
                100.0 * number + 190,
                job_id=f"{number}",
                cause="unknown",
                started_utc=1.0,
            )
        )
    events.sort(key=lambda event: event.t_wall)
    before_last = [event for event in events if event.name == COMMIT or event.t_wall < 600]
    assert (
        len(read_attempts(before_last).attempts) == 5
        and vain(read_attempts(before_last), *before_last) is None
    )
    found = vain(read_attempts(events), *events)
    assert (
        found is not None
        and found[0] is Outcome.FAILED
        and found[1].startswith("5 attempts in a row")
    )


def test_a_new_run_starts_its_count_of_attempts_anew() -> None:
    other = history(*["never_started"] * 9, run="q")
    ours = history(*["never_started"] * 5)
    assert vain(AttemptHistory(attempts=(*other.attempts, *ours.attempts[:4]))) is None
    assert vain(AttemptHistory(attempts=(*other.attempts, *ours.attempts))) is not None


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ("run --with batch", "batch"),
        ("run --with=batch:queue=other --set a=b", "batch"),
        ("--with cloud run", "batch"),
        ("run --with kubernetes", "kubernetes"),
        ("run --with batch --with local", None),
        ("run --with retry", None),
        ("run", None),
    ],
)
def test_where_a_command_line_sends_training(words: str, backend: str | None) -> None:
    assert requested_backend(["train_flow.py", *words.split()]) == backend


def test_a_folder_of_this_machine_is_no_store_for_containers() -> None:
    said = refusal_reason(RunConfig(store="runs"), "batch")
    assert said is not None and "runs" in said and "s3://bucket/prefix" in said
    assert refusal_reason(RunConfig(store="runs"), None) is None


def test_batch_without_a_role_is_refused_before_metaflow_does_it_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("METAFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("METAFLOW_ECS_S3_ACCESS_IAM_ROLE", raising=False)
    image = {"image": "ebbflow:1"}
    there = RunConfig.model_validate({"store": "s3://bucket/x", "batch": image})
    role = "arn:aws:iam::000000000000:role/job"
    said = refusal_reason(there, "batch", ["--with", "batch"])
    assert said is not None and "no role" in said and "METAFLOW_ECS_S3_ACCESS_IAM_ROLE" in said
    assert refusal_reason(there, "batch", ["--with", f"batch:iam_role={role}"]) is None
    configured = RunConfig.model_validate(
        {"store": there.store, "batch": {"job_role": role, **image}}
    )
    assert refusal_reason(configured, "batch") is None
    assert refusal_reason(there, "kubernetes") is None
    monkeypatch.setenv("METAFLOW_ECS_S3_ACCESS_IAM_ROLE", role)
    assert refusal_reason(there, "batch") is None


def test_metaflow_is_mended_only_with_local_metadata_and_in_releases_that_were_tried() -> None:
    task = ["train_flow.py", "--quiet", "--metadata", "{}", "--datastore", "s3", "step", "train"]
    assert needs_fixes([word.format("local") for word in task])
    assert not needs_fixes([word.format("service") for word in task])
    assert not needs_fixes(["train_flow.py", "step", "local"])
    assert all(
        is_known_release(version) for version in ("2.19.39", "2.19.39+ob(v1)", "2.19.20", "2.19.0")
    )
    assert not any(is_known_release(version) for version in ("2.20.0", "2.19.21", "2.12.1"))


def test_tags_are_put_on_jobs_wherever_the_configuration_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metaflow leaves them out unless it is told to tag."""
    told = "METAFLOW_BATCH_EMIT_TAGS"
    for tags, expected in (({}, None), ({"team": "vision"}, "true")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {"METAFLOW_BATCH_JOB_QUEUE": "jobs", "HOME": os.devnull})
            set_environment(
                RunConfig.model_validate({"store": "s3://a/b", "batch": {"tags": tags}}), "batch"
            )
            assert os.environ.get(told) == expected
            os.environ[told] = "0"
            set_environment(
                RunConfig.model_validate({"store": "s3://a/b", "batch": {"tags": tags}}), "batch"
            )
            assert os.environ[told] == "0", "who says otherwise is believed"

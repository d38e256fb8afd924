"""What a node shows while it trains: scraped from its port or pushed to a gateway, and never at
training's expense.
"""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import COMMIT, COMMIT_FAILED, EVALUATION, PEAK, PHASE, RESTORE, STEP
from ebbflow.core.layout import commit_key
from ebbflow.core.metrics import NODE_METRICS, MetricBoard, Pusher, PushGroup, delete_group
from ebbflow.core.terms import Terms
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.progress import live_metrics
from tests.support.exposition import PROMTOOL, lint, parse, values
from tests.support.flow import wait_until
from tests.support.gangs import free_port
from tests.support.gateway import BINARY, SmallGateway, running_gateway

Emit = Callable[..., Any]
GPU = "ebbflow_gpu"  # tests/unit/test_gpu_counters.py
NODE_0_ONLY = "node 0 only"

REAL = pytest.param(
    "real",
    marks=pytest.mark.skipif(
        BINARY is None, reason="prometheus-pushgateway (Debian) is not installed"
    ),
)


def spec(folder: Path, *, node: int = 0, agent: bool = True, **metrics: Any) -> WorkerSpec:
    """A rank of an agent: two ranks on its node, with heartbeats."""
    for rank in (2 * node, 2 * node + 1):
        Heartbeat.create(folder / f"rank-{rank}.heartbeat").beat(7, "forward")
    return WorkerSpec(
        job="job",
        run="run",
        attempt=0,
        node=node,
        generation=3,
        generation_id="ab",
        candidates=[],
        config=RunConfig(metrics=metrics),
        store_uri="unused",
        prepared={},
        terms=Terms(
            usd_per_rank_second=0.5, budget_usd=9.0, deadline_utc=2e9, price_kind="simulated"
        ).to_json(),
        heartbeat_path=str(folder / f"rank-{2 * node}.heartbeat"),
        agent_pid=1 if agent else None,
    )


def train_a_little(emit: Emit, *, gang_wide: bool = True) -> None:
    """The events of a rank: rank 0 tells what concerns the whole gang as well."""
    emit(PHASE, **{"class": "startup", "seconds": 2.0})
    emit(PEAK, flops_per_second=5e9, dtype="float32")
    if gang_wide:
        emit(RESTORE, step=5, key=commit_key(5, 2, "cd" * 32), seconds=0.5, rejected=[])
    if gang_wide:
        whole = {
            "flops": 1e6,
            "slowest_rank": 1,
            "slowest_ratio": 1.25,
            "slowest_seconds": 0.1,
            "at_risk_usd": 40.0,
        }
    else:
        whole = {}
    for step in (6, 7):
        seconds = {"useful_step": 0.3, "data_wait": 0.1, "checkpoint_stall": 0.05}
        data = {
            "loss": 3.0 - step / 10,
            "tokens": 1000,
            "learning_rate": 0.001,
            "gradient_norm": 0.5,
        }
        emit(STEP, step=step, seconds=seconds, **data, **whole)
    emit(COMMIT_FAILED, step=6, message="full")
    if gang_wide:
        emit(COMMIT, step=7, key="key", bytes=4096, seconds=0.2)
        emit(EVALUATION, step=7, metrics={"held_out_loss": 2.5, "own": 1.0})


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read()


@pytest.fixture
def local_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


@pytest.mark.usefixtures("local_rank_0")
def test_a_nodes_page_shows_every_metric_of_the_catalogue(tmp_path: Path) -> None:
    port = free_port()
    emitted = []

    def emit(name: str, **data: Any) -> str:
        emitted.append((name, data))
        return f"event {name}"

    with live_metrics(spec(tmp_path, port=port), rank=0, world_size=4, emit=emit) as showing:
        train_a_little(showing)
        assert showing("other", step=1, anything=2, flush=True) == "event other", (
            "it stands in for emit in every way"
        )
        page = scrape(port)
    assert len(emitted) == 9 and emitted[-1] == ("other", {"step": 1, "anything": 2, "flush": True})
    assert set(parse(page)) == {
        metric.name for metric in NODE_METRICS if not metric.name.startswith(GPU)
    }
    expected = {
        "step": 7,
        "steps_total": 2,
        "tokens_total": 2000,
        "loss": 2.3,
        "held_out_loss": 2.5,
        "world_size": 4,
        "tokens_per_second": 2500,
        "last_commit_step": 7,
        "committed_bytes_total": 4096,
        "commit_failures_total": 1,
        "generation": 3,
        "slowest_rank": 1,
        "slowest_rank_ratio": 1.25,
        "flops_total": 2e6,
        "budget_usd": 9,
        "slowest_rank_seconds_total": 0.2,
        "slowest_rank_usd_total": 0.2 * 4 * 0.5,
    }
    assert {name: values(page, f"ebbflow_{name}") for name in expected} == {
        name: [pytest.approx(value)] for name, value in expected.items()
    }
    assert values(page, "ebbflow_phase_seconds_total", **{"class": "checkpoint_stall"}) == [
        pytest.approx(0.1)
    ]
    buckets = {
        s.labels["le"]: s.value
        for s in parse(page)["ebbflow_step_seconds"].samples
        if "le" in s.labels
    }
    assert (buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (0, 2, 2)
    [spent] = values(page, "ebbflow_spent_usd", kind="simulated")
    assert spent > 0, "money runs on while the process lives"
    [at_risk] = values(page, "ebbflow_at_risk_usd", kind="simulated")
    assert 40 < at_risk < 40 + spent, "since the last step too, at the gang's price"
    assert values(page, "ebbflow_rank_step", rank="1") == [7], (
        "the page shows the node's other ranks by their heartbeats"
    )
    with pytest.raises(OSError):
        scrape(port)  # closed with the context
    if PROMTOOL is not None:  # installed by CI; the parser above has read the page in any case
        assert lint(page) == ""


@pytest.mark.usefixtures("local_rank_0")
def test_other_nodes_leave_out_what_only_node_0_knows(tmp_path: Path) -> None:
    port = free_port()
    with live_metrics(
        spec(tmp_path, node=1, port=port), rank=2, world_size=4, emit=lambda *a, **k: None
    ) as showing:
        train_a_little(showing, gang_wide=False)
        page = scrape(port)
    told = set()
    for name, family in parse(page).items():
        if any(s.value for s in family.samples):
            told.add(name)
    only_node_0 = {metric.name for metric in NODE_METRICS if NODE_0_ONLY in metric.help}
    shown = {metric.name for metric in NODE_METRICS if not metric.name.startswith(GPU)}
    assert told == shown - only_node_0 and only_node_0
    nodes = set()
    for family in parse(page).values():
        nodes |= {s.labels["node"] for s in family.samples}
    assert nodes == {"1"}


@pytest.mark.usefixtures("local_rank_0")
def test_two_nodes_of_one_machine_take_ports_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with live_metrics(
            spec(tmp_path, port=port), rank=0, world_size=1, emit=lambda *a, **k: None
        ):
            said = capsys.readouterr().out
            found = int(said.partition("/metrics")[0].rpartition(":")[2])
            assert port < found < port + 16 and f"metrics.port {port} is taken" in said
            assert values(scrape(found), "ebbflow_generation", node="0") == [3]


@pytest.mark.usefixtures("local_rank_0")
def test_without_a_free_metrics_port_training_continues_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 65535))
        taken.listen()
        emitted = []
        with live_metrics(
            spec(tmp_path, port=65535),
            rank=0,
            world_size=1,
            emit=lambda name, **data: emitted.append(name),
        ) as showing:
            showing(PHASE, **{"class": "startup", "seconds": 1.0})
    assert emitted == [PHASE] and "metrics: WARNING: node 0 serves none" in capsys.readouterr().out


@pytest.mark.usefixtures("local_rank_0")
def test_an_event_that_cannot_be_shown_costs_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with live_metrics(
        spec(tmp_path, port=free_port()), rank=0, world_size=1, emit=lambda *a, **k: "kept"
    ) as showing:
        assert [showing(STEP, step=1, loss=1.0), showing(STEP, step=2)] == ["kept", "kept"]
    assert capsys.readouterr().out.count("WARNING: step events are not shown: KeyError") == 1


def test_only_the_nodes_first_rank_shows_and_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emit(name: str, **data: Any) -> None: ...

    monkeypatch.setenv("LOCAL_RANK", "1")
    with live_metrics(spec(tmp_path, port=free_port()), rank=1, world_size=2, emit=emit) as showing:
        assert showing is emit
    monkeypatch.setenv("LOCAL_RANK", "0")
    with live_metrics(spec(tmp_path), rank=0, world_size=2, emit=emit) as showing:
        assert showing is emit


def emit_nothing(*words: Any, **fields: Any) -> None:
    pass


@pytest.mark.usefixtures("local_rank_0")
@pytest.mark.parametrize("kind", ["small", REAL])
def test_each_node_pushes_a_group_of_its_own_and_deletes_exactly_that(
    kind: str, tmp_path: Path
) -> None:
    with running_gateway(kind, tmp_path) as gateway:
        alone = {"agent": False, "push_url": gateway.url, "interval_seconds": 1.0}
        with live_metrics(spec(tmp_path, node=1, **alone), rank=2, world_size=4, emit=emit_nothing):
            with live_metrics(
                spec(tmp_path, **alone), rank=0, world_size=4, emit=emit_nothing
            ) as showing:
                wait_until("both groups", lambda: len(gateway.groups()) == 2, timeout=60)
                train_a_little(showing)
                wait_until(
                    "the next push",
                    lambda: gateway.groups()["job", "0"].get("ebbflow_step") == 7,
                    timeout=60,
                )
                assert "ebbflow_step" not in gateway.groups()["job", "1"], (
                    "one node's push replaced another's group"
                )
            # The gateway answers a deletion before it has carried it out.
            wait_until(
                "the end of its group alone",
                lambda: set(gateway.groups()) == {("job", "1")},
                timeout=60,
            )
        wait_until("the end of both", lambda: gateway.groups() == {}, timeout=60)


@pytest.mark.usefixtures("local_rank_0")
def test_under_an_agent_the_rank_leaves_its_group_to_the_agent(tmp_path: Path) -> None:
    """Two processes that delete could delete what the next generation has just pushed."""
    gateway = SmallGateway()
    try:
        with live_metrics(
            spec(tmp_path, push_url=gateway.url), rank=0, world_size=1, emit=lambda *a, **k: None
        ):
            wait_until("a push", gateway.groups, timeout=60)
        assert [method for method, _ in gateway.requests] == ["PUT"]
        delete_group(PushGroup(gateway.url, "job", 0), say=print)
        assert gateway.groups() == {}
    finally:
        gateway.close()


def test_a_gateway_that_is_away_costs_one_line_until_it_is_back() -> None:
    said: list[str] = []
    gateway = SmallGateway()
    gateway.away = True
    group = PushGroup(gateway.url, "job", 0)
    registry = MetricBoard(NODE_METRICS, {"job": "job", "node": "0"}).registry()
    pusher = Pusher(group, registry, interval_seconds=0.01, say=said.append)
    wait_until("several tries", lambda: len(gateway.requests) > 3, timeout=60)
    assert len(said) == 1 and "accepts no push, retrying: HTTP Error 503" in said[0]
    gateway.away = False
    wait_until("a group", gateway.groups, timeout=60)
    pusher.close()
    gateway.close()
    delete_group(group, say=said.append)
    assert "accepts pushes again" in said[1] and len(said) == 3
    assert "may still have the group job=job, node=0, which never expires" in said[2]

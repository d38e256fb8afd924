"""`torchrun -m training`: restarted workers go on with the job that the first ones began."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import PROFILE, read_events
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.layout import check_job_name
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.cost.report.figure_text import format_key_figures
from ebbflow.cost.report.report import build_report
from ebbflow.training.attach.standalone import default_job_name
from ebbflow.training.errors import DataError
from tests.support.gangs import free_port, run_ranks
from tests.support.long_tests import mark_long
from tests.support.tied_rank import STEP_DEADLINE_SECONDS
from tests.support.warm import start_warm

STEPS = 200
SETTINGS = {
    "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "sequence_length": 32},
    "training": {
        "batch_size": 8,
        "max_steps": STEPS,
        "evaluation_interval_steps": STEPS,
        "profile_from": 3,
        "profile_steps": 2,
    },
    "checkpoint": {"interval_steps": 10},
    "data": {"suffixes": [".txt"], "held_out_fraction": 0.3, "held_out_samples": 4},
}


def write_config(folder: Path) -> Path:
    """As YAML, of which JSON is a part."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(
            "".join(f"{number} and {line} is {number + line}.\n" for line in range(60))
        )
    data = {**SETTINGS["data"], "path": str(texts)}
    path = folder / "config.yaml"
    path.write_text(json.dumps({**SETTINGS, "data": data, "store": str(folder / "store")}))
    return path


def pid_of_rank(torchrun: int, rank: int) -> int | None:
    """Of the worker that torchrun's agent has started as this rank."""
    for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    return None


def run_and_kill_rank_1(folder: Path, rendezvous: list[str]) -> str:
    """Let torchrun train; kill a rank once there is a commit.

    Returns the output, when all has ended well.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    environment = dict(
        os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONPATH=str(PROJECT_ROOT)
    )
    log = folder / "torchrun.log"
    with open(log, "wb") as out:
        torchrun = subprocess.Popen(
            [*command, "-m", "training", str(write_config(folder))],
            cwd=PROJECT_ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        limit = time.monotonic() + 60
        while not list(folder.glob("store/jobs/*/commits/*/*/*.json")):
            assert time.monotonic() < limit and torchrun.poll() is None, log.read_text()
            time.sleep(0.02)
        os.kill(pid_of_rank(torchrun.pid, 1), signal.SIGKILL)
        assert torchrun.wait(90) == 0, log.read_text()
    finally:
        torchrun.terminate()  # its ranks too; those have sessions of their own
        torchrun.wait(30)
    return log.read_text()


@pytest.mark.parametrize("rendezvous", mark_long(["with a run id", "without"], ["without"]))
def test_a_restart_by_torchrun_continues_the_same_job(tmp_path: Path, rendezvous: str) -> None:
    static = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    output = run_and_kill_rank_1(
        tmp_path, ["--standalone"] if rendezvous == "with a run id" else static
    )
    jobs = list((tmp_path / "store" / "jobs").iterdir())
    assert len(jobs) == 1, output
    records = [json.loads(path.read_text()) for path in sorted(jobs[0].glob("generations/*.json"))]
    assert [(record["generation"], record["attempt"]) for record in records] == [(1, 0), (2, 1)]
    resumed_at = records[1]["parent_step"]
    assert 0 < resumed_at < STEPS, "the rank was killed in mid-job, after a commit"
    events = read_events(Store.open(str(jobs[0])))
    second = [
        event.step
        for event in events
        if event.name == "step" and (event.generation, event.rank) == (2, 0)
    ]
    assert second == list(range(resumed_at + 1, STEPS + 1))
    first = {event.step for event in events if event.name == "step" and event.generation == 1}
    assert first >= set(range(1, resumed_at + 1))
    prepared = [event for event in events if event.name == "prepared"]
    assert [event.generation for event in prepared] == [1, 2]
    assert all(
        event.data["unigram_entropy_nats"] > 1 and event.data["train_tokens"] > 0
        for event in prepared
    )
    assert [event.data["outcome"] for event in events if event.name == "outcome"] == ["completed"]
    assert_profiled(tmp_path)


def test_ranks_wait_for_long_preparation_and_tied_weights_stay_tied(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    options = {"seconds": STEP_DEADLINE_SECONDS + 2}
    path.write_text(
        json.dumps({"workload": "tests.support.workload_cases:Tied", "workload_options": options})
    )
    outputs = run_ranks(
        2, ["-m", "tests.support.tied_rank", str(path), "--set", f"store={tmp_path / 'store'}"]
    )
    found = {
        line.split()[0]: line.split()[1:]
        for line in outputs[1].splitlines()
        if line.count(" ") == 4
    }
    assert list(found) == ["ddp", "fsdp2", "hsdp"], outputs
    assert found["ddp"] == found["fsdp2"] == found["hsdp"]
    assert found["ddp"][1:3] == ["3", "True"], found


@pytest.mark.parametrize("run_id", ["3f0c", "my/job: 1", "my/job. 1", "x" * 300, "…"])
def test_any_run_id_makes_a_name_of_its_own(run_id: str) -> None:
    name = default_job_name({"TORCHELASTIC_RUN_ID": run_id}, 1)
    assert check_job_name(name) == name == default_job_name({"TORCHELASTIC_RUN_ID": run_id}, 1)
    assert name not in {
        default_job_name({"TORCHELASTIC_RUN_ID": other}, 1) for other in ("my-job--1", "x" * 80)
    }


def test_an_error_of_rank_0_before_the_start_is_one_line_and_every_ranks_exit_code(
    tmp_path: Path,
) -> None:
    path = write_config(tmp_path)
    for text in (tmp_path / "texts").iterdir():
        text.unlink()
    environment = dict(
        os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONPATH=str(PROJECT_ROOT)
    )
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment["LOCAL_WORLD_SIZE"] = "2"
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [
        start_warm(
            "ebbflow.training",
            [str(path), "--job", "empty"],
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            output=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors = [log.read_text() for log in logs]
    assert codes == [DataError.outcome.exit_code] * 2, errors
    assert (
        "Traceback" not in "".join(errors) and len(errors[0].splitlines()) == 1 and not errors[1]
    ), errors


def assert_profiled(folder: Path) -> None:
    """Each rank of the first generation: what it sent in two steps, and a trace that Perfetto
    reads.
    """
    (job,) = (folder / "store/jobs").iterdir()
    found = [event for event in read_events(Store.open(str(job))) if event.name == PROFILE]
    assert sorted((event.rank, event.data["first"], event.data["last"]) for event in found) == [
        (0, 3, 4),
        (1, 3, 4),
    ]
    for event in found:
        trace = json.loads(gzip.decompress(Path(event.data["trace"]).read_bytes()))
        assert sum(
            traced["name"].startswith("ProfilerStep") or traced.get("cat") == "cpu_op"
            for traced in trace["traceEvents"]
        )
        assert (
            event.data["classes"]["matrix products"] > 0 and event.data["classes"]["optimizer"] > 0
        )
        rows = {row["name"]: row for row in event.data["collectives"]}
        assert rows["allgather"]["ranks"] == 2 and rows["allgather"]["calls"] % 2 == 0
        # Two steps gather all weights at least once, at 4 bytes each.
        weights = (
            4
            * causal_lm_shape(
                RunConfig.model_validate({"model": SETTINGS["model"]}).model
            ).parameters
        )
        assert (
            rows["allgather"]["bytes"] >= 2 * weights
            and rows["allgather"]["bus_bytes_per_second"] > 0
        )
        assert 0 <= event.data["overlap_share"] <= 1
    figures = format_key_figures(build_report(list(read_events(Store.open(str(job))))))
    assert (
        figures["profile"].startswith("steps 3 to 4 of each rank: ")
        and "· matrix products" in figures
    )
    assert any(name.startswith("· allgather, 2 ranks") for name in figures)

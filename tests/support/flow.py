"""Running the real flow as a user does, in folders of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ebbflow.training.launch.heartbeat import Heartbeat
from tests.support.gangs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
FLOW = ROOT / "ebbflow/flows" / "train_flow.py"

# Small enough for a test, large enough to lose work and to redo it.
TINY = {
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.sequence_length": 64,
    "training.batch_size": 16,
    "training.max_steps": 60,
    "training.evaluation_interval_steps": 30,
    "training.scheduler.warmup_steps": 5,
    "checkpoint.interval_steps": 8,
    "data.held_out_samples": 16,
}

_RUNNER = """
import json, sys
import ebbflow
ebbflow.use_records()
from metaflow import Runner

method, flow, options = sys.argv[1:]
with Runner(flow) as runner:
    done = getattr(runner, method)(**json.loads(options))
print(f"Runner says {done.status}: {done.run.pathspec}")
sys.exit(done.returncode)
"""


@dataclass(frozen=True)
class FlowRun:
    """A finished run: its exit code, all that it printed, and the report of its job."""

    exit_code: int
    output: str
    report: dict[str, Any]
    folder: Path


class FlowRunner:
    """Runs flows whose records, jobs and reports all lie below `folder`; with `store` the jobs lie
    there instead.

    environment: variables that the runs get besides those of the test.
    """

    program = FLOW
    python = sys.executable

    def __init__(
        self,
        folder: Path,
        *,
        store: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.store = store or str(self.runs)
        self.environment = dict(environment or {})
        folder.mkdir(parents=True, exist_ok=True)

    def options(self, **settings: object) -> list[str]:
        """The tiny job's options; keyword arguments use __ for the dot: training__max_steps=100."""
        values = {
            **TINY,
            "store": self.store,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        words = []
        for key, value in values.items():
            words += ("--set", f"{key}={value}")
        return words

    def start(
        self, *words: str, cwd: Path | None = None, program: Iterable[str] = ()
    ) -> subprocess.Popen[str]:
        """Start the flow in a process group of its own; its output goes to a file beside its
        records.
        """
        own = {"EBBFLOW_RUNS": str(self.runs), "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(self.folder)}
        if program:
            own |= {"PYTHONPATH": str(ROOT)}
        else:
            own |= {}
        environment = {**os.environ, **own, **self.environment}
        self.log = self.folder / f"output-{time.monotonic_ns()}.log"
        with open(self.log, "w") as log:
            return subprocess.Popen(
                [self.python, *(program or [str(self.program)]), *words],
                cwd=cwd or self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def start_runner(
        self, method: str, *, cwd: Path | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start the flow as a program of a user does with Metaflow's `Runner`; method: run or
        resume.
        """
        words = [method, str(self.program), json.dumps(options)]
        return self.start(*words, cwd=cwd, program=("-c", _RUNNER))

    def finish(self, process: subprocess.Popen[str], timeout: float = 400) -> FlowRun:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(
                f"the flow did not end within {timeout} s:\n{self.log.read_text()}"
            ) from None
        folder = self.runs / "latest"
        report = folder / "report.json"
        return FlowRun(
            exit_code=code,
            output=self.log.read_text(),
            report=json.loads(report.read_text()) if report.exists() else {},
            folder=folder.resolve(),
        )

    def run(self, *words: str, timeout: float = 400, cwd: Path | None = None) -> FlowRun:
        return self.finish(self.start(*words, cwd=cwd), timeout)

    def await_step(self, step: int, *, generation: int, rank: int = 0, timeout: float = 120) -> int:
        """Wait until a rank of the generation has begun a step; returns its pid.

        Its heartbeat is on this machine.
        """

        def begun() -> int:
            for path in (self.runs / "latest" / "logs").glob(
                f"{generation:06d}*/rank-{rank}.heartbeat"
            ):
                seen = Heartbeat(path).read()
                if seen.step >= step:
                    return seen.pid
                return 0
            return 0

        return wait_until(f"step {step} of generation {generation}", begun, timeout)

    def events(self) -> list[dict[str, Any]]:
        """All events of the latest job that are in the store now."""
        events = []
        for path in sorted((self.runs / "latest" / "events").rglob("*.jsonl")):
            events += [
                json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")
            ]
        events = [event for event in events if "seal" not in event]
        return sorted(events, key=lambda event: event["t_wall"])


def train_alone(runner: FlowRunner, *, ranks: int = 1, **settings: object) -> dict[str, Any]:
    """The report of the tiny job, trained by ranks of this machine without agents or Metaflow: a
    tenth of a run's work.

    They find what the runner's runs find.
    """
    environment = {**os.environ, "EBBFLOW_RUNS": str(runner.runs), **runner.environment}
    options = runner.options(
        **{"cluster__nodes": 1, "cluster__processes_per_node": ranks, **settings}
    )
    words = ["configs/laptop.yaml", "--job", "alone", *options]
    run_ranks(
        ranks, ["-m", "ebbflow.training", *words], deadline_seconds=200, environment=environment
    )
    return _own_report("alone", environment)


def train_quietly(
    folder: Path, *settings: str, config: str = "configs/laptop.yaml", ranks: int = 2
) -> dict[str, Any]:
    """The report of a job that ranks train without agents, Metaflow or an interruption: a fifth of
    a run's work.
    """
    words = [config, "--job", "quiet", *settings, "--set", f"store={folder}"]
    run_ranks(ranks, ["-m", "ebbflow.training", *words], deadline_seconds=200)
    return _own_report("quiet", {**os.environ, "EBBFLOW_RUNS": str(folder)}, "--store", str(folder))


def wait_until(
    what: str, happened: Callable[[], Any], timeout: float = 200, *, pause: float = 0.1
) -> Any:
    """The first true answer of `happened`; fails by naming what was waited for.

    pause: seconds between two looks; more of them where a look is a request, which takes CPU time
        of what is awaited.
    """
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        if answer := happened():
            return answer
        time.sleep(pause)
    raise AssertionError(f"waited {timeout} s for {what}")


def processes_with(text: str) -> list[int]:
    """Pids of all live processes whose environment or command line has `text` in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            known = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if text.encode() in known and state != "Z" and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """IP addresses, as /proc/net writes them, at which any of these processes accepts TCP
    connections.
    """
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(path))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def assert_ledger_adds_up(report: dict) -> None:
    lines = report["ledger"]
    assert round(sum(line["usd"] for line in lines), 6) == report["total_usd"]
    assert sum(line["rank_seconds"] for line in lines) == pytest.approx(
        report["paid_rank_seconds"], abs=1e-3
    )
    unattributed = sum(line["rank_seconds"] for line in lines if line["class"] == "unattributed")
    assert unattributed <= 0.01 * report["paid_rank_seconds"], lines


def metered_rank_seconds(report: dict) -> float:
    """Return the paid rank-seconds that Batch's own times show: all but the estimate of the time for
    which it keeps idle instances.
    """
    estimated = sum(
        line["rank_seconds"] for line in report["ledger"] if line["class"] == "scale_down"
    )
    return report["paid_rank_seconds"] - estimated


def generation_seconds(report: dict, number: int) -> float:
    return next(
        entry["paid_rank_seconds"]
        for entry in report["events"]["generations"]
        if entry["generation"] == number
    )


def assert_killed_run_is_billed(report: dict) -> None:
    """The job was interrupted once, and the bill has the time of the killed run too."""
    assert report["interruptions"] == 1
    assert_ledger_adds_up(report)
    first, second = (generation_seconds(report, number) for number in (1, 2))
    assert first > 0 and second > 0
    assert report["paid_rank_seconds"] > second


def _own_report(job: str, environment: Mapping[str, str], *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "cost", "report", job, *words, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)

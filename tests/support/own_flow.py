"""Running a user's own flows with `@ebbflow`, in folders of their own, and ending their processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.core.layout import parse_commit_key
from ebbflow.core.process import children, read_system_file
from ebbflow.flows.own_flow.trained_model import TrainedModel
from ebbflow.training.launch.heartbeat import Heartbeat

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent / "own_flows"
_DEADLINE_SECONDS = 240.0

_READ_ARTIFACTS = """
import pickle, sys
from metaflow import Run, namespace
namespace(None)
pathspec, step, *names = sys.argv[1:]
tasks = sorted(Run(pathspec)[step], key=lambda task: task.index or 0)
found = [[task[name].data if name in task else None for name in names] for task in tasks]
sys.stdout.buffer.write(pickle.dumps(found))
"""


@dataclass(frozen=True)
class OwnFlowRun:
    """A finished run of a user's flow."""

    exit_code: int
    output: str
    pathspec: str  # FLOW/RUN; "" if no run has begun


class OwnFlow:
    """A user's flow in a folder with the files of tests/support/own_flows."""

    def __init__(self, folder: Path, name: str, *, text: str = "", **environment: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in SOURCES.glob("*.*"):
            shutil.copy(path, folder / path.name)
        self.file = folder / f"{name}.py"
        if text:
            self.file.write_text(text)
        self.environment = {
            "PYTHONPATH": str(ROOT),
            "METAFLOW_USER": "tester",
            "EBBFLOW_RUNS": str(folder / "runs"),
            "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "4",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.log = folder / "output.log"
        self._former: set[str] = set()  # jobs of earlier runs

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs in the store beside the flow's datastore."""
        return sorted(path.name for path in self._jobs_folder.glob("*"))

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        self.log = self.folder / f"output-{time.monotonic_ns()}.log"
        self._former = set() if "resume" in words else set(self.jobs)
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, self.file.name, *words],
                cwd=self.folder,
                env={**os.environ, **self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(
        self, process: subprocess.Popen[bytes], *, seconds: float = _DEADLINE_SECONDS
    ) -> OwnFlowRun:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the flow did not end:\n{self.log.read_text()}") from None
        output = self.log.read_text()
        flow = output.partition("executing ")[2].split(" ")[0]
        run = output.partition("(run-id ")[2].partition(")")[0]
        return OwnFlowRun(code, output, f"{flow}/{run}" if run else "")

    def run(self, *words: str, **environment: str) -> OwnFlowRun:
        return self.finish(self.start(*words, **environment))

    def succeed(self, *words: str, **environment: str) -> OwnFlowRun:
        done = self.run(*words, **environment)
        assert done.exit_code == 0, done.output
        return done

    def await_commit(self, step: int, *, job: str = "") -> None:
        """Wait until this run's job whose name ends with `job` has a commit of `step` or later."""
        limit = time.monotonic() + _DEADLINE_SECONDS
        while self._newest_step(job) < step:
            assert time.monotonic() < limit, self.log.read_text()
            time.sleep(0.02)

    def kill_task(self, launcher: subprocess.Popen[bytes], step: str, *, node: int = 0) -> None:
        """Kill the process of a running task of `step`; of a gang, that of one node."""
        [task] = [pid for pid in children(launcher.pid) if _is_task(pid, step)]
        if node > 0:
            task = [pid for pid in children(task) if _is_task(pid, step)][node - 1]
        os.kill(task, signal.SIGKILL)

    def kill_rank(self, rank: int) -> None:
        """Kill a rank of this run's only job."""
        [job] = [name for name in self.jobs if name not in self._former]
        newest = max((self.folder / "runs" / job / "logs").glob(f"*/rank-{rank}.heartbeat"))
        os.kill(Heartbeat(newest).read().pid, signal.SIGKILL)

    def kill_launcher(self, launcher: subprocess.Popen[bytes]) -> None:
        """Kill the launcher with its tasks, as the loss of the machine does."""
        tasks = children(launcher.pid)
        launcher.kill()
        launcher.wait()
        for task in tasks:
            os.kill(task, signal.SIGKILL)

    def artifacts(self, run: OwnFlowRun, step: str, *names: str) -> list[list[Any]]:
        """Return the artifacts of each task of a step; None for those that a task lacks."""
        import pickle

        done = subprocess.run(
            [sys.executable, "-c", _READ_ARTIFACTS, run.pathspec, step, *names],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()
        return pickle.loads(done.stdout)

    def model(self, run: OwnFlowRun, step: str = "train") -> TrainedModel:
        """Return the artifact `model` of the first task of a step."""
        return self.artifacts(run, step, "model")[0][0]

    def cards(self, step: str) -> dict[str, str]:
        """The HTML of the cards of the first task of this flow's newest run, by their ids."""
        pages = self.folder.glob(f".metaflow/mf.cards/*/runs/*/steps/{step}/tasks/*/cards/*.html")
        return {path.name.split("-")[1]: path.read_text() for path in pages}

    def await_card(self, step: str) -> dict[str, str]:
        limit = time.monotonic() + _DEADLINE_SECONDS
        while not self.cards(step):
            assert time.monotonic() < limit, self.log.read_text()
            time.sleep(0.2)
        return self.cards(step)

    @property
    def has_report(self) -> bool:
        """Whether a job of this flow has its report, which is written when it ends."""
        return any((self.folder / "runs").glob("*/report.html"))

    def python(self, code: str) -> str:
        """Run code in the flow's folder, and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def notebook(self, *cells: str) -> list[str]:
        """Run the cells of a notebook in the flow's folder, and return what the last one printed."""
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.v4.new_notebook()
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        client = NotebookClient(
            notebook, timeout=_DEADLINE_SECONDS, resources={"metadata": {"path": str(self.folder)}}
        )
        client.execute(env={**os.environ, **self.environment})
        outputs = notebook.cells[-1].outputs
        return [output["text"] for output in outputs if output["output_type"] == "stream"]

    def ebbflow(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ebbflow", *words],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def listed_jobs(self) -> dict[str, dict[str, Any]]:
        """The jobs of `ebbflow jobs` by name."""
        listed = json.loads(self.ebbflow("jobs", "--json"))
        return {job["job"]: job for job in listed}

    @property
    def _jobs_folder(self) -> Path:
        return self.folder / ".metaflow" / "ebbflow" / "jobs"

    def _newest_step(self, job: str) -> int:
        names = [name for name in self.jobs if name.endswith(job) and name not in self._former]
        if not names:
            return -1
        folder = self._jobs_folder / names[0]
        keys = [str(path.relative_to(folder)) for path in folder.glob("commits/*/*/*.json")]
        return max((parse_commit_key(key)[0] for key in keys), default=-1)


def _is_task(pid: int, step: str) -> bool:
    words = read_system_file(f"/proc/{pid}/cmdline").split("\0")
    return "step" in words and step in words

"""Scripts of tests/support/scripts, run in forks of one process that has imported torch: a start takes no seconds."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from ebbflow.infra.events import Event, read_events
from ebbflow.infra.layout import parse_commit_key
from ebbflow.infra.store import Store
from tests.support.gangs import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
_PRELOADED = ("ebbflow.training.attach", "torch.nn.parallel", "torch.distributed.fsdp", "numpy.random")
_DEADLINE_SECONDS = 120


class _Server:
    """The process that forks scripts on request, over lines of JSON."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_scripts"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@cache
def _server() -> _Server:
    return _Server()


def _serve() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif "preload" in request:
            answer = [importlib.import_module(name).__name__ for name in request["preload"]]
        else:
            answer = os.fork()
            if answer == 0:
                _run(Path(request["script"]), request["words"], request["environment"])
        print(json.dumps(answer), flush=True)


def preload(*modules: str) -> None:
    """Import modules once for all scripts that are started from now on."""
    _server().ask(preload=modules)


class ScriptRank:
    """One rank of a script that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = _server().ask(poll=self.pid)
        return self._code


Ranks = list[ScriptRank]


def attached(folder: Path, name: str) -> Path:
    """Return a copy of a script with its patch applied: the lines that a user changes."""
    folder.mkdir(exist_ok=True)
    script = folder / f"{name}.py"
    if not script.exists():
        script.write_text((SCRIPTS / script.name).read_text())
        command = ["git", "apply", "-p1", str(SCRIPTS / f"{name}.patch")]
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "GIT_DIR": "/nonexistent"})
    return script


def start(script: Path, *words: str, ranks: int = 1, **environment: str) -> Ranks:
    """Start a script as torchrun starts it, in its folder, with its output in script.log."""
    port, processes = str(free_port()), []
    for rank in range(ranks):
        own = {"EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5", **environment}
        if ranks > 1:
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
            own |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(ScriptRank(_server().ask(script=str(script), words=words, environment=own)))
    return processes


def _run(script: Path, words: list[str], environment: dict[str, str]) -> None:
    """Run the script in this fork, and exit as the interpreter would."""
    log = os.open(script.parent / "script.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setsid()
    os.chdir(script.parent)
    os.environ.update(environment)
    sys.argv = [str(script), *words]
    code: Any = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.last_value, code = error, 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def output(script: Path) -> str:
    return (script.parent / "script.log").read_text()


def finish(processes: Ranks, script: Path, code: int = 0) -> None:
    """Wait until all ranks have ended, and check their exit codes."""
    limit = time.monotonic() + _DEADLINE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        time.sleep(0.01)
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    assert codes == [code] * len(processes), f"{codes}\n{output(script)}"


def job_folder(script: Path) -> Path:
    return script.parent / "runs" / "jobs" / script.stem


def commits(script: Path) -> list[int]:
    base = job_folder(script)
    return sorted(parse_commit_key(str(path.relative_to(base)))[0] for path in base.glob("commits/*/*/*.json"))


def interrupt(processes: Ranks, script: Path, step: int, number: int, *, ranks: list[int] | None = None) -> None:
    """Send a signal to the ranks once there is a commit of `step` or later."""
    limit = time.monotonic() + _DEADLINE_SECONDS
    while not any(found >= step for found in commits(script)):
        assert all(process.poll() is None for process in processes), output(script)
        assert time.monotonic() < limit, output(script)
        time.sleep(0.005)
    for process in processes if ranks is None else [processes[rank] for rank in ranks]:
        os.kill(process.pid, number)


def final_state(script: Path, step: int) -> dict[tuple[str, str], bytes]:
    """Return the bytes of the last commit by rank's file and name: weights, optimizer, states and random states."""
    base, found = job_folder(script), {}
    for path in base.glob(f"data/*/{step:012d}/*.bin"):
        content = path.read_bytes()
        index = json.loads((base / "index" / path.relative_to(base / "data")).with_suffix(".json").read_text())
        found |= {(path.stem, name): content[start : start + size] for name, *_, start, size in index["items"]}
    assert found, commits(script)
    return {key: value for key, value in found.items() if not key[1].endswith(".numpy")}  # which no script seeds


def events_of(script: Path) -> list[Event]:
    return read_events(Store.open(str(job_folder(script))))


if __name__ == "__main__":
    _serve()

"""Scripts of tests/support/scripts: patched as a user would, started, interrupted, and their final
states.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from ebbflow.core.events import Event, read_events
from ebbflow.core.layout import job_prefix, parse_commit_key
from ebbflow.core.store import Store
from tests.support.gangs import free_port
from tests.support.warm import WarmProcess, start_warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
_DEADLINE_SECONDS = 120


def attached(folder: Path, name: str) -> Path:
    """Return a copy of a script with its patch applied: the lines that a user changes."""
    folder.mkdir(exist_ok=True)
    script = folder / f"{name}.py"
    if not script.exists():
        script.write_text((SCRIPTS / script.name).read_text())
        command = ["git", "apply", "-p1", str(SCRIPTS / f"{name}.patch")]
        subprocess.run(
            command, cwd=folder, check=True, env={**os.environ, "GIT_DIR": "/nonexistent"}
        )
    return script


def start(
    script: Path, *words: str, ranks: int = 1, libraries: tuple[str, ...] = (), **environment: str
) -> list[WarmProcess]:
    """Start a script as torchrun starts it, in its folder, with its output in script.log."""
    port = str(free_port())
    log = script.parent / "script.log"
    processes = []
    for rank in range(ranks):
        own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        own |= {"EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5", **environment}
        if ranks > 1:
            own |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_PORT": port,
            }
            own |= {
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
        processes.append(
            start_warm(str(script), list(words), environment=own, output=log, libraries=libraries)
        )
    return processes


def output(script: Path) -> str:
    return (script.parent / "script.log").read_text()


def finish(processes: list[WarmProcess], script: Path, code: int = 0) -> None:
    """Wait until all ranks have ended, and check their exit codes."""
    limit = time.monotonic() + _DEADLINE_SECONDS
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        time.sleep(0.01)
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
    assert codes == [code] * len(processes), f"{codes}\n{output(script)}"


def job_folder(script: Path) -> Path:
    return script.parent / "runs" / "jobs" / script.stem


def job_store(script: Path) -> Store:
    return Store.open(os.environ.get("EBBFLOW__STORE") or str(script.parent / "runs")).sub(
        job_prefix(script.stem)
    )


def commits(script: Path) -> list[int]:
    return sorted(parse_commit_key(meta.key)[0] for meta in job_store(script).list("commits"))


def interrupt(
    processes: list[WarmProcess],
    script: Path,
    step: int,
    number: int,
    *,
    ranks: list[int] | None = None,
) -> None:
    """Send a signal to the ranks once they have made a commit of `step` or later."""
    limit = time.monotonic() + _DEADLINE_SECONDS
    before = max(commits(script), default=0)
    while not any(commit >= step and commit > before for commit in commits(script)):
        assert all(process.poll() is None for process in processes), output(script)
        assert time.monotonic() < limit, output(script)
        time.sleep(0.005)
    for process in processes if ranks is None else [processes[rank] for rank in ranks]:
        process.send_signal(number)


def final_state(script: Path, step: int) -> dict[tuple[str, str], bytes]:
    """Return the bytes of the last commit by rank's file and name: weights, optimizer, states and
    random states.
    """
    base = job_folder(script)
    found = {}
    for path in base.glob(f"data/*/{step:012d}/*.bin"):
        content = path.read_bytes()
        index = json.loads(
            (base / "index" / path.relative_to(base / "data")).with_suffix(".json").read_text()
        )
        found |= {
            (path.stem, name): content[start : start + size]
            for name, *_, start, size in index["items"]
        }
    assert found, commits(script)
    # Which no script seeds
    return {key: value for key, value in found.items() if not key[1].endswith(".numpy")}


def events_of(script: Path) -> list[Event]:
    return read_events(job_store(script))

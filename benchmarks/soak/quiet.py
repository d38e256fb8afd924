"""`ebbflow soak quiet`: hours in which nothing is broken, and nobody may be killed for being slow.

A job with commits, evaluations and, on request, compilation runs with the default limits, while the
machine is made busy, uploads are frozen for 20 s, data take 20 s to come, and the garbage collector
stops the interpreter. Whatever the watch takes for a fault in all this is a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.orders import Order
from benchmarks.chaos.scene import Scene
from benchmarks.soak.faults import soak_config
from benchmarks.training.survival.job import make_scene
from benchmarks.training.tables import machine_line
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.events import COMMIT, EVALUATION, FAULT_DETECTED, STEP, read_events
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.infra.instance import describe_machine
from ebbflow.training.errors import GangError, TrainingError

_STALL_SECONDS = 20.0
_PAUSE_SECONDS = 10.0  # of peace after each disturbance
_LOAD_SECONDS = 20.0
_LOAD_PROCESSES = 4
_CYCLES = 3_000_000
_START_SECONDS = 300.0
_END_SECONDS = 120.0
_DEFAULT_FLOOR_SECONDS = 60.0


@dataclass
class Calm:
    """What was done to a job that must not mind. done: how often, by name."""

    done: dict[str, int] = field(default_factory=dict)
    ended: str = ""


def main(arguments: list[str]) -> int:
    """0 when nobody was blamed for anything, else 1."""
    parser = argparse.ArgumentParser(
        prog="ebbflow soak quiet", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--minutes", type=float, default=120.0, help="how long (default 120)")
    parser.add_argument(
        "--floor", type=float, default=_DEFAULT_FLOOR_SECONDS, help="survival.hang_floor_seconds"
    )
    parser.add_argument("--compile", action="store_true", help="with parallel.compile")
    parser.add_argument("--seed", type=int, default=0, help="of the targets (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--folder", type=Path, help="where the store is made (default: the temporary folder)"
    )
    given = parser.parse_args(arguments)
    try:
        return _soak(given)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code


def _soak(given: argparse.Namespace) -> int:
    machine = describe_machine()
    print(machine_line(machine), flush=True)
    with tempfile.TemporaryDirectory(prefix="ebbflow-soak-", dir=given.folder) as name:
        config = soak_config(Path(name), floor_seconds=given.floor)
        config = config.model_copy(
            update={"parallel": config.parallel.model_copy(update={"compile": given.compile})}
        )
        scene = make_scene(config, Path(name), "quiet")
        calm = _disturb(scene, given.minutes * 60.0, random.Random(given.seed))
        events = read_events(scene.store)
    counts = {one: sum(event.name == one for event in events) for one in (STEP, COMMIT, EVALUATION)}
    blamed = [str(event.data.get("culprit")) for event in events if event.name == FAULT_DETECTED]
    figures = {
        "kind": "measured",
        "machine": machine,
        "minutes": given.minutes,
        "floor_seconds": given.floor,
    }
    figures |= {
        "disturbances": calm.done,
        "events": counts,
        "false_alarms": blamed,
        "ended": calm.ended,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    done = ", ".join(f"{count} × {what}" for what, count in calm.done.items())
    print(
        f"{given.minutes:g} minutes, {counts[STEP]:,} steps of ranks, {counts[COMMIT]} commits: "
        f"{done}"
    )
    print(
        "\n".join(f"FALSE ALARM: {culprit}" for culprit in blamed)
        or "nobody was blamed for anything"
    )
    print(f"ended: {calm.ended}")
    return int(bool(blamed) or not calm.ended.startswith(Outcome.INTERRUPTED))


def _disturb(scene: Scene, seconds: float, chance: random.Random) -> Calm:
    calm = Calm()
    try:
        scene.start()
        _await_steps(scene)
        limit = time.monotonic() + seconds
        numbers = itertools.count()
        for name, disturb in itertools.cycle(_DISTURBANCES.items()):
            if time.monotonic() >= limit or not scene.running:
                break
            disturb(scene, chance.randrange(scene.spec.world_size), next(numbers))
            calm.done[name] = calm.done.get(name, 0) + 1
            scene.await_end(min(_PAUSE_SECONDS, max(0.0, limit - time.monotonic())))
        for agent in scene.gang.agents if scene.gang else []:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        assert scene.gang is not None
        calm.ended = _ended(scene)
    finally:
        scene.close()
    return calm


def _ended(scene: Scene) -> str:
    assert scene.gang is not None
    try:
        outcome = scene.gang.wait(_END_SECONDS)
    except GangError as error:
        return f"failed: {error}"
    return f"{outcome.outcome} at step {outcome.step}: {outcome.message}"


def _await_steps(scene: Scene) -> None:
    """Compilation may take minutes. Raises GangError."""
    limit = time.monotonic() + _START_SECONDS
    while time.monotonic() < limit and scene.running:
        if any(beat.step > 2 for beat in scene.beats().values()):
            return
        time.sleep(0.2)
    raise GangError(f"no steps within {_START_SECONDS:g} s; see {scene.output}")


def _frozen_upload(scene: Scene, rank: int, number: int) -> None:
    """What a store that hangs looks like from a rank: its uploader does not answer."""
    pid = scene.uploader_pid(rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        scene.await_end(_STALL_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _slow_data(scene: Scene, rank: int, number: int) -> None:
    scene.orders.give(rank, Order(hook="slow", number=number, settings={"seconds": _STALL_SECONDS}))
    scene.await_end(_STALL_SECONDS + 1.0)


def _garbage(scene: Scene, rank: int, number: int) -> None:
    scene.orders.give(
        rank, Order(hook="collect_garbage", number=number, settings={"objects": _CYCLES})
    )


def _busy_machine(scene: Scene, rank: int, number: int) -> None:
    with _load():
        scene.await_end(_LOAD_SECONDS)


@contextlib.contextmanager
def _load() -> Iterator[None]:
    """Other work on the machine: processes that want all of it."""
    code = "from ebbflow.core.process import die_with_parent\ndie_with_parent()\nwhile True: pass"
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=PROJECT_ROOT)
        for _ in range(_LOAD_PROCESSES)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


_DISTURBANCES: dict[str, Callable[[Scene, int, int], None]] = {
    "upload frozen for 20 s": _frozen_upload,
    "busy machine": _busy_machine,
    "data 20 s late": _slow_data,
    "garbage collected": _garbage,
}

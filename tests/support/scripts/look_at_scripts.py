"""Run scripts one after another in this process, each whole, or left at a step and begun again.

    python look_at_scripts.py STORE SCRIPT[:STEP] …

Prints a line of JSON for each: the promise of its job, and what it printed last. At STEP, counted
from the start of the run, the script is left as by a crash.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import runpy
import sys
from pathlib import Path

from ebbflow.core.events import PROMISE, read_events
from ebbflow.core.store import Store
from ebbflow.training.attach import entry
from ebbflow.training.attach import loop as attached_loop
from ebbflow.training.attach.loop import AttachedLoop


class Crash(Exception):
    """The end of a script in the middle of its loop."""


def main(store: str, *scripts: str) -> None:
    os.environ["EBBFLOW__CHECKPOINT__INTERVAL_STEPS"] = "5"
    # The process that writes each job's report would take most of the time.
    entry.observe_job = lambda *arguments, **options: None  # type: ignore[assignment]
    for number, script in enumerate(scripts):
        (path, _, step) = script.partition(":")
        job = f"{Path(path).stem}-{number}"
        os.environ["EBBFLOW__STORE"] = store
        os.environ["EBBFLOW_JOB"] = job
        if step:
            run(path, int(step))
        printed = run(path, None)
        events = read_events(Store.open(f"{store}/jobs/{job}"))
        promises = [event for event in events if event.name == PROMISE]
        promise = promises[-1].data if promises else None
        print(json.dumps({"script": Path(path).stem, "promise": promise, "printed": printed}))


def run(path: str, last_step: int | None) -> str:
    """Run a script until its end, or leave it after a number of steps; return its last line."""
    count_step = AttachedLoop.count_step
    numbers = itertools.count(1)  # of this run's steps; the job sees no variable that changes

    def count(loop: AttachedLoop, *arguments: object) -> None:
        count_step(loop, *arguments)  # type: ignore[arg-type]
        if next(numbers) == last_step:
            raise Crash

    AttachedLoop.count_step = count  # type: ignore[method-assign]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(path, run_name="__main__")
            if attached_loop.current is not None:
                attached_loop.current.close_at_exit()
    except Crash as error:
        sys.last_value = error
        if attached_loop.current is not None:
            attached_loop.current.close_at_exit()
        del sys.last_value
    finally:
        AttachedLoop.count_step = count_step
    return (output.getvalue().splitlines() or [""])[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])

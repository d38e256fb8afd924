"""What Metaflow says of a run to its logger, for the terminal's view."""

from __future__ import annotations

from ebbflow.core.program import REPLACE_UNPRINTABLE
from ebbflow.flows.console import RunView

PROGRESS = "step 89/240 · 37% · loss 2.65 · 17,990 tok/s · MFU 40% of measured peak · ETA 0:17 · "
PROGRESS += "$0.0014 of $5.00 (simulated price) · commit 60 · $0.0004 at risk"


def log_of_a_run(view: RunView, *, failing: bool = False, encoding: str = "utf-8") -> None:
    """Metaflow's calls of its logger, as its runtime makes them.

    The tasks print in that encoding.
    """

    def task(step: str, *lines: str, end: str = "Task finished successfully.") -> None:
        head = f"[17/{step}/1 (pid 5)] "
        view.logged("Task is starting.", system_msg=True, head=head)
        for line in lines:
            view.logged(line.encode(encoding, REPLACE_UNPRINTABLE).decode(encoding), head=head)
        view.logged(end, system_msg=True, head=head)

    view.echoed("Metaflow 2 executing *TrainFlow*", nl=False)
    view.logged("Workflow starting (run-id 17):", system_msg=True)
    task("start", "job mine: 240 steps")
    checks = (
        "ok    packages   torch 2",
        "warn  cores      4 ranks on 2 cores",
        "fix: fewer ranks",
        "skip  gpu   none",
    )
    task("preflight", *checks, "preflight: 1 passed, 1 warned, 1 skipped")
    task(
        "plan",
        "┌─ capacity plan ──",
        "│ 240 steps",
        "└──",
        "prices of \x1b[31myesterday\x1b]0;owned\x07",
    )
    task("fan_out")
    task(
        "train",
        PROGRESS,
        "a line of the user's model",
        end="Task failed." if failing else "Task finished.",
    )

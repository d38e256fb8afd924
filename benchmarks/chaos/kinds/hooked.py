"""Faults by code inside the rank: errors of a program, a library or a data loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.hooks import NOT_A_NUMBER
from benchmarks.chaos.orders import Order, Strike
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason

_AGAIN = "stacks are dumped, then the gang restarts from the newest commit"
_THREE_TIMES = (
    "the gang restarts from the newest commit; the third time without a new commit ends the job"
)
# Errors of public jobs, word for word: a verdict must pass them on as they are
_RECORDED = (
    "CUDA error: an illegal memory access was encountered",
    "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error (run with NCCL_DEBUG=INFO "
    "for details)",
    "DataLoader worker (pid 4711) is killed by signal: Killed.",
)


def _order(hook: str, **settings: Any) -> Callable[[Scene, Aim], Strike | None]:
    def inject(scene: Scene, aim: Aim) -> None:
        scene.orders.give(aim.rank, Order(hook=hook, number=aim.number, settings=settings))

    return inject


def _replay(scene: Scene, aim: Aim) -> None:
    text = _RECORDED[aim.number % len(_RECORDED)]
    scene.orders.give(
        aim.rank, Order(hook="raise_error", number=aim.number, settings={"text": text})
    )


def _hang(kind: str, what: str, hook: str) -> Fault:
    return Fault(
        kind=kind,
        means=Means.HOOK,
        what=what,
        inject=_order(hook),
        action=_AGAIN,
        reasons=(EndReason.HANG,),
        where=f"in {hook}",
    )


HOOKED = (
    _hang("busy-loop", "one rank computes for ever", "busy_loop"),
    _hang("gil-held", "a C call that keeps the interpreter's lock", "gil_held"),
    _hang("long-regex", "a regular expression that takes for ever", "long_regex"),
    _hang("sleep", "time.sleep on one rank", "asleep"),
    _hang("loader-stuck", "waits for a loader process that gives nothing", "loader_stuck"),
    Fault(
        kind="extra-collective",
        means=Means.HOOK,
        what="a collective that one rank alone calls",
        inject=_order("extra_collective"),
        action=_AGAIN,
        reasons=(EndReason.HANG, EndReason.RANK_FAILED),
        where="in extra_collective",
    ),
    Fault(
        kind="uneven-steps",
        means=Means.HOOK,
        what="one rank waits at the epoch's end, the others have steps left",
        inject=_order("uneven_steps"),
        action=_AGAIN,
        reasons=(EndReason.HANG, EndReason.RANK_FAILED),
        where="in uneven_steps",
    ),
    Fault(
        kind="exception",
        means=Means.HOOK,
        what="RuntimeError on one rank",
        inject=_order("raise_error", text="injected: this rank cannot go on"),
        action=_THREE_TIMES,
        reasons=(EndReason.RANK_FAILED,),
        where="in raise_error",
    ),
    Fault(
        kind="recorded-error",
        means=Means.HOOK,
        what="the text of another job's error log, raised on one rank",
        inject=_replay,
        action=_THREE_TIMES,
        reasons=(EndReason.RANK_FAILED,),
        where="in raise_error",
    ),
    Fault(
        kind="memory-limit",
        means=Means.HOOK,
        what="one rank asks for more memory than its limit (RLIMIT_AS)",
        inject=_order("memory_limit", mebibytes=256),
        action=_THREE_TIMES,
        reasons=(EndReason.RANK_FAILED, EndReason.RANK_KILLED),
        where="in memory_balloon",
    ),
    Fault(
        kind="non-finite",
        means=Means.HOOK,
        what="the loss of one rank is not a number",
        inject=_order(NOT_A_NUMBER),
        action=(
            "as guards.non_finite says; by default the job ends with exit code 7 and the last "
            "commit stands"
        ),
        symptom=Symptom.OUTCOME,
        reasons=("non_finite",),
    ),
    Fault(
        kind="slow-step",
        means=Means.HOOK,
        what="one step of one rank takes 1.5 s",
        inject=_order("slow", seconds=1.5),
        action="none: slow is not dead",
        symptom=Symptom.NOTHING,
    ),
)

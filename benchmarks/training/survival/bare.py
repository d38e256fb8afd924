"""The same faults for bare torchrun: its own watching, restarting and blaming, with a patience that
is capped.

One case for each kind that a rank or its launch can have. `torchrun --max-restarts 3`, all else as
torch has it; the rank script (`bare_rank`) saves and loads a snapshot.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.chaos.fault import Aim, Fault, Means
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.scene import Scene
from benchmarks.training.survival.bare_scene import BareScene
from ebbflow.training.errors import GangError

_START_SECONDS = 90.0
_STRIKE_SECONDS = 20.0
_LOOK_SECONDS = 0.05
_STEPS_BEFORE = 20
_GUILTY = 1
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)
_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (\d+)")


@dataclass(frozen=True, kw_only=True)
class BareCase:
    """What came of one fault. ended_seconds: until torchrun ended; back_seconds: until new workers
    had taken a step; both None: neither within the cap. blamed: the rank that it names first, None
    where it names none. not_done: why the fault could not be done, "" where it was."""

    kind: str
    ended_seconds: float | None
    back_seconds: float | None
    exit_codes: list[int | None]
    blamed: int | None
    guilty: int
    not_done: str = ""


def bare_figures(faults: Sequence[Fault], folder: Path, *, cap_seconds: float) -> dict[str, Any]:
    """Every fault that bare torchrun can be faced with, once."""
    cases = []
    for fault in faults:
        if fault.bare:
            case = _case(fault, folder / f"bare-{fault.kind}", cap_seconds)
            print(f"torchrun: {_told(case, cap_seconds)}", flush=True)
            cases.append(asdict(case))
    return {"cap_seconds": cap_seconds, "cases": cases}


def bare_text(figures: dict[str, Any]) -> str:
    cap = figures["cap_seconds"]
    return "\n".join(
        ["bare torchrun:", *(f"  {_told(BareCase(**case), cap)}" for case in figures["cases"])]
    )


def _case(fault: Fault, folder: Path, cap_seconds: float) -> BareCase:
    """One that torchrun never came to is told, and the others are done all the same."""
    try:
        return _run(fault, folder, cap_seconds)
    except (GangError, OSError) as error:
        nothing: dict[str, Any] = {
            "ended_seconds": None,
            "back_seconds": None,
            "exit_codes": [],
            "blamed": None,
        }
        return BareCase(kind=fault.kind, guilty=_GUILTY, not_done=str(error), **nothing)


def _run(fault: Fault, folder: Path, cap_seconds: float) -> BareCase:
    launched = fault.means is Means.LAUNCH
    strike = Strike.now()
    scene = BareScene(folder, launch=fault.kind if launched else "")
    before: set[int] = set()
    try:
        if not launched:
            scene.await_steps(_STEPS_BEFORE, _START_SECONDS)
            before = {shown.pid for shown in scene.beats().values()}
            strike = fault.inject(
                cast(Scene, scene), Aim(node=0, rank=_GUILTY, number=0)
            ) or _await_strike(scene)
        ended, back = _await_effect(scene, before, strike.t_mono, cap_seconds)
        codes = [process.poll() for process in scene.processes]
    finally:
        scene.close()
    return BareCase(
        kind=fault.kind,
        ended_seconds=ended,
        back_seconds=back,
        exit_codes=codes,
        blamed=_blamed(scene.output.read_text(errors="replace")),
        guilty=_GUILTY,
    )


def _await_strike(scene: BareScene) -> Strike:
    limit = time.monotonic() + _STRIKE_SECONDS
    while time.monotonic() < limit:
        strike = scene.orders.struck(0)
        if strike is not None:
            return strike
        time.sleep(_LOOK_SECONDS)
    return Strike.now()


def _await_effect(
    scene: BareScene, before: set[int], began: float, cap_seconds: float
) -> tuple[float | None, float | None]:
    """(seconds until torchrun ended, seconds until other workers had taken a step)."""
    while time.monotonic() - began < cap_seconds:
        if not scene.running:
            return time.monotonic() - began, None
        shown = scene.beats()
        if before and len(shown) == 2 and not {one.pid for one in shown.values()} & before:
            return None, min(one.t_mono for one in shown.values()) - began
        time.sleep(_LOOK_SECONDS)
    return None, None


def _blamed(output: str) -> int | None:
    found = _ROOT_CAUSE.search(output) or _FAILED.search(output)
    if found:
        return int(found[1])
    return None


def _told(case: BareCase, cap_seconds: float) -> str:
    if case.not_done:
        return f"{case.kind:18} not done: {case.not_done}"
    if case.back_seconds is not None:
        effect = f"back after {case.back_seconds:.1f} s"
    elif case.ended_seconds is not None:
        effect = f"ended after {case.ended_seconds:.1f} s with {case.exit_codes}"
    else:
        effect = f"nothing within {cap_seconds:g} s"
    if case.blamed is None:
        blamed = "nobody"
    else:
        blamed = f"rank {case.blamed}"
    return f"{case.kind:18} {effect}; blames {blamed}, rank {case.guilty} is guilty"

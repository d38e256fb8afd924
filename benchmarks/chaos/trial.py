"""One job under a list of faults: each is injected into a stepping gang and awaited until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.scene import Scene
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.training.errors import GangError
from ebbflow.training.launch.messages import GangOutcome

_STEADY_STEPS = 8
_STEADY_SECONDS = 120.0  # from a start to steady steps, on a busy machine
_STRIKE_SECONDS = 20.0  # for a rank to carry out an order
_QUIET_SECONDS = 3.0  # for which a fault without effect is watched
_PATIENCE_SECONDS = 30.0  # beyond a fault's limit, before the gang is ended by force
_END_SECONDS = 600.0
_MISSES = 3  # failed tries at one fault, whose rank may have ended meanwhile
_SPARE_STARTS = 3  # beyond one for each fault
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Injection:
    """An injected fault. overdue: it had no effect within its limit, and the gang was killed."""

    fault: Fault
    aim: Aim
    strike: Strike
    overdue: bool = False


@dataclass
class Trial:
    """The faults of one job, and its end. left: faults that could not be injected, or for which the
    job was too short. missed: failed tries at the present fault."""

    injections: list[Injection] = field(default_factory=list)
    left: list[tuple[Fault, Aim]] = field(default_factory=list)
    missed: int = 0
    starts: int = 0
    most_starts: int = _SPARE_STARTS
    outcome: GangOutcome | None = None
    errors: list[str] = field(default_factory=list)


def run_trial(scene: Scene, faults: list[tuple[Fault, Aim]], tell: Callable[[str], None]) -> Trial:
    """Inject all of `faults` one after the other, then let the job end.

    Nothing of it is alive on return.

    A fault whose target was gone before it was struck is tried again. A gang that does not come to
    steady steps, or a fault that cannot be done, ends the trial: it has no outcome, and its errors
    say why. What was found before still counts.
    """
    trial = Trial(most_starts=2 * len(faults) + _SPARE_STARTS)
    left = sorted(faults, key=lambda planned: planned[0].means is not Means.LAUNCH)
    try:
        while left:
            fault, aim = left[0]
            if fault.means is not Means.LAUNCH and not await_steady_steps(scene, trial):
                break
            injection = inject(scene, fault, aim, trial)
            if injection is None:
                if trial.missed >= _MISSES:
                    raise GangError(
                        f"{scene.spec.job}: {fault.kind} could not be done in {trial.missed} tries"
                    )
                continue
            left.pop(0)
            trial.missed = 0
            trial.injections.append(injection)
            tell(
                f"{scene.spec.job}: {fault.kind} on "
                f"{f'node {aim.node}' if fault.node_is_guilty else aim.rank}"
            )
        if trial.outcome is None:
            _to_the_end(scene, trial)
    except (GangError, InfraError) as error:
        trial.errors.append(str(error))
    finally:
        trial.left = left
        scene.close()
        trial.starts = scene.starts
    return trial


def await_steady_steps(scene: Scene, trial: Trial) -> bool:
    """Wait until all ranks of a generation have taken some steps and a commit was made since the
    last fault; start the gang as often as needed. False when the job came to its end before."""
    before = scene.newest_commit()
    limit = time.monotonic() + _STEADY_SECONDS
    first: dict[int, tuple[int, int]] = {}
    while time.monotonic() < limit:
        if not scene.running:
            if not start_again(scene, trial):
                return False
            first = {}
            limit = time.monotonic() + _STEADY_SECONDS
        beats = scene.beats()
        for rank, beat in beats.items():
            if beat.step > 0 and first.get(rank, (0, 0))[0] != beat.pid:
                first[rank] = (beat.pid, beat.step)
        here = [
            rank for rank, beat in beats.items() if rank in first and first[rank][0] == beat.pid
        ]
        moved = [beats[rank].step - first[rank][1] for rank in here]
        fresh = len(moved) == scene.spec.world_size and min(moved) >= _STEADY_STEPS
        if fresh and scene.newest_commit() != before:
            return True
        time.sleep(_LOOK_SECONDS)
    raise GangError(
        f"{scene.spec.job}: no steady steps within {_STEADY_SECONDS:g} s, at {scene.beats()}"
    )


def start_again(scene: Scene, trial: Trial) -> bool:
    """Start the next attempt. Return False if the last one was the end of the job."""
    if scene.gang is not None:
        try:
            outcome = scene.gang.wait(1.0)
        except (
            GangError,
            ValueError,
        ) as error:  # an agent that was killed while it wrote its result
            trial.errors.append(str(error))
        else:
            if outcome.outcome not in (Outcome.NON_FINITE, Outcome.INTERRUPTED):
                trial.outcome = outcome
                return False
            trial.errors.append(f"{outcome.outcome}: {outcome.message}")
    if scene.starts >= trial.most_starts:
        raise GangError(
            f"{scene.spec.job}: started {scene.starts} times without an end; last: "
            f"{trial.errors[-1:]}"
        )
    scene.start()
    return True


def inject(scene: Scene, fault: Fault, aim: Aim, trial: Trial) -> Injection | None:
    """Inject a fault and await its effect.

    Returns:
        None if the target was gone, or did not carry it out; `trial.missed` counts that.
    """
    before = _generation(scene)
    overdue = False
    scene.orders.forget(aim.number)
    try:
        strike = fault.inject(scene, aim) or _await_strike(scene, aim)
        if fault.symptom is Symptom.NOTHING:
            scene.await_end(_QUIET_SECONDS)
        else:
            overdue = not _await_effect(scene, before, fault.limit_seconds + _PATIENCE_SECONDS)
    except (GangError, InfraError, OSError) as error:
        scene.orders.withdraw(aim.rank)
        trial.missed += 1
        trial.errors.append(f"{fault.kind}: {error}")
        return None
    finally:
        if fault.heal is not None:
            fault.heal(scene)
    if overdue:
        trial.errors.append(
            f"{fault.kind}: nothing came of it within {fault.limit_seconds + _PATIENCE_SECONDS:g} s"
        )
        scene.close()
    return Injection(fault=fault, aim=aim, strike=strike, overdue=overdue)


def _generation(scene: Scene) -> set[int]:
    return {beat.pid for beat in scene.beats().values()}


def _await_strike(scene: Scene, aim: Aim) -> Strike:
    limit = time.monotonic() + _STRIKE_SECONDS
    while time.monotonic() < limit:
        strike = scene.orders.struck(aim.number)
        if strike is not None:
            return strike
        if not scene.running and scene.orders.withdraw(aim.rank):
            raise GangError(f"the gang ended before rank {aim.rank} reached the injection point")
        time.sleep(0.01)
    raise GangError(
        f"rank {aim.rank} did not reach the injection point within {_STRIKE_SECONDS:g} s"
    )


def _await_effect(scene: Scene, before: set[int], seconds: float) -> bool:
    """Wait until the gang has ended, or other processes have started."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if not scene.running:
            return True
        now = {beat.pid for beat in scene.beats().values() if beat.pid}
        if now and not now & before:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _to_the_end(scene: Scene, trial: Trial) -> None:
    limit = time.monotonic() + _END_SECONDS
    while time.monotonic() < limit:
        if not scene.running and not start_again(scene, trial):
            return
        scene.await_end(1.0)
    trial.errors.append(f"the job did not end within {_END_SECONDS:g} s")

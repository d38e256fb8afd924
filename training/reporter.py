"""What a rank tells of itself: its phase to the agent that watches it, its time to the ledger, and events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ebbflow.infra.events import LedgerClass
from ebbflow.training.clock import Clock

# Where the time of a phase goes. The phases are those of the heartbeat, by which an agent sees progress.
_CLASS_OF_PHASE = {
    "init": LedgerClass.STARTUP,
    "compile": LedgerClass.STARTUP,
    "restore": LedgerClass.RESTORE,
    "data": LedgerClass.DATA_WAIT,
    "forward": LedgerClass.USEFUL_STEP,
    "backward": LedgerClass.USEFUL_STEP,
    "optimizer": LedgerClass.USEFUL_STEP,
    "checkpoint": LedgerClass.CHECKPOINT_STALL,
    "store": LedgerClass.CHECKPOINT_STALL,  # waiting for a save to be durable, which has a deadline of its own
    "evaluation": LedgerClass.EVALUATION,
    "done": LedgerClass.SHUTDOWN,
}


# In which a rank works on its own; sharded models gather weights in forward, so that there ranks look more alike.
_OWN_PHASES = frozenset({"data", "forward"})


@dataclass(frozen=True)
class Reporter:
    """Phases and events. emit takes (name, step=, flush=, **data); beat takes (step, phase), where an agent watches.

    `close` takes away, in turn, what was set up for it elsewhere and left here with `at_end`.
    """

    clock: Clock
    emit: Callable[..., object]
    beat: Callable[[int, str], None] = lambda step, phase: None
    _at: list[tuple[str, int]] = field(default_factory=lambda: [("init", 0)])
    _at_end: list[Callable[[], object]] = field(default_factory=list)

    def enter(self, phase: str, step: int) -> None:
        """From now on this rank is in `phase`; its time is booked in the ledger class of that phase."""
        self._at[0] = (phase, step)
        self.beat(step, phase)
        self.clock.enter(_CLASS_OF_PHASE[phase], own=phase in _OWN_PHASES)

    def enter_for_a_while(self, phase: str) -> Callable[[], None]:
        """Enter `phase` in the midst of another; what is returned goes back to that one."""
        before, step = self._at[0]
        self.enter(phase, step)
        return lambda: self.enter(before, step)

    def at_end(self, undo: Callable[[], object]) -> None:
        self._at_end.append(undo)

    def close(self) -> None:
        """Nobody tells this reporter of phases any more."""
        while self._at_end:
            self._at_end.pop()()

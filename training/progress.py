"""What a human sees while training: one whole line from rank 0 each ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.infra.terms import Terms

_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where the job is. tokens and flops: global, of this step. at_risk_usd: spent since the last save.

    drag: what has been holding the steps up.
    """

    step: int
    loss: float
    tokens: float
    flops: float
    spent_usd: float
    last_commit_step: int | None
    at_risk_usd: float | None = None
    drag: str = ""


class Progress:
    """Rates are over the time since the previous line. peak: of all ranks, measured. unit: of the batches' weight."""

    def __init__(
        self,
        *,
        max_steps: int,
        peak_flops_per_second: float,
        terms: Terms | None,
        unit: str = "tok",
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_steps = max_steps
        self._peak = peak_flops_per_second
        self._terms = terms
        self._unit = unit
        self._write = write
        self._now = now
        self._since = self._now()
        self._steps, self._tokens, self._flops = 0, 0.0, 0.0
        self._silent_until = 0.0

    def step(self, status: Status) -> None:
        """Count a step, and write a line when it is the first, the last, or ten seconds after the last line."""
        self._steps += 1
        self._tokens += status.tokens
        self._flops += status.flops
        now = self._now()
        if now < self._silent_until and status.step < self._max_steps:
            return
        self._write(self._line(status, max(now - self._since, 1e-9)))
        self._since, self._silent_until = now, now + _INTERVAL_SECONDS
        self._steps, self._tokens, self._flops = 0, 0.0, 0.0

    def _line(self, status: Status, seconds: float) -> str:
        remaining = (self._max_steps - status.step) * seconds / self._steps
        parts = [
            f"step {status.step}/{self._max_steps}",
            f"{100 * status.step / self._max_steps:.0f}%",
            f"loss {status.loss:.4f}",
            f"{self._tokens / seconds:,.0f} {self._unit}/s",
            self._mfu(seconds),
            f"ETA {_duration(remaining)}",
            self._money(status.spent_usd),
            f"commit {status.last_commit_step}" if status.last_commit_step is not None else "no commit yet",
            f"${status.at_risk_usd:.4f} at risk" if self._terms is not None and status.at_risk_usd is not None else "",
            status.drag,
        ]
        return " · ".join(part for part in parts if part)

    def _mfu(self, seconds: float) -> str:
        """No share above 100 %: the peak was then measured while the machine was busy."""
        share = self._flops / seconds / self._peak if self._peak else None
        if share is None or share > 1.0:
            return "MFU unknown" if share is None else "MFU unknown (faster than the peak measured on a busy machine)"
        return f"MFU {100 * share:.0f}% of measured peak"

    def _money(self, spent_usd: float) -> str:
        terms = self._terms
        if terms is None:
            return ""
        limit = f" of ${terms.budget_usd:.2f}" if terms.budget_usd is not None else ""
        return f"${spent_usd:.4f}{limit} ({terms.price_kind} price)"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

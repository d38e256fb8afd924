"""What one run of the flow came to, by its exit code and by what it left in the job's record. Pure functions."""

from __future__ import annotations

import itertools
from enum import StrEnum

from ebbflow.flows.supervising.record import Record, Spell
from ebbflow.infra.outcome import Outcome

LONGEST_PAUSE_SECONDS = 600.0
# Between two runs, beyond the usual pause: for so long no supervisor was there, and what was waited for before is over.
# A machine of AWS Batch that fails is replaced within it.
ALONE_SECONDS = 3600.0

# The same start would end alike, or a limit that the user has set is reached. Preflight is final for settings
# that have never passed it: whoever has just written them is to be told at once.
FINAL = frozenset({
    Outcome.CONFIG, Outcome.PREFLIGHT, Outcome.BUDGET, Outcome.CRASH_LOOP, Outcome.NON_FINITE, Outcome.DEADLINE,
    Outcome.NO_RESTORE, Outcome.ROLLED_BACK,
})  # fmt: skip


class Verdict(StrEnum):
    """How a run of the flow ended, as far as going on is concerned."""

    COMPLETED = "completed"
    FINAL = "final"  # its outcome ends the job
    INTERRUPTION = "interruption"  # from outside: goes on, however often
    NO_CAPACITY = "no_capacity"  # asks again after a pause
    NOT_READY = "not_ready"  # preflight refused what it has let through before: something does not answer now
    FAILURE = "failure"  # the program's fault, or a run that came to nothing: only so often without a new commit


def judge(exit_code: int, before: Record, after: Record) -> Verdict:
    """exit_code: of the flow, negative when a signal ended it. before, after: what the store knew around it.

    An exit code of 1 or 75 says little: also a run that died before it trained anything has it. So the record decides:
    an interruption is what has left an interrupted generation, or an attempt that AWS Batch says was reclaimed.
    """
    if exit_code == Outcome.COMPLETED.exit_code:
        return Verdict.COMPLETED
    if exit_code == Outcome.PREFLIGHT.exit_code and after.passed:
        return Verdict.NOT_READY  # what has passed will pass again, and a refusal costs nothing
    if exit_code in {outcome.exit_code for outcome in FINAL}:
        return Verdict.FINAL
    if exit_code == Outcome.NO_CAPACITY.exit_code:
        return Verdict.NO_CAPACITY
    if after.failures - before.failures:
        return Verdict.FAILURE
    if after.interruptions - before.interruptions:
        return Verdict.INTERRUPTION
    # Batch's word last: to it, a container that drained after a notice has merely failed.
    causes = {cause for job, cause in after.attempts.items() if job not in before.attempts}
    if "user_code" in causes:
        return Verdict.FAILURE
    if {"reclaimed", "terminated"} & causes:
        return Verdict.INTERRUPTION
    return Verdict.NO_CAPACITY if "never_started" in causes else Verdict.FAILURE


def failures_of(before: Record, after: Record) -> int:
    """What a run that failed counts for: each of its Batch jobs that the program ended, where none led to a commit."""
    if before.commit != after.commit:
        return 1
    return max(1, sum(cause == "user_code" for job, cause in after.attempts.items() if job not in before.attempts))


def in_a_row(record: Record, verdict: Verdict) -> int:
    """How often runs ended so, back to the newest commit; of failures, how many they were. What is in between of
    another kind does not break the row: interruptions are counted apart from failures. A time without a supervisor
    does, but for failures, which nobody's absence cures."""
    failure = verdict is Verdict.FAILURE
    spells = record.spells if failure else _since_alone(record.spells, LONGEST_PAUSE_SECONDS)
    ended = (spell for spell in spells if spell.verdict == verdict and spell.commit == record.commit)
    return sum(spell.failures if failure else 1 for spell in ended)


def pause_seconds(record: Record, verdict: Verdict, first_seconds: float) -> float:
    """After a run that is the last one in `record`: none when it was interrupted after a new commit; otherwise
    first_seconds, and twice as long each time that the job comes no further, at most 600 s."""
    times = in_a_row(record, verdict)
    if verdict is Verdict.INTERRUPTION:
        times -= 1  # the first one that ends with this commit may have made it
    return min(first_seconds * 2 ** (times - 1), LONGEST_PAUSE_SECONDS) if times > 0 else 0.0


def waited_seconds(
    record: Record, verdict: Verdict, now_utc: float, *, usual_pause_seconds: float = LONGEST_PAUSE_SECONDS
) -> float:
    """Since when all runs have ended so, for want of capacity or not ready; 0 where the last one did not. Before a time
    without a supervisor nothing is counted: nobody waited in it, and whoever starts one anew asks it to wait anew.

    usual_pause_seconds: the longest that a supervisor makes between two runs.
    """
    since = now_utc
    for spell in reversed(_since_alone(record.spells, usual_pause_seconds)):
        if spell.verdict != verdict:
            break
        since = spell.ended_utc
    return now_utc - since


def _since_alone(spells: tuple[Spell, ...], usual_pause_seconds: float) -> tuple[Spell, ...]:
    """Those that followed each other under a supervisor, up to the last one."""
    longest = usual_pause_seconds + ALONE_SECONDS
    pairs = enumerate(itertools.pairwise(spells), start=1)
    first = max((at for at, (before, after) in pairs if after.began_utc - before.ended_utc > longest), default=0)
    return spells[first:]

"""The classes into which every paid rank-second falls, each in exactly one: written by training, summed by cost."""

from __future__ import annotations

from enum import StrEnum


class LedgerClass(StrEnum):
    """Where paid time goes. Ranks report those down to HANG; the others follow from the whole event log."""

    USEFUL_STEP = "useful_step"  # forward, backward, optimizer of a completed step that is in the final weights
    DATA_WAIT = "data_wait"  # waiting for the next batch
    CHECKPOINT_STALL = "checkpoint_stall"  # training held up by a save
    EVALUATION = "evaluation"
    STARTUP = "startup"  # from the node's start to the first step: processes, rendezvous, model; and what is compiled
    RESTORE = "restore"  # reading a commit
    SHUTDOWN = "shutdown"  # from the last step to the node's end
    HANG = "hang"  # a step that never completed in a generation that hung, until it was noticed
    REDONE_STEP = "redone_step"  # a step whose result was thrown away and had to be computed again
    SKIPPED_STEP = "skipped_step"  # a step whose update a guard left out
    INTERRUPTION = "interruption"  # from a rank's last completed step to its node's end, in a generation cut short
    UNATTRIBUTED = "unattributed"  # paid, but no interval covers it
    IDLE = "idle"  # between two generations on the same instance, which went on being billed
    MINIMUM_CHARGE = "minimum_charge"  # what an instance's start is billed beyond its life: 60 s at the least

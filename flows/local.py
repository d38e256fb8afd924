"""`--with local`: the same flow with every step on this machine, whatever decorators it carries."""

from __future__ import annotations

from metaflow import StepMutator

# Decorators that send a step to another machine.
REMOTE = ("batch", "kubernetes")


class local(StepMutator):  # noqa: N801 - the name is what stands after --with
    """Takes @batch and @kubernetes off each step before they ask for a remote datastore.

    Runs in every task's process as well: it prints nothing.
    """

    def mutate(self, mutable_step):
        for name in REMOTE:
            if mutable_step.has_decorator(name):
                mutable_step.remove_decorator(name)

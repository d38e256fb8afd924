"""Where steps run: `--with batch` (Metaflow's own: all of them in AWS Batch), `--with cloud`, `--with local`."""

from __future__ import annotations

from typing import Any

from metaflow import StepMutator

# Decorators that send a step to another machine.
REMOTE = ("batch", "kubernetes")


class local(StepMutator):  # noqa: N801 - the name is what stands after --with
    """Takes @batch and @kubernetes off each step before they ask for a remote datastore.

    Runs in every task's process as well: it prints nothing.
    """

    def mutate(self, mutable_step):
        for name in REMOTE:
            if name in _names(mutable_step):
                mutable_step.remove_decorator(name)


class cloud(StepMutator):  # noqa: N801
    """Sends the training steps to AWS Batch and leaves the light ones on the launching machine."""

    def mutate(self, mutable_step):
        names = _names(mutable_step)
        if "capacity" in names and not names.intersection(REMOTE):
            mutable_step.add_decorator("batch")
            _begin(mutable_step, "batch")


def _begin(mutable_step: Any, name: str) -> None:
    """A decorator that a mutator adds is begun by nobody in releases to 2.19.20 at least: it then lacks what its `init`
    makes of its attributes. Later ones begin each once, whoever comes first.
    """
    for decorator in getattr(getattr(mutable_step, "_my_step", None), "decorators", ()):
        if decorator.name == name:
            decorator.external_init()


def _names(mutable_step: Any) -> set[str]:
    """Of a step's decorators; `has_decorator` is not in every release."""
    return {name for name, *_ in mutable_step.decorator_specs}


def training_backend(flow: Any) -> str | None:
    """batch or kubernetes: what the training steps are sent to; None: nothing, the ranks run on this machine."""
    steps = (flow.train, flow.train_node)
    return next((one.name for step in steps for one in step.decorators if one.name in REMOTE), None)

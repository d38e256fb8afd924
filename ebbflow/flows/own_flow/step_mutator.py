"""The decorator `@ebbflow`, which users write above a step of their own flow.

Metaflow imports this module with every `import metaflow`, so it imports nothing but Metaflow.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from metaflow.user_decorators.user_step_decorator import StepMutator

if TYPE_CHECKING:
    from metaflow import MutableStep

_TASK_DECORATOR = "ebbflow_task"


class ebbflow(StepMutator):  # noqa: N801 - the name of the decorator
    """Decorator that gives a step `current.ebbflow`, to train with commits, prices and a report.

    The options are those of `ebbflow.flows.own_flow.step_options.StepOptions`. A step that
    `self.next(…, num_parallel=N)` calls becomes a gang of N nodes. A mutator can see this before
    Metaflow checks the graph; a step decorator cannot.
    """

    # Metaflow copies the modules of users' mutators into every flow's code package. This one is
    # copied by the decorator below, so only into flows that use it.
    _original_module = "metaflow_extensions.ebbflow"
    # Without options, Metaflow 2.19.0 does not call `init`
    _values: tuple[object, ...] = ()
    _options: Mapping[str, object] = MappingProxyType({})

    def init(self, *args: object, **options: object) -> None:
        self._values = args
        self._options = options

    def pre_mutate(self, mutable_step: MutableStep) -> None:
        self._add_task_decorator(mutable_step)
        # Later decorators wrap earlier ones: @parallel tells the step which node it is
        if _is_called_as_gang(mutable_step):
            mutable_step.add_decorator("parallel")

    def mutate(self, mutable_step: MutableStep) -> None:
        # `--with ebbflow` attaches this mutator too late for `pre_mutate` and `init`
        if _TASK_DECORATOR not in {name for name, *_ in mutable_step.decorator_specs}:
            self.external_init()
            if not self.statically_defined:
                self._refuse_deployment(mutable_step)
            self._add_task_decorator(mutable_step)

    def _refuse_deployment(self, mutable_step: MutableStep) -> None:
        """Raise OwnFlowError if the flow is deployed, because the workflow would lack the
        decorator.
        """
        from ebbflow.flows.own_flow.step_checks import OwnFlowError, find_scheduler

        scheduler = find_scheduler(sys.argv)
        if scheduler is not None:
            raise OwnFlowError(
                f"step {mutable_step._my_step.__name__}: {scheduler} create leaves out --with "
                "ebbflow; fix: write @ebbflow above the step"
            )

    def _add_task_decorator(self, mutable_step: MutableStep) -> None:
        attributes = {"values": list(self._values), "options": dict(self._options)}
        mutable_step.add_decorator(_TASK_DECORATOR, deco_kwargs=attributes)


def _is_called_as_gang(mutable_step: MutableStep) -> bool:
    """Return whether a step of the flow calls this step with `num_parallel`."""
    flow = mutable_step.flow._flow_cls
    name = mutable_step._my_step.__name__
    return any(node.parallel_foreach and name in node.out_funcs for node in flow._graph)

"""Register `@ebbflow` with Metaflow, which imports this module with `import metaflow`.

Metaflow copies this file into the code package of every flow, also of those that do not use
`@ebbflow` and whose containers lack Ebbflow: there it registers nothing.
"""

from importlib.util import find_spec

TL_PLUGINS_DESC: list[tuple[str, str]] = []
STEP_DECORATORS_DESC: list[tuple[str, str]] = []
if find_spec("ebbflow") is not None:
    TL_PLUGINS_DESC.append(("ebbflow", "ebbflow.flows.own_flow.step_mutator.ebbflow"))
    STEP_DECORATORS_DESC.append(
        ("ebbflow_task", "ebbflow.flows.own_flow.task_decorator.EbbflowTaskDecorator")
    )

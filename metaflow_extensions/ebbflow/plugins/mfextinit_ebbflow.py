"""Register `@ebbflow` with Metaflow, which imports this module with `import metaflow`."""

TL_PLUGINS_DESC = [("ebbflow", "ebbflow.flows.own_flow.step_mutator.ebbflow")]
STEP_DECORATORS_DESC = [
    ("ebbflow_task", "ebbflow.flows.own_flow.task_decorator.EbbflowTaskDecorator"),
]

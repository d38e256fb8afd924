"""What Metaflow would send to a cluster for one attempt, as JSON: rendered by Metaflow and the
Kubernetes client, and sent to nobody. A program of its own, since it changes the client's model as
the submitting process does."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.capacity import Placement
from ebbflow.flows.attempts.order import AttemptOrder
from ebbflow.flows.pods import apply_to_pod, set_grace_period


def command_options(
    placement: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """After the hook: options of `kubernetes step`, and what its process has in its environment."""
    placed = Placement.from_json(placement)
    order = AttemptOrder(nodes=placed.nodes, processes_per_node=placed.gpu or 1, placement=placed)
    cli = SimpleNamespace(command_options={"num-parallel": "2", "cpu": "1"}, env={})
    apply_to_pod(cli, order, placed, RunConfig.model_validate(settings))
    return cli.command_options, cli.env


def rendered(options: dict[str, Any]) -> dict[str, Any]:
    """The Job, or the JobSet where there are several nodes."""
    from kubernetes.client import ApiClient
    from metaflow.metaflow_current import current
    from metaflow.plugins.kubernetes.kubernetes import Kubernetes

    current._set_env(flow=None, run_id="1", step_name="train", task_id="5", retry_count=0)
    environment = SimpleNamespace(
        get_package_commands=lambda *_: ["true"],
        bootstrap_commands=lambda *_: [],
        get_environment_info=lambda **_: {},
    )
    metadata = SimpleNamespace(
        TYPE="service",
        service_headers=dict,
        service_info=str,
        get_runtime_environment=lambda *_: {},
    )
    made = Kubernetes(SimpleNamespace(TYPE="s3"), metadata, environment)
    plain = {name: options[name] for name in ("cpu", "gpu", "memory", "shared_memory")}
    many = int(options["num-parallel"] or 0)
    common = dict(
        flow_name="TrainFlow",
        run_id="1",
        step_name="train",
        task_id="5",
        attempt="0",
        user="tester",
        code_package_metadata="{}",
        code_package_sha="0",
        code_package_url="s3://bucket/code",
        code_package_ds="s3",
        docker_image=options["image"],
        docker_image_pull_policy=None,
        step_cli="python train_flow.py step train",
        namespace="ebbflow",
        service_account="ebbflow-job",
        gpu_vendor="nvidia",
        disk="10240",
        node_selector=dict(pair.split("=") for pair in options["node_selector"]),
        tolerations=json.loads(options["tolerations"]),
        labels=json.loads(options["labels"]),
        annotations=json.loads(options["annotations"]),
        run_time_limit=options["run-time-limit"],
        env={},
        qos="Burstable",
        secrets=[],
        extended_resources=json.loads(options["extended_resources"] or "{}"),
        **plain,
    )
    if many:
        return ApiClient().sanitize_for_serialization(
            made.create_jobset(**common, num_parallel=many).dump()
        )
    job = made.create_job_object(**common, name_pattern="t-1-").create()
    return ApiClient().sanitize_for_serialization(job._job)


def main() -> None:
    """stdin: placement and settings. stdout: options and manifest."""
    asked = json.load(sys.stdin)
    options, environment = command_options(asked["placement"], asked["settings"])
    os.environ.update(environment)
    set_grace_period()
    print(json.dumps({"options": options, "manifest": rendered(options)}))


if __name__ == "__main__":
    main()

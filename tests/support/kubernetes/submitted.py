"""One attempt as Metaflow's `kubernetes step` submits it, without a flow: `python -m
tests.support.kubernetes.submitted ASKED NODES COMMAND`. Prints "launched" and then how Metaflow
sees the end."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

from ebbflow.flows.attempts.order import SubmitOrder
from ebbflow.flows.attempts.pod_submission import PodSubmission
from ebbflow.flows.pods import exit_when_asked, set_grace_period


def main(asked: str, nodes: int, command: str) -> None:
    devices = {"vpc.amazonaws.com/efa": "1"} if json.loads(asked).pop("efa", False) else {}
    exit_when_asked()
    set_grace_period()
    PodSubmission(SubmitOrder.model_validate_json(asked)).listen()
    from metaflow.metaflow_current import current
    from metaflow.plugins.kubernetes.kubernetes import Kubernetes

    current._set_env(flow=None, run_id="1", step_name="train", task_id="5", retry_count=0)
    metadata = SimpleNamespace(
        TYPE="service",
        service_headers=dict,
        service_info=str,
        get_runtime_environment=lambda *_: {},
    )
    made = Kubernetes(SimpleNamespace(TYPE="s3"), metadata, SimpleNamespace())
    made._command = lambda **_: ["bash", "-c", command]
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    common = dict(  # noqa: C408 - as the call has them
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
        docker_image="ebbflow:local",
        docker_image_pull_policy=None,
        step_cli="",
        namespace="ebbflow",
        service_account="ebbflow-job",
        gpu_vendor="nvidia",
        disk="1",
        cpu="3",
        gpu=None,
        memory="100",
        shared_memory="10",
        node_selector={"karpenter.sh/capacity-type": "spot"},
        tolerations=[toleration],
        labels={},
        annotations={},
        run_time_limit=600,
        env={},
        qos="Burstable",
        secrets=[],
        extended_resources=devices,
    )
    made.launch_job(**common, **({"num_parallel": nodes} if nodes > 1 else {}))
    print("launched", flush=True)
    while not made._job.is_done:
        time.sleep(0.2)
    print("succeeded" if made._job.has_succeeded else "failed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

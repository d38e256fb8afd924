"""Placement of attempts as pods on Kubernetes with Karpenter (`--with kubernetes`).

Not tested on a real cluster.

A pool is chosen as for AWS Batch, but requested by node labels
(https://karpenter.sh/docs/concepts/scheduling, v1) instead of a queue. Therefore a gang of several
nodes can run on Spot. The number of nodes cannot change within a run, because Metaflow creates the
tasks of a JobSet before the attempt.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ebbflow.flows.attempts.submission import wrap_command
from ebbflow.infra.batch import QueueState
from ebbflow.infra.batch.queues import Market
from ebbflow.infra.instance import VARIABLES
from ebbflow.infra.kubernetes.pod_shape import EFA, make_security_context, make_tolerations

if TYPE_CHECKING:
    from metaflow.runtime import CLIArgs

    from ebbflow.core.config.schema import RunConfig
    from ebbflow.cost.capacity import Placement
    from ebbflow.flows.attempts.order import AttemptOrder

CAPACITY_TYPE = "karpenter.sh/capacity-type"
_MARKET_LABELS = {
    "karpenter": (CAPACITY_TYPE, ("spot", "on-demand")),
    "eks": ("eks.amazonaws.com/capacityType", ("SPOT", "ON_DEMAND")),
}
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE = "topology.kubernetes.io/zone"
ZONE_ID = "topology.k8s.aws/zone-id"
_ZONE_ID = re.compile(r"[a-z]+\d+-[a-z]{2,}\d+")  # use1-az1; a zone's name is us-east-1a

# Memory that a pod must leave free, unlike a Batch job: kubelet 255 MiB + 11 MiB for each of
# maxPods = 30 pods (github.com/awslabs/amazon-eks-ami), 100 MiB before eviction, and the node's own
# pods.
_KUBELET_MIB = 255 + 11 * 30 + 100
_OWN_PODS_MIB = 339

GRACE_VARIABLE = "EBBFLOW_GRACE_SECONDS"
# Variables of the container (JSON), in which a pod of a configured pool reads what it is: its
# price is the pool's, whatever the machine below says of itself.
POD_VARIABLES = "EBBFLOW_POD_VARIABLES"
_asked_to_leave = threading.Event()  # of this submitting process
_LABELS = {"ebbflow/training": "true"}


def node_selector(placement: Placement, nodes: str = "karpenter") -> dict[str, str]:
    """Return the node labels that select the machines of a placement.

    If the placement names a zone, all nodes are in that zone. A pool of `kubernetes.pools` has
    labels of its own. `nodes` is the value of `kubernetes.nodes` in the configuration.
    """
    if placement.node_selector is not None:
        return dict(placement.node_selector)
    label, (spot, on_demand) = _MARKET_LABELS[nodes]
    if placement.market == "spot":
        market = spot
    else:
        market = on_demand
    chosen = {label: market, INSTANCE_TYPE: placement.instance_type}
    if placement.zone:
        label = ZONE_ID if _ZONE_ID.fullmatch(placement.zone) else ZONE
        chosen[label] = placement.zone
    return chosen


def pod_annotations(metrics_port: int | None) -> dict[str, str]:
    """Return pod annotations that keep Karpenter from removing the node and, with a port, let
    Prometheus find it.
    """
    found = {"karpenter.sh/do-not-disrupt": "true"}
    if metrics_port is not None:
        metrics = {"scrape": "true", "port": str(metrics_port), "path": "/metrics"}
        found |= {f"prometheus.io/{name}": value for name, value in metrics.items()}
    return found


def pod_memory_mib(batch_memory_mib: int) -> int:
    """Return the memory in MiB that a pod can request on a machine where a Batch job can have
    `batch_memory_mib`.
    """
    return max(batch_memory_mib - _KUBELET_MIB - _OWN_PODS_MIB, 1024)


def is_single_pod() -> bool:
    return (
        "METAFLOW_KUBERNETES_WORKLOAD" in os.environ
        and "METAFLOW_KUBERNETES_JOBSET_NAME" not in os.environ
    )


def pod_markets() -> dict[str, QueueState]:
    """Return two placeholder queues, Spot and on-demand, so that Kubernetes can be planned like AWS
    Batch.

    They accept every instance type and number of nodes, because Karpenter creates the machines that
    a pod needs.
    """
    markets: dict[str, Market] = {"spot": "spot", "on-demand": "on_demand"}
    return {
        name: QueueState(
            name=name,
            market=market,
            arn="",
            instance_types=(),
            multi_node=True,
            usable=True,
            problem="",
        )
        for name, market in markets.items()
    }


def apply_to_pod(
    cli_args: CLIArgs, order: AttemptOrder, placement: Placement, config: RunConfig
) -> None:
    """Set the options of Metaflow's `kubernetes step` from the order and its placement.

    They replace the resources of @kubernetes. The user's tolerations, node selectors, labels,
    annotations, extended resources, volumes, image and service account are kept; a selector of the
    placement takes precedence over one of the same name.
    """
    from ebbflow.cost.catalogue import efa_interfaces  # late, as in `decorators.apply_to_batch`

    options = cli_args.command_options
    if order.nodes > 1:
        efa = efa_interfaces(placement.instance_type, config.batch.efa_interfaces)
    else:
        efa = 0
    labels = _json_option(options, "labels")
    annotations = _json_option(options, "annotations")
    selector = node_selector(placement, config.kubernetes.nodes)
    options["cpu"] = str(max(placement.cpu - 1, 1))  # one for the node's own pods
    options["gpu"] = str(placement.gpu) if placement.gpu else None
    options["memory"] = str(pod_memory_mib(placement.memory_mib))
    options["shared_memory"] = str(config.batch.shared_memory_mib)
    given = [
        pair for pair in options.get("node_selector") or () if pair.split("=")[0] not in selector
    ]
    options["node_selector"] = [*given, *(f"{key}={value}" for key, value in selector.items())]
    wanted = json.loads(options.get("tolerations") or "[]") or []
    missing = [
        toleration
        for toleration in make_tolerations(gpu=placement.gpu > 0)
        if toleration not in wanted
    ]
    options["tolerations"] = json.dumps([*wanted, *missing])
    options["labels"] = json.dumps({**labels, **_LABELS})
    options["annotations"] = json.dumps({**annotations, **pod_annotations(config.metrics.port)})
    options["run-time-limit"] = int(placement.wall_seconds)
    extended = _json_option(options, "extended_resources")
    if efa:
        extended[EFA] = str(efa)
    options["extended_resources"] = json.dumps(extended) if extended else None
    if config.batch.image and not options.get("image"):
        options["image"] = config.batch.image
    if "num-parallel" in options:  # Metaflow refuses a JobSet of one node
        options["num-parallel"] = str(order.nodes) if order.nodes > 1 else None
    cli_args.env[GRACE_VARIABLE] = str(config.checkpoint.stop_seconds)
    if placement.node_selector is not None:
        facts = {"instance_type": placement.instance_type, "market": placement.market}
        variables = {VARIABLES[name]: value for name, value in facts.items()}
        cli_args.env[POD_VARIABLES] = json.dumps(variables)


def exit_when_asked() -> None:
    """Make SIGTERM, SIGINT and SIGHUP end the submitting process through `sys.exit`.

    Metaflow's `atexit` handler, which deletes the pods, runs only after `sys.exit`. Later signals
    are ignored, because interrupting that handler would leave pods behind. The launcher waits 60 s
    for this process.
    """
    numbers = [signal.SIGTERM]
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            numbers.append(number)

    def leave(number: int, _frame: object) -> None:
        for handled in numbers:
            signal.signal(handled, signal.SIG_IGN)
        _asked_to_leave.set()
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def was_asked_to_leave() -> bool:
    return _asked_to_leave.is_set()


def set_grace_period() -> None:
    """Give pods time for a last checkpoint between SIGTERM and SIGKILL, and pass SIGTERM on to
    their tasks.

    Call this in the submitting process. It patches V1PodSpec, from which the Kubernetes client
    makes every pod, because Metaflow sets the grace period to 0, and its shell, process 1 of the
    container, passes no signal on. It also removes privileges that training does not need.
    """
    from kubernetes.client import V1EnvVar, V1PodSpec

    seconds = round(float(os.environ.get(GRACE_VARIABLE) or 0))
    variables: dict[str, str] = json.loads(os.environ.get(POD_VARIABLES) or "{}")
    make = V1PodSpec.__init__
    name = "termination_grace_period_seconds"

    def make_with_grace(spec: V1PodSpec, *args: Any, **fields: Any) -> None:
        for container in fields.get("containers") or []:
            container.command = wrap_command(container.command or []) or None
            container.env = [
                *(container.env or []),
                *(V1EnvVar(name=name, value=value) for name, value in variables.items()),
            ]
            devices = (container.resources and container.resources.limits) or {}
            container.security_context = container.security_context or make_security_context(
                efa=EFA in devices
            )
        # Metaflow asks for the full name as host name; a pod whose full name has more than 64
        # characters never starts.
        own = {"set_hostname_as_fqdn": None, name: max(fields.get(name) or 0, seconds)}
        make(spec, *args, **{"automount_service_account_token": False, **fields, **own})

    V1PodSpec.__init__ = make_with_grace  # pyright: ignore[reportAttributeAccessIssue] - patched on purpose


def _json_option(options: Mapping[str, str | None], name: str) -> dict[str, str]:
    return json.loads(options.get(name) or "{}") or {}

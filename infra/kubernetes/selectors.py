"""What a pod must say so that Karpenter makes the node that was chosen. Plain data; labels as of Karpenter v1.

Source: https://karpenter.sh/docs/concepts/scheduling/#well-known-labels (read, not tried).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CAPACITY_TYPE = "karpenter.sh/capacity-type"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
ZONE, ZONE_ID = "topology.kubernetes.io/zone", "topology.k8s.aws/zone-id"
# Of the NodePools in nodepools.yaml: nothing else lands on nodes that cost so much.
TAINT = "ebbflow/training"
GPU_TAINT = "nvidia.com/gpu"
_ZONE_ID = re.compile(r"[a-z]+\d+-[a-z]{2,}\d+")  # use1-az1; a zone's name is us-east-1a

# A pod's memory beyond what a Batch job leaves: kubelet 255 MiB + 11 MiB for each of maxPods = 30 pods
# (github.com/awslabs/amazon-eks-ami), 100 MiB before eviction, and the node's own pods.
_KUBELET_MIB, _OWN_PODS_MIB = 255 + 11 * 30 + 100, 339


def node_selector(placement: Mapping[str, Any]) -> dict[str, str]:
    """placement: `cost.capacity.Placement` as JSON. The zone keeps a gang together; without one the NodePool must."""
    chosen = {
        CAPACITY_TYPE: "spot" if placement["market"] == "spot" else "on-demand",
        INSTANCE_TYPE: placement["instance_type"],
    }
    if zone := placement.get("zone"):
        chosen[ZONE_ID if _ZONE_ID.fullmatch(zone) else ZONE] = zone
    return chosen


def tolerations(placement: Mapping[str, Any]) -> list[dict[str, str]]:
    """As Metaflow takes them: keys as the Kubernetes client's V1Toleration has them."""
    keys = [TAINT, *([GPU_TAINT] if placement["gpu"] else [])]
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def annotations(metrics_port: int | None) -> dict[str, str]:
    """Karpenter is not to tidy up a node under a gang; Prometheus finds the metrics where the nodes serve them."""
    found = {"karpenter.sh/do-not-disrupt": "true"}
    if metrics_port is not None:
        found |= {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(metrics_port),
            "prometheus.io/path": "/metrics",
        }
    return found


def pod_memory_mib(batch_memory_mib: int) -> int:
    """Of what a Batch job could ask for on the same instance."""
    return max(batch_memory_mib - _KUBELET_MIB - _OWN_PODS_MIB, 1024)

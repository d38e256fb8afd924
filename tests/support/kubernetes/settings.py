"""What the cluster has, and how it behaves: changed while it runs through `/_control/settings`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GPU_TAINT = "nvidia.com/gpu"
# Tolerations and node labels of the chart of NVIDIA's device plugin, release 0.17
# (deployments/helm/nvidia-device-plugin/values.yaml in NVIDIA/k8s-device-plugin)
PLUGIN_TOLERATES = ("CriticalAddonsOnly", "nvidia.com/gpu")
PLUGIN_SELECTS = {
    "feature.node.kubernetes.io/pci-10de.present": "true",
    "nvidia.com/gpu.present": "true",
}


@dataclass
class Pool:
    """Nodes of one kind, made when a pod needs one (as Karpenter does), up to `size`."""

    name: str
    market: str = "spot"  # spot or on-demand
    instance_type: str = "g5.xlarge"
    zone: str = "us-east-1a"
    size: int = 4
    gpus: int = 1
    cpus: float = 4.0
    memory_mib: float = 15000.0
    labels: dict[str, str] = field(default_factory=dict)
    tainted: bool = True
    taint: str = GPU_TAINT

    def node_labels(self) -> dict[str, str]:
        return {
            "karpenter.sh/nodepool": self.name,
            "karpenter.sh/capacity-type": self.market,
            "node.kubernetes.io/instance-type": self.instance_type,
            "topology.kubernetes.io/region": self.zone.rstrip("abcdef"),
            "topology.kubernetes.io/zone": self.zone,
            "nvidia.com/gpu.present": "true",
            **self.labels,
        }

    def taints(self) -> list[dict[str, str]]:
        if self.tainted:
            return [{"key": self.taint, "value": "true", "effect": "NoSchedule"}]
        return []

    def runs_device_plugin(self) -> bool:
        """Whether the pods of NVIDIA's device plugin run on these nodes."""
        labels = self.node_labels()
        selected = any(labels.get(name) == value for name, value in PLUGIN_SELECTS.items())
        return selected and all(taint["key"] in PLUGIN_TOLERATES for taint in self.taints())


@dataclass
class Settings:
    """Seconds are real ones."""

    namespaces: list[str] = field(default_factory=lambda: ["default", "ebbflow"])
    pools: list[Pool] = field(
        default_factory=lambda: [Pool("spot"), Pool("on-demand", market="on-demand")]
    )
    # Of every container, as an image or a role gives it
    environment: dict[str, str] = field(default_factory=dict)
    jobset: bool = True  # its definition is installed
    kueue: bool = False
    kueue_pods: int = 0  # that Kueue admits at a time
    device_plugin: bool = True
    node_seconds: float = 0.3  # until a new node is ready
    lost_seconds: float = 3.0  # until the cluster notices that a node is gone
    notice_seconds: float = 20.0  # between the notice and the end of a Spot instance
    missing_images: list[str] = field(default_factory=list)
    # Such as {"pods": 3, "count/jobsets.jobset.x-k8s.io": 0}
    quota: dict[str, int] = field(default_factory=dict)
    pod_security: str = "baseline"  # profile that the namespaces enforce, or "privileged"
    forbidden: list[str] = field(default_factory=list)  # "verb resource" that the role lacks
    # {"path": regex, "status": 429, "times": 2, "message": "of the answer"}
    faults: list[dict[str, Any]] = field(default_factory=list)
    history: int = 10000  # changes that a watch can start from
    down: bool = False  # the API server answers nothing; pods run on

    def change(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if not hasattr(self, name):
                raise ValueError(f"no such setting: {name}")
            if name == "pools":
                value = [Pool(**pool) for pool in value]
            setattr(self, name, value)

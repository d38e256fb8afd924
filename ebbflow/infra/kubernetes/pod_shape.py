"""Tolerations and privileges of training pods, which decide whether a cluster accepts them.

The pods of runs and those of the preflight checks share them.
"""

from ebbflow.core.json_values import JsonObject

# Taint of the NodePools in nodepools.yaml, which keeps other pods off costly nodes: the one that
# NVIDIA's device plugin tolerates. A taint of another name would keep the plugin away too, and no
# GPU would ever be registered.
GPU_TAINT = "nvidia.com/gpu"
TAINT = "ebbflow/training"  # of pools made for an older release, and of nodes without GPUs
GPU = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"


def make_tolerations(*, gpu: bool) -> list[dict[str, str]]:
    """Return tolerations that let a pod run on the tainted training nodes."""
    keys = [TAINT]
    if gpu:
        keys.append(GPU_TAINT)
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def make_security_context(*, efa: bool) -> JsonObject:
    """Return a security context with the least privileges that a training container needs.

    EFA needs pinned memory and hence IPC_LOCK, which is not among the capabilities of the Pod
    Security profile "baseline".
    """
    capabilities: JsonObject = {"drop": ["ALL"]}
    if efa:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": capabilities,
        "seccompProfile": {"type": "RuntimeDefault"},
    }

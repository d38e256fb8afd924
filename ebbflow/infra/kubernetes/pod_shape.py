"""Parts of a training pod that decide whether a cluster admits and schedules it: tolerations and
privileges. Pods of a run and those of the checks are made of them alike.
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
    """Return the least privileges with which a training container works; EFA needs pinned memory.

    IPC_LOCK is not among the capabilities of the Pod Security profile "baseline".
    """
    capabilities: JsonObject = {"drop": ["ALL"]}
    if efa:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": capabilities,
        "seccompProfile": {"type": "RuntimeDefault"},
    }

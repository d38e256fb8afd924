"""Workloads beyond the built-in language model.

`workload: ebbflow.workloads:NAME` in a configuration selects one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.workloads.language.hugging_face import HuggingFace
    from ebbflow.workloads.points.point_clouds import PointCloudDiffusion
    from ebbflow.workloads.policy.policy_optimization import PolicyOptimization
    from ebbflow.workloads.vision.timm_models import ImageModel
    from ebbflow.workloads.vision.vision import ImageClassifier

__all__ = [
    "HuggingFace",
    "ImageClassifier",
    "ImageModel",
    "PointCloudDiffusion",
    "PolicyOptimization",
]
_MODULES = {
    "HuggingFace": "hugging_face",
    "ImageClassifier": "vision",
    "ImageModel": "timm_models",
    "PointCloudDiffusion": "point_clouds",
    "PolicyOptimization": "policy_optimization",
}


def __getattr__(name: str) -> Any:
    """Import a workload on first use, since each needs libraries that the others do not."""
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

"""Workloads: language, vision, points and policy, and readers of their data.

`workload: ebbflow.workloads:NAME` in a configuration selects one. They use the public interface
`Workload` of `training`, and never prices or Metaflow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.workloads.language.hugging_face import HuggingFace
    from ebbflow.workloads.points.point_clouds import PointCloudDiffusion
    from ebbflow.workloads.policy.policy_optimization import PolicyOptimization
    from ebbflow.workloads.vision.classifier import ImageClassifier
    from ebbflow.workloads.vision.timm_models import ImageModel

__all__ = [
    "HuggingFace",
    "ImageClassifier",
    "ImageModel",
    "PointCloudDiffusion",
    "PolicyOptimization",
]
_MODULES = {
    "HuggingFace": "language.hugging_face",
    "ImageClassifier": "vision.classifier",
    "ImageModel": "vision.timm_models",
    "PointCloudDiffusion": "points.point_clouds",
    "PolicyOptimization": "policy.policy_optimization",
}


def __getattr__(name: str) -> Any:
    """Import a workload on first use, since each needs libraries that the others do not."""
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

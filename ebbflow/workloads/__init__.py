"""Built-in workloads (language, vision, points and policy) and readers of their data.

`workload: ebbflow.workloads:NAME` in a configuration selects one. They use the public interface
`Workload` of `training`, and never prices or Metaflow.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.workloads.language.hugging_face import HuggingFace
    from ebbflow.workloads.language.language_model import TextWorkload
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
    "TextWorkload",
]


def __getattr__(name: str) -> Any:
    """Import a workload on first use, because each needs libraries that the others do not need."""
    match name:
        case "HuggingFace":
            from ebbflow.workloads.language.hugging_face import HuggingFace

            return HuggingFace
        case "ImageClassifier":
            from ebbflow.workloads.vision.classifier import ImageClassifier

            return ImageClassifier
        case "ImageModel":
            from ebbflow.workloads.vision.timm_models import ImageModel

            return ImageModel
        case "PointCloudDiffusion":
            from ebbflow.workloads.points.point_clouds import PointCloudDiffusion

            return PointCloudDiffusion
        case "PolicyOptimization":
            from ebbflow.workloads.policy.policy_optimization import PolicyOptimization

            return PolicyOptimization
        case "TextWorkload":
            from ebbflow.workloads.language.language_model import TextWorkload

            return TextWorkload
        case _:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
            )

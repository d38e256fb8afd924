"""Image classification with built-in networks, or with models of timm (`timm_models`)."""

from ebbflow.workloads.vision.classifier import ImageClassifier

__all__ = ["ImageClassifier"]

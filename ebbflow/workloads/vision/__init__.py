"""Image classification: the built-in networks, and models of timm in `timm_models`."""

from ebbflow.workloads.vision.classifier import ImageClassifier

__all__ = ["ImageClassifier"]

"""Image classifiers and timm models."""

"""Guards: checks of losses, weights and memory during training that act on problems (see
docs/survival.md).
"""

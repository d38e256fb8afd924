"""Guards of losses, weights and memory during training, and their actions (docs/survival.md)."""

"""Guards that check losses, weights and memory during training, and act on problems (docs/survival.md)."""

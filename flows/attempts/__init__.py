"""One attempt of a training step on another machine: its placement, its submission and its outcome."""

"""The training engine: the loop, the trainer around it, parallelism, optimizers and guards."""

"""Workloads: the built-in language model, and finding, measuring and trying a user's own."""

"""Measurements of policies over recorded traces; every figure is simulated and says on what."""

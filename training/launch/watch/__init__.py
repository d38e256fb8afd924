"""Watching a node's ranks: signs of life, limits learned from the run, evidence, and who is to blame."""

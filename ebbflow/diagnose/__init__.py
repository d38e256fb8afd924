"""Diagnosis of training logs of any framework: the root failure, the failures that followed, and
how to fix them.

It imports `core` and `infra`, and never torch, Metaflow or pandas.
"""

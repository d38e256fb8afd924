"""Workloads: the built-in language model, and code that imports, measures and tries out a user's
own workload.
"""

"""Workloads to start from.

`ebbflow new NAME --like KIND` copies one; each passes its own test as it is.
"""

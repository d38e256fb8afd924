"""Templates of workloads, for a start with your own.

`ebbflow new NAME --like KIND` copies one; each passes its own test as it is.
"""

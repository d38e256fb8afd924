"""Templates from which you can start a workload of your own.

`ebbflow new NAME --like KIND` copies one; each passes its own test as it is.
"""

"""Basis of all other packages: configuration, store, events, outcomes, budgets and processes.

It imports no other package of the project, and never torch, Metaflow or pandas.
"""

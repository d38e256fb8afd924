"""The ground of all rooms: configuration, store, events, outcomes, terms and processes.

It imports no other room, and never torch, Metaflow or pandas.
"""

"""The ground of all packages: configuration, store, events, terms, processes and their keeper.

This package imports none of the others.
"""

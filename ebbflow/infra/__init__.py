"""Infrastructure: configuration, object store, event log, preflight checks and process control.

This package imports none of the packages `training`, `cost` and `flows`.
"""

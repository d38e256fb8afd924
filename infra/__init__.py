"""Infrastructure: configuration, object store, event log, preflight checks and process control.

It imports neither `training`, `cost` nor `flows`.
"""

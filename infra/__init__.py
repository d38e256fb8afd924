"""The ground: typed configuration, object store, event log, preflight mechanism. Imports nothing else of ours."""

"""The infra room: configuration, object store, event log, preflight and process control. Imports no other room."""

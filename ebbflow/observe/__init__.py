"""Displays of a job: live page, trackers, notifications, dashboards, alerts and timeline.

The package imports `core`, `infra`, `diagnose` and `cost`, and never torch or Metaflow.
"""

"""What shows a job: the live page, the terminal, trackers, notifications, dashboards and alerts.

It imports `core`, `infra`, `diagnose` and `cost`, and never torch or Metaflow.
"""

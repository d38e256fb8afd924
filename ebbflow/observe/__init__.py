"""What shows a job: the live page, trackers, notifications, dashboards, alerts and the timeline.

It imports `core`, `infra`, `diagnose` and `cost`, and never torch or Metaflow.
"""

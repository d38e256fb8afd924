"""Trackers and notifications of a job, fed from its event log by a process of their own."""

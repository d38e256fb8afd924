"""Prometheus, Grafana and alert rules for jobs."""

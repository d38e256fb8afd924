"""Kubernetes: manifests, preflight checks of a cluster, and requests that observe or end a job's
attempts.
"""

"""Manifests for a cluster, and requests to one: pods of an attempt and why they ended, checks, and ends of attempts."""

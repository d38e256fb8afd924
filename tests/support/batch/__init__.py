"""AWS Batch on one machine: its REST interface over HTTP, and jobs that really run, each node a
container of its own.

What it does follows AWS's documentation ("Job lifecycle for MNP jobs", "Jobs stuck in RUNNABLE",
the API reference); requests are held against botocore's model of the service. It is no proof of how
AWS behaves.
"""

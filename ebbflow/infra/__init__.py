"""Clouds and machines: AWS, AWS Batch, Kubernetes, Slurm, Spot notices and checks of machines.

It imports `core` only, and never torch, Metaflow or pandas.
"""

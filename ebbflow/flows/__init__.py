"""Metaflow flow that runs a training job.

Modules here import torch, boto3 and pandas only inside functions.
"""

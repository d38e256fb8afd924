"""Metaflow flow, its attempts and its cards. Its modules do not import torch, boto3 or pandas at module level."""

"""The Metaflow flow and what surrounds it. No module here imports torch, boto3 or pandas at module level."""

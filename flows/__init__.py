"""The Metaflow story. No module here imports torch, boto3 or pandas at module level."""

"""Readers of rows and datasets from files, folders and buckets."""

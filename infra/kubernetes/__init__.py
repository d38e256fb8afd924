"""Kubernetes: manifests of what a cluster needs, and how a placement becomes node labels. Never run on a cluster."""

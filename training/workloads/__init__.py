"""Workloads: the built-in one, and how one of yours is found, measured and tried before anything is paid for."""

"""Prometheus metrics: the catalogue of names, the boards that hold values, their page as text, and pushing it."""

"""Benchmarks, soaks and injected faults.

They measure the product; no product package imports them.
"""

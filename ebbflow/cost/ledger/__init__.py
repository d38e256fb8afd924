"""Ledger of a job: its paid time and dollars by ledger class and by cause, computed from its
events.
"""

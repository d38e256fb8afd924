"""The supervisor of `flows/supervise.py`: it starts the flow, judges how each run ended, and
continues or stops.
"""

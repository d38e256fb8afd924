"""Training: everything that runs on a rank, and the agents that start and watch the ranks.

Importing this package does not import torch, so launchers, agents and uploaders start in
milliseconds.
"""

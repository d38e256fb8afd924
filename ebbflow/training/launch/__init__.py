"""Agents, which start, watch and end a gang: all ranks of one job, on all of its nodes.

The entry point is `agent.run_gang`.
"""

"""Workload for the diffusion of point clouds."""

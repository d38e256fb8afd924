"""Diffusion of point clouds."""

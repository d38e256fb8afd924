"""Simulation of jobs on recorded capacity and prices, and the lowest possible cost on the same recordings."""

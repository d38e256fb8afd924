"""Simulation of jobs over recorded availability and prices, and the optimum over the same traces."""

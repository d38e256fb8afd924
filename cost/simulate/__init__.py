"""Simulation of jobs over recorded availability and prices, and the omniscient optimum over the same traces."""

"""Slurm: environment of a task, commands, states of jobs, batch scripts and checks."""

"""Seeded schedules that test the checkpoint protocol.

Gangs save, die, return at another size, race each other and meet a failing store. Each rank,
launcher and reader is a process that is forked from one with torch loaded; each rank has its own
uploader process; ranks agree over gloo; kills are SIGKILL. All of them run the code that training
runs. Only the state is small: it is a function of (generation, step), so that a single wrong bit
in a restored state is found.

A seed determines the schedule: world sizes, steps, victims, the moments of their deaths, and which
request meets which fault. It does not determine the order in which the processes run, so a seed
that failed may need several replays.
"""

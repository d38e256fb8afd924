"""Seeded schedules: gangs that save, die, come back at another size, race and meet a failing store.

What is real: each rank, launcher and reader is a process (forked from one that has torch loaded),
each rank has its own uploader process, ranks agree over gloo, kills are SIGKILL, and all of it is
the code that training uses. What is small: the state, a pure function of (generation, step), so
that one wrong bit in what is restored shows.

A seed fixes the schedule: worlds, steps, victims, when they die, and which request meets which
fault. The order in which the processes run remains the machine's, so that a seed that failed may
need a few replays.
"""

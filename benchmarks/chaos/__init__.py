"""Faults on purpose: what is done to a gang, what should come of it, and who is to blame.

Imports no torch.

`fault` says what a fault is, `kinds` lists them all, `scene` is the gang that they are done to.
Faults inside a rank are ordered through a folder (`orders`) and carried out by a workload that is
otherwise the text model (`workload`).
"""

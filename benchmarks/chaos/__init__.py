"""Injected faults: how each is done to a gang, its expected effect, and its culprit.

Imports no torch.

`fault` defines a fault, `kinds` lists all of them, `scene` is the gang that they are injected into.
Faults inside a rank are ordered through a folder (`orders`) and carried out by a workload that is
otherwise the text model (`workload`).
"""

"""Cost-aware PyTorch training on Metaflow that survives spot interruptions.

The folders `flows`, `training`, `cost` and `infra` at the top of the repository are linked into this package, so that
everything is imported as `ebbflow.…` in the repository, in an installation and in Metaflow's code package alike.
"""

__version__ = "0.2.0"

"""Workloads beyond the built-in language model. `workload: ebbflow.workloads:NAME` in a configuration selects one."""

from ebbflow.workloads.point_clouds import PointCloudDiffusion

__all__ = ["PointCloudDiffusion"]

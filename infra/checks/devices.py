"""What hardware this machine, or container, was given, as the kernel shows it: no driver and no library is asked."""

from __future__ import annotations

import glob
from pathlib import Path

GPU_FILES = "/dev/nvidia[0-9]*"  # one for each GPU
RDMA_DEVICES = Path("/sys/class/infiniband")  # InfiniBand, RoCE and EFA alike


def gpu_files() -> list[str]:
    return glob.glob(GPU_FILES)


def has_rdma() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())

"""What hardware this machine, or container, was given, as the kernel shows it: no driver and no library is asked."""

from __future__ import annotations

import glob
import os
from pathlib import Path

GPU_FILES = "/dev/nvidia[0-9]*"  # one for each GPU
RDMA_DEVICES = Path("/sys/class/infiniband")  # InfiniBand, RoCE and EFA alike


def gpu_files() -> list[str]:
    return glob.glob(GPU_FILES)


def gpus_hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def visible_gpus() -> int:
    """Count of the GPUs that a process started here would see, as far as files and CUDA_VISIBLE_DEVICES show it."""
    if gpus_hidden():
        return 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return min(len(gpu_files()), len(named) or len(gpu_files()))


def has_rdma() -> bool:
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())

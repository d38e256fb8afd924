"""Mounts that are nobody else's, and end with this process and those it starts."""

from __future__ import annotations

import ctypes
import os

from benchmarks.chaos.places.place import run_tool
from ebbflow.training.errors import GangError

_CLONE_NEWNS = 0x00020000  # <linux/sched.h>


def own_mounts() -> str:
    """From now on mounts of this process and those it starts are nobody else's, and end with them.

    Returns why not.

    To be called before there are threads: those keep the mounts that they had.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return (
            f"mounts of one's own are refused here ({os.strerror(ctypes.get_errno())}): run as root"
        )
    try:
        run_tool(["mount", "--make-rprivate", "/"])
    except GangError as error:
        return str(error)
    return ""

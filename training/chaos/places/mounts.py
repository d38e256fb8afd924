"""Mounts that are nobody else's, and end with this process and those it starts."""

from __future__ import annotations

import ctypes
import os
import subprocess

_CLONE_NEWNS = 0x00020000  # <linux/sched.h>


def own_mounts() -> str:
    """From now on mounts of this process and those it starts are nobody else's, and end with them. Returns why not.

    To be called before there are threads: those keep the mounts that they had.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return f"mounts of one's own are refused here ({os.strerror(ctypes.get_errno())}): run as root"
    done = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, text=True)
    return done.stderr.strip()

"""The container of a pod: process 1 of PID, mount and host-name namespaces of its own, with the
cluster's names.

    python -S pod.py PARENT_PID HOSTS HOSTNAME CORES COMMAND…

HOSTS is mounted over /etc/hosts. CORES, such as 0,1, are those of its node. SIGUSR1 sends the
command SIGTERM, as kubelet does: the kernel drops it if process 1 has no handler. SIGTERM kills
everything in the pod (exit code 137), and so does the parent's end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# <linux/sched.h>
_NEWNS = 0x20000
_NEWUTS = 0x4000000
_NEWUSER = 0x10000000
_NEWPID = 0x20000000
# <sys/mount.h>
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
KILLED = 137


def main(parent: int, hosts: str, hostname: str, cores: str, command: list[str]) -> int:
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return KILLED
    uid = os.getuid()
    gid = os.getgid()
    flags = _NEWNS | _NEWUTS | _NEWPID
    if libc.unshare(flags) != 0:
        if libc.unshare(flags | _NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "no namespaces of its own for a pod")
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {uid} 1"),
            ("gid_map", f"0 {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    child = os.fork()
    if child == 0:
        _begin(libc, hosts, hostname, command)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(child, signal.SIGTERM))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    return 128 - code


def _begin(libc: ctypes.CDLL, hosts: str, hostname: str, command: list[str]) -> None:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    libc.mount(b"proc", b"/proc", b"proc", 0, None)
    if libc.mount(hosts.encode(), b"/etc/hosts", None, _MS_BIND, None) != 0:
        os.write(2, b"the pod's hosts cannot be mounted\n")
        os._exit(128)
    libc.sethostname(hostname.encode(), len(hostname))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
        os._exit(128)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:]))

"""Sandbox that runs a completion and its test as one Python program, which can harm only its
folder.

The reward `unit_test` starts this file as a program of its own, so it imports the standard library
only. On Linux, two mechanisms that need no privileges restrict the process before the completion
runs: a seccomp filter refuses processes, programs, sockets and signals (x86-64 only), and Landlock
refuses files outside Python's folders and the current one.
"""

import ctypes
import errno
import itertools
import json
import os
import platform
import resource
import sys

PASSED = b"passed"
_NO_NEW_PRIVILEGES = 38  # option of prctl
_SECCOMP = 22  # option of prctl
_FILTER = 2  # mode of seccomp
_X86_64 = 0xC000003E  # AUDIT_ARCH_X86_64
_X32 = 0x40000000  # the bit of x32's system calls
# Results of a filter
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL = 0x80000000
# Instructions of BPF
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_HAS_BIT = 0x45
_RETURN = 0x06
# Numbers of system calls
_CLONE = 56
_CLONE3 = 435
_PRLIMIT = 302
_CLONE_THREAD = 0x10000  # flag of clone for a new thread
# System calls of x86-64 by number (arch/x86/entry/syscalls/syscall_64.tbl).
_REFUSED = {
    "processes and programs": (57, 58, 59, 322, 101, 310, 311, 109, 112, 272, 308, 434, 438),
    "sockets, also through io_uring": (41, 425),
    "signals": (62, 129, 200, 297, 424),
    "shared memory, queues and keys that outlive the process": (29, 64, 68, 240, 248, 249, 250),
    "limits and priorities": (160, 141, 142, 144, 203, 251, 314),
    "the kernel's log": (103,),
    "mounts and swap": (155, 161, 165, 166, 167, 168, *range(428, 434), 442),
    "names and clocks": (159, 164, 170, 171, 227, 305),
    "modules, ports and restarts": (169, 172, 173, 175, 176, 246, 313, 320),
    "what others do": (163, 179, 298, 304, 321, 323, 443),
}
# System calls that succeed and do nothing, since copies of files need them: modes, owners,
# attributes and times.
_IGNORED = (90, 91, 92, 93, 94, 188, 189, 190, 260, 268, 452, 132, 235, 261, 280)
_TGKILL = 234
_PATH_TRUNCATE = 76
# By these commands of fcntl and ioctl the kernel sends a signal for the program (F_SETOWN,
# F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP).
_COMMANDS = {72: (8, 10, 15), 16: (0x8901, 0x8902)}
# Numbers of Landlock's system calls on every architecture
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
# Rights of Landlock
_EXECUTE = 1
_WRITE = 2
_READ = 4
_LIST = 8
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_SCOPES = 3  # of Landlock from version 6: abstract sockets and signals of other processes
_READABLE = (
    "/usr/lib",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/dev/urandom",
)
_WRITABLE = ("/dev/null",)

_PROCESSES = "starting processes and using the network"
_libc = ctypes.CDLL(None, use_errno=True)


def find_missing() -> list[str]:
    """Return the protections of the sandbox that this machine lacks."""
    linux = sys.platform == "linux"
    if _landlock_version():
        missing = []
    else:
        missing = ["reading and writing files"]
    # PR_GET_SECCOMP
    if not linux or platform.machine() != "x86_64" or _libc.prctl(21, 0, 0, 0, 0) < 0:
        missing.append(_PROCESSES)
        if 0 < _landlock_version() < 3:
            missing += ["emptying files"]
    return missing


def restrict_files(folder: str) -> None:
    """Restrict file access to `folder` and to Python's own files, which can only be read."""
    version = _landlock_version()
    if not version:
        return
    every = (1 << 13) - 1 | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = (ctypes.c_uint64 * 3)(every, 0, _SCOPES)  # files, network, scopes
    size = ctypes.c_size_t(24 if version >= 6 else 8)
    rules = _check(_libc.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), size, ctypes.c_uint32(0)))
    rights = dict.fromkeys((*_READABLE, sys.prefix, sys.base_prefix), _EXECUTE | _READ | _LIST)
    rights |= dict.fromkeys(_WRITABLE, _READ | _WRITE) | {folder: every}
    for path, allowed in rights.items():
        if os.path.exists(path):
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = _Rule(
                allowed if os.path.isdir(path) else allowed & (_EXECUTE | _READ | _WRITE), handle
            )
            _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, ctypes.byref(rule), ctypes.c_uint32(0)))
            os.close(handle)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0)))
    os.close(rules)


def restrict_system_calls() -> None:
    """Refuse the system calls in `_REFUSED`, among them those that start processes or change
    limits.

    Signals to other processes are also refused. Threads are allowed.
    """
    if _PROCESSES in find_missing():
        return
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL)]
    lines += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), refuse]
    # The C library then uses clone
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    refused = list(itertools.chain.from_iterable(_REFUSED.values()))
    if _landlock_version() < 3:
        refused.append(_PATH_TRUNCATE)
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), refuse]
    for number in _IGNORED:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR)]
    allow = (_RETURN, 0, 0, _ALLOW)
    for number, commands in _COMMANDS.items():
        count = len(commands)
        lines += [(_EQUAL, 0, count + 3, number), (_LOAD, 0, 0, 24)]
        lines += [
            *((_EQUAL, count - at, 0, command) for at, command in enumerate(commands)),
            allow,
            refuse,
        ]
    lines += [
        (_EQUAL, 0, 4, _TGKILL),
        (_LOAD, 0, 0, 16),
        (_EQUAL, 0, 1, os.getpid()),
        allow,
        refuse,
    ]
    lines += [
        (_EQUAL, 0, 4, _CLONE),
        (_LOAD, 0, 0, 16),
        (_HAS_BIT, 0, 1, _CLONE_THREAD),
        allow,
        refuse,
    ]
    lines += [
        (_EQUAL, 0, 5, _PRLIMIT),
        (_LOAD, 0, 0, 32),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, 36),
        (_EQUAL, 1, 0, 0),
    ]
    lines += [refuse, allow]  # prlimit without a new limit only reads
    program = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    _check(_libc.prctl(_SECCOMP, _FILTER, ctypes.byref(_Program(len(lines), program)), 0, 0))


def main() -> None:
    """Set the limits, then run completion.py and test.py in the current folder.

    Write `PASSED` if both end.
    """
    writer = int(sys.argv[1])
    limits = json.loads(sys.argv[2])
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))
    if sys.platform == "linux":
        _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        restrict_files(os.getcwd())
        restrict_system_calls()
    sys.argv[:] = ["program.py"]
    scope = {"__name__": "__main__"}
    for name in ("completion.py", "test.py"):
        with open(name, encoding="utf-8") as file:
            exec(compile(file.read(), name, "exec"), scope)
    os.write(writer, PASSED)


class _Rule(ctypes.Structure):  # struct landlock_path_beneath_attr
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


class _Instruction(ctypes.Structure):  # struct sock_filter
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("yes", ctypes.c_uint8),
        ("no", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):  # struct sock_fprog
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def _landlock_version() -> int:
    if sys.platform != "linux":
        return 0
    return max(0, _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


if __name__ == "__main__":
    main()

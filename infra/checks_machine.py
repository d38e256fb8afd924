"""Checks of what a job takes of this machine and its store: room to write, /dev/shm, open files, memory."""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import secrets
import sys
from pathlib import Path

from infra.config.schema import RunConfig
from infra.errors import StoreError
from infra.footprint import host_memory_bytes, local_gang, open_files_per_rank, size_text, staging_bytes
from infra.preflight import Finding, PreflightContext
from infra.store import Store

_PROBE_BYTES = 4096
_REQUEST_SECONDS = 10.0
_SHARED_MEMORY = Path("/dev/shm")
_GPU_DEVICES = "/dev/nvidia[0-9]*"  # one for each GPU that this machine or container was given
_NCCL_SHARED_BYTES = 1 << 30  # what the NCCL user guide advises for containers, whose default is 64 MiB
_NO_LIMIT = 1 << 60  # version 1 of cgroups writes a huge number where there is no limit


def store_folder(context: PreflightContext) -> Path | None:
    """The folder of a local store, or None for a remote one."""
    store = context.config.store
    if "://" in store and not store.startswith("file://"):
        return None
    return context.project_root / Path(store.removeprefix("file://")).expanduser()


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def check_store_folder(context: PreflightContext) -> Finding:
    """A local store can be made where it is to be. Writes nothing."""
    folder = store_folder(context)
    if folder is None:
        return Finding.skipped("the store is remote; the check store-probe asks it")
    there = nearest_existing(folder)
    if not there.is_dir():
        return Finding.failed(f"{there} is in the way: it is not a folder", "set store to another folder, or move it")
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding.failed(
            f"{there} cannot be written to", f"set store to a folder of yours, or: chmod u+wx {there}"
        )
    made = "" if there == folder else f" (to be made in {there})"
    return Finding.passed(f"{folder}{made} is writable")


def check_store_probe(context: PreflightContext) -> Finding:
    """Put, get, compare and delete one object. Leaves nothing behind, not even a folder it had to make."""
    folder = store_folder(context)
    made = [] if folder is None else _missing_folders(folder)
    uri = context.config.store if folder is None else str(folder)
    try:
        return _probe(uri)
    except StoreError as error:
        where = "the credentials, region and endpoint (AWS_*), and " if folder is None else ""
        return Finding.failed(str(error), f"check {where}that the store may be read, written and deleted from")
    finally:
        for path in made:
            try:
                path.rmdir()
            except OSError:  # a job has moved in meanwhile
                break


def check_shared_memory(context: PreflightContext) -> Finding:
    """Room for what lies in /dev/shm: the segments that NCCL makes between processes, and those of loader processes.

    The staging slabs of commits are no part of it: they are anonymous files, to which its limit does not apply, and
    count as memory (`check_memory`). On CPUs nothing uses it, since gloo talks over TCP.
    """
    if not _SHARED_MEMORY.is_dir():
        return Finding.skipped(f"this system ({sys.platform}) has no {_SHARED_MEMORY}")
    statistics = os.statvfs(_SHARED_MEMORY)
    free = statistics.f_bavail * statistics.f_frsize
    gpus = len(glob.glob(_GPU_DEVICES))
    if not gpus:
        detail = "none needed: ranks on CPUs talk over TCP, staging slabs count as memory"
        return Finding.passed(f"{_SHARED_MEMORY}: {size_text(free)} free, {detail}")
    arithmetic = (
        f"{_SHARED_MEMORY}: {size_text(free)} free, {size_text(_NCCL_SHARED_BYTES)} advised with {gpus} GPUs: NCCL's "
        "segments between processes, and loader processes"
    )
    if free < _NCCL_SHARED_BYTES:
        fix = f"enlarge it: docker run --shm-size=1g, or mount -o remount,size=1g {_SHARED_MEMORY}"
        return Finding.failed(arithmetic, fix)
    return Finding.passed(arithmetic)


def check_open_files(context: PreflightContext) -> Finding:
    """RLIMIT_NOFILE against the sockets and files of the busiest rank."""
    gang = local_gang(context.config)
    if gang is None:
        return Finding.skipped("the number of ranks is auto")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_per_rank(gang)
    arithmetic = f"{soft} open files allowed, about {needed} needed by a rank of {gang.ranks}"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding.passed(arithmetic)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Finding.failed(arithmetic, f"ulimit -n {needed}")
    return Finding.failed(f"{arithmetic}; the hard limit is {hard}", f"have the administrator allow nofile {needed}")


def check_memory(context: PreflightContext) -> Finding:
    """Main memory of this machine, or of the container, against the gang that would train on it."""
    config, gang = context.config, local_gang(context.config)
    if gang is None:
        return Finding.skipped("the number of ranks is auto")
    limits = _memory_limits()
    if not limits:
        return Finding.skipped(f"this system ({sys.platform}) does not say how much memory is available")
    where, available = min(limits.items(), key=lambda item: item[1])
    needed = host_memory_bytes(config, gang)
    slabs = f"{size_text(staging_bytes(config))} of it to stage commits"
    arithmetic = f"{size_text(needed)} needed by {gang} (estimated; {slabs}), {size_text(available)} {where}"
    if needed > available:
        return Finding.failed(arithmetic, _smaller(config))
    return Finding.passed(arithmetic)


def _probe(uri: str) -> Finding:
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    key, written = f"preflight-{secrets.token_hex(8)}", secrets.token_bytes(_PROBE_BYTES)
    try:
        store.put(key, written)
        read = store.get(key)
    except StoreError:
        with contextlib.suppress(StoreError):  # the first error is the one to tell
            store.delete(key)
        raise
    store.delete(key)
    if read != written:
        return Finding.failed(
            f"{uri}: {len(read)} bytes read back are not the {len(written)} written", "use another store"
        )
    return Finding.passed(f"{uri}: put, get and delete of {_PROBE_BYTES} bytes")


def _missing_folders(folder: Path) -> list[Path]:
    """The folders that opening a store would make, innermost first."""
    return [path for path in [folder, *folder.parents] if not os.path.lexists(path)]


def _memory_limits() -> dict[str, int]:
    """Bytes this process could get, by who says so."""
    limits = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            limits["available on this machine"] = int(value.split()[0]) * 1024
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        base, name = ("memory", "memory.limit_in_bytes") if controllers == "memory" else ("", "memory.max")
        for folder in (group, "/"):  # inside a container its own group is mounted as the root
            value = _read(f"/sys/fs/cgroup/{base}{folder}/{name}").strip()
            if controllers in ("", "memory") and value.isdecimal() and int(value) < _NO_LIMIT:
                limit = limits.get("is this container's limit", _NO_LIMIT)
                limits["is this container's limit"] = min(limit, int(value))
    return limits


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _smaller(config: RunConfig) -> str:
    larger = 2 * config.training.gradient_accumulation_steps
    shard = " or parallel.mode to fsdp2" if config.parallel.mode == "ddp" else ""
    return f"set training.gradient_accumulation_steps to {larger}{shard}, or use fewer ranks or a smaller model"

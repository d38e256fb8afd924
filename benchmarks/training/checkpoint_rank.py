"""One rank of `bench checkpoint`: each contestant saves and restores the same state in turn."""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.training.laps import await_all
from benchmarks.training.savers import CommitSaver, DcpAsyncSaver, DcpSaver, Saver
from benchmarks.training.state import local_bytes, local_state, trained_state
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Generation
from ebbflow.training.gang import Gang

_COLD_SAVES = 2  # ours has two buffers, each cold once; all contestants get as many
_READERS = ("engine", "dcp_save")  # what DCP's asynchronous modes write, DCP reads in the same way
_START_SECONDS = 3.0
_COPIES = 5  # a copy is short; in each round the median of these stands for it


def measure_checkpoint(task: dict[str, Any], gang: Gang) -> dict[str, Any]:
    """Measure seconds by contestant, and the memcpy of this rank's bytes. Collective."""
    model, optimizer = trained_state(RunConfig.model_validate(task["config"]), gang)
    size = local_bytes(model, optimizer)
    uri = Store.open(task["store_uri"]).sub(job_prefix(task["job"])).uri
    generation = Generation(task["generation"], task["generation_id"])
    folder = Path(task["store_uri"])
    savers: dict[str, Saver] = {
        "engine": CommitSaver(uri, generation, model, optimizer, gang.rank),
        "dcp_save": DcpSaver(folder / "dcp-save", model, optimizer),
        "dcp_async_save": DcpAsyncSaver(folder / "dcp-async-save", model, optimizer),
    }
    found: dict[str, dict[str, Any]] = {
        name: {"cold": [], "blocked": [], "durable": [], "restore": [], "restored_equal": True}
        for name in savers
    }
    time.sleep(_START_SECONDS)  # as in training, time passes before the first save
    copies: list[float] = []
    copy = _memcpy(size)
    copy()
    for number in range(_COLD_SAVES + task["rounds"]):
        if number >= _COLD_SAVES:
            copies.append(statistics.median(_timed(copy) for _ in range(_COPIES)))
        for name, saver in savers.items():
            _measure_save(saver, number + 1, found[name], cold=number < _COLD_SAVES)
    before = _digest(model, optimizer)
    for _ in range(task["rounds"]):
        for name in _READERS:
            saver = savers[name]
            found[name]["restore"].append(_measure_restore(saver, model, optimizer))
            found[name]["restored_equal"] &= _digest(model, optimizer) == before
    for saver in savers.values():
        saver.close()
    return {"contestants": found, "memcpy": copies, "bytes": size}


def _measure_save(saver: Saver, step: int, found: dict[str, Any], *, cold: bool) -> None:
    await_all()
    began = time.monotonic()
    saver.save(step)
    blocked = time.monotonic() - began
    saver.finish()
    durable = time.monotonic() - began
    if cold:
        found["cold"].append(blocked)
    else:
        found["blocked"].append(blocked)
        found["durable"].append(durable)
    saver.tidy()


def _measure_restore(saver: Saver, model: nn.Module, optimizer: Optimizer) -> float:
    """Wipe the state, and return the seconds of its restore."""
    with torch.no_grad():
        for tensor in local_state(model, optimizer):
            tensor.zero_()
    return _timed(saver.restore)


def _timed(call: Callable[[], object]) -> float:
    await_all()
    began = time.monotonic()
    call()
    return time.monotonic() - began


def _memcpy(size: int) -> Callable[[], object]:
    """The C library's memcpy of `size` bytes between two buffers whose pages are present: one
    thread.
    """
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.ones(size, dtype=torch.uint8)
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size)


def _digest(model: nn.Module, optimizer: Optimizer) -> str:
    digest = hashlib.sha256()
    for tensor in local_state(model, optimizer):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

"""The bare loop in a process of its own: what the engine switches on in a process, such as the
recorder of allocations or deterministic algorithms, costs the bare loop nothing there.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.training.bare import BareLoop
from benchmarks.training.laps import Lap
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.process import die_with_parent
from ebbflow.core.store import Store
from ebbflow.training.data import open_tokens
from ebbflow.training.gang import Gang

_END_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class BareLoopSpec:
    """What a process needs to make a bare loop of one rank."""

    config: RunConfig
    device: str
    fingerprint: str  # of the tokens in the store
    windows: np.ndarray
    threads: int
    parent_pid: int


class LoopProcess:
    """A contestant whose laps a process of its own runs. It is idle between them."""

    def __init__(
        self, config: RunConfig, device: torch.device, fingerprint: str, windows: np.ndarray
    ) -> None:
        spec = BareLoopSpec(
            config=config,
            device=str(device),
            fingerprint=fingerprint,
            windows=windows,
            threads=torch.get_num_threads(),
            parent_pid=os.getpid(),
        )
        context = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, spec), daemon=True)
        self._process.start()
        other.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def run(self, steps: int) -> Lap:
        try:
            self._connection.send(steps)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_SECONDS)
            code = self._process.exitcode
            raise RuntimeError(f"the bare loop's process ended with {code}") from error

    def close(self) -> None:
        self._connection.close()
        self._process.join(_END_SECONDS)
        self._process.kill()


def _serve(connection: Connection, spec: BareLoopSpec) -> None:
    die_with_parent(spec.parent_pid)
    torch.set_num_threads(spec.threads)
    gang = Gang(device=torch.device(spec.device))
    if gang.device.type == "cuda":
        torch.cuda.set_device(gang.device)
    tokens = open_tokens(Store.open(spec.config.store), spec.fingerprint).train
    loop = BareLoop(spec.config, gang, tokens, spec.windows, tuned=False)
    while True:
        try:
            steps = connection.recv()
        except EOFError:
            return
        connection.send(loop.run(steps))

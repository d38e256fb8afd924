"""Bare torchrun as what faults are done to: the doors of `benchmarks.chaos.scene.Scene`, as far as
they are needed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.orders import Orders
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.training.errors import GangError

_RANK_SCRIPT = "benchmarks.training.survival.bare_rank"
_NO_HOST = "no-such-host.invalid"
_RESTARTS = 3


@dataclass(frozen=True)
class Shown:
    """Where a bare rank stands. t_mono: when its last step was done."""

    step: int
    pid: int
    t_mono: float


class BareScene:
    """One start of torchrun with two ranks: on one node, or, where `launch` names a fault, on two."""

    def __init__(self, folder: Path, launch: str = "") -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.orders = Orders(folder / "orders")
        self.output = folder / "output.log"
        port = _free_port()
        commands = [self._command(f"--standalone --nproc-per-node 2 --max-restarts {_RESTARTS}")]
        if launch:
            if launch == "wrong-port":
                other_port = _free_port()
            else:
                other_port = port
            if launch == "bad-name":
                other_host = _NO_HOST
            else:
                other_host = "127.0.0.1"
            places = [("127.0.0.1", port), (other_host, other_port)][
                : 1 if launch == "missing-peer" else 2
            ]
            commands = [
                self._command(
                    f"--nnodes 2 --node-rank {node} --nproc-per-node 1 --master-addr {host} "
                    f"--master-port {port} --max-restarts {_RESTARTS}"
                )
                for node, (host, port) in enumerate(places)
            ]
        environment = dict(
            os.environ, PYTHONPATH=str(PROJECT_ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
        )
        with self.output.open("ab") as log:
            self.processes = [
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in commands
            ]

    def _command(self, options: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options.split(),
            "-m",
            _RANK_SCRIPT,
            str(self.folder),
        ]

    def beats(self) -> dict[int, Shown]:
        """Where each rank stands; empty before the first step."""
        found = {}
        for path in self.folder.glob("step-?"):
            step, pid, t_mono = path.read_text().split()
            found[int(path.name.removeprefix("step-"))] = Shown(int(step), int(pid), float(t_mono))
        return found

    def rank_pid(self, rank: int) -> int:
        return self.beats()[rank].pid

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def await_steps(self, steps: int, timeout_seconds: float) -> None:
        """Until both ranks have taken so many. Raises GangError."""
        limit = time.monotonic() + timeout_seconds
        while time.monotonic() < limit and self.running:
            shown = self.beats()
            if len(shown) == 2 and all(one.step >= steps for one in shown.values()):
                return
            time.sleep(0.05)
        raise GangError(
            f"bare torchrun took no {steps} steps within {timeout_seconds:g} s; see {self.output}"
        )

    def close(self) -> None:
        """torchrun starts its ranks in sessions of their own, so that they have to be found before
        it is killed.
        """
        for pid in {shown.pid for shown in self.beats().values()}:
            _kill(pid, signal.SIGKILL)
        for process in self.processes:
            _kill(process.pid, signal.SIGCONT)
            process.terminate()  # it then ends those of its ranks that had not shown themselves
        for process in self.processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

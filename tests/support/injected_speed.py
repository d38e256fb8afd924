"""Slow and uneven runs, made for real by plain torch code that measures where its time or memory
goes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from tests.support.injections import Injected, injects

STEPS = 4


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def multiply(size: int = 400, times: int = 10) -> None:
    matrix = torch.ones(size, size)
    for _ in range(times):
        matrix = matrix @ matrix.T / size


def wait_for_host() -> None:
    time.sleep(0.004)


@injects("B07")
def gpus_of_two_sockets(here: Injected) -> None:
    """A stand-in for nvidia-smi on a machine whose GPUs have no NVLink."""
    tool = here.folder / "nvidia-smi"
    rows = ["\tGPU0\tGPU1\tCPU Affinity", "GPU0\t X \tSYS\t0-23", "GPU1\tSYS\t X \t24-47"]
    tool.write_text("#!/bin/sh\ncat << 'END'\n" + "\n".join(rows) + "\nEND\n")
    tool.chmod(0o755)
    subprocess.run([str(tool), "topo", "-m"], check=True)


@injects("C05", ranks=2)
def memory_held_by_one_rank(here: Injected) -> None:
    here.connect()
    if here.is_guilty:
        held = torch.ones(64 << 20)
    else:
        held = None
    used = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(used, torch.tensor([psutil.Process().memory_info().rss / 2**20]))
    low, high = sorted(float(mebibytes) for mebibytes in used)
    if here.rank == 0 and high > 1.15 * low:
        print(
            f"memory is uneven: the ranks use {[int(mebibytes) for mebibytes in used]} MiB",
            flush=True,
        )
    del held


@injects("G01")
def device_without_work(_: Injected) -> None:
    """A monitor of the device, here the CPU: the share of each step in which it computes, in many
    small pieces.
    """
    for step in range(STEPS):
        busy, waits = (
            sum(seconds(part) for _ in range(20))
            for part in (lambda: multiply(64, 1), wait_for_host)
        )
        share = 100 * busy / (busy + waits)
        if share < 40:
            print(f"step {step}: GPU utilization is only {share:.0f} %", flush=True)


@injects("G04", ranks=2)
def one_microbatch(here: Injected) -> None:
    """Two stages of a pipeline that take turns, because the batch is not divided."""
    here.connect(30)
    other = 1 - here.rank
    message = torch.ones(4)
    began = time.perf_counter()
    idle = 0.0
    for _ in range(STEPS):
        if here.rank == 1:
            idle += seconds(lambda: dist.recv(message, other))
        multiply()
        dist.send(message, other)
        if here.rank == 0:
            idle += seconds(lambda: dist.recv(message, other))
    share = idle / (time.perf_counter() - began)
    if share > 0.25:
        print(
            f"stage {here.rank}: pipeline bubble fraction {share:.2f} with 1 microbatch", flush=True
        )


@injects("G05", ranks=2)
def large_gradients(here: Injected) -> None:
    here.connect(30)
    gradient = torch.ones(8 << 20)
    for step in range(STEPS):
        work = seconds(lambda: multiply(100, 2))
        exchange = seconds(lambda: dist.all_reduce(gradient))
        share = 100 * exchange / (work + exchange)
        if here.rank == 0 and share > 40:
            print(
                f"step {step}: communication takes {share:.0f} % of {work + exchange:.3f} s",
                flush=True,
            )


@injects("G06")
def disk_in_each_step(here: Injected) -> None:
    with open(here.folder / "activations.bin", "wb", buffering=0) as file:

        def spill() -> None:
            file.write(bytes(8 << 20))
            os.fsync(file.fileno())

        for step in range(STEPS):
            work = seconds(lambda: multiply(50, 1))
            wait = seconds(spill)
            share = min(100 * wait / (work + wait), 99)
            if share > 40:
                print(f"step {step}: I/O wait {share:.0f} % of {work + wait:.3f} s", flush=True)


@injects("G07")
def log_of_each_sample(here: Injected) -> None:
    logger = logging.getLogger("samples")
    logger.addHandler(logging.FileHandler(here.folder / "samples.log"))
    for step in range(STEPS):
        work = seconds(lambda: multiply(50, 1))
        log = seconds(lambda: [logger.warning("sample %d", at) for at in range(500)])
        share = 100 * log / (work + log)
        if share > 20:
            print(f"step {step}: logging takes {share:.0f} % of {work + log:.3f} s", flush=True)


@injects("G08")
def generation_without_a_cache(_: Injected) -> None:
    """Each token runs the model over the whole sequence again, and one update follows."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        sequence = torch.randn(8, 16, 32)

        def generate(tokens: torch.Tensor) -> None:
            with torch.no_grad():
                for _ in range(60):
                    tokens = torch.cat([tokens, model(tokens)[:, -1:]], dim=1)

        def update(tokens: torch.Tensor) -> None:
            model(tokens).square().mean().backward()
            optimizer.step()

        spent = [
            seconds(lambda work=work, tokens=sequence: work(tokens)) for work in (generate, update)
        ]
        share = [100 * seconds / sum(spent) for seconds in spent]
        print(f"step:{step} timing_s/gen:{spent[0]:.3f} ({share[0]:.1f}%)", flush=True)
        print(f"step:{step} timing_s/update_actor:{spent[1]:.3f} ({share[1]:.1f}%)", flush=True)

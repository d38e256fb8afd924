"""`ebbflow bench attach`: the time that an attached job takes between two steps of a script, and
the stall of a save.

The stall is what a save adds to the loop of one rank: between its step and the next, and in the
optimizer's next step, which waits until the weights are copied. It is compared with one copy of as
many bytes between two warm buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ebbflow.core.program import PROJECT_ROOT, python_path
from ebbflow.infra.instance import describe_machine
from tests.support.gangs import free_port

_STEP_SECONDS = 0.05
_WARM_UP = 20  # steps that are not counted
_SAVE_EVERY = 20  # steps, in the measurement of the stall
_SAVES = 6  # of which the first is not counted, because it prepares the buffers


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ebbflow bench attach", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--steps", type=int, default=200, help="steps that are counted (200)")
    parser.add_argument(
        "--mib", type=int, default=256, help="size of the model whose saves are timed (256)"
    )
    parser.add_argument("--stall-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank_of is not None:
        return _measure(given.rank_of, given.steps)
    if given.stall_of is not None:
        return _measure_stall(given.stall_of, given.mib)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", str(given.steps), "--mib", str(given.mib)]
        torchrun = {
            "WORLD_SIZE": str(given.ranks),
            "LOCAL_WORLD_SIZE": str(given.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ranks = [
            {**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(given.ranks)
        ]
        if not _run_processes([*options, "--rank-of", folder], ranks):
            return 1
        figures = json.loads(Path(folder, "figures.json").read_text())
        if not _run_processes([*options, "--stall-of", folder], [{}]):
            return 1
        stall = json.loads(Path(folder, "stall.json").read_text())
    seconds = figures["seconds"]
    print(json.dumps({"kind": "measured", "machine": describe_machine(), "ranks": given.ranks}))
    averages = {"median": statistics.median(seconds), "mean": statistics.fmean(seconds)}
    for name, value in averages.items():
        print(
            f"{name} of {len(seconds)} steps: {1e6 * value:.0f} µs, {value / _STEP_SECONDS:.2%} "
            "of a 50 ms step"
        )
    cpu = figures["cpu_seconds"] / len(seconds)
    print(f"processor time: {1e6 * cpu:.0f} µs a step, {cpu / _STEP_SECONDS:.2%} of a 50 ms step")
    stalls = stall["stalls"]
    copy = statistics.median(stall["copies"])
    shown = ", ".join(f"{1e3 * seconds:.1f}" for seconds in stalls)
    print(
        f"stall of a save of {given.mib} MiB: median {1e3 * statistics.median(stalls):.1f} ms "
        f"({shown}), {statistics.median(stalls) / copy:.2f} × a warm copy of {1e3 * copy:.1f} ms"
    )
    print(f"load average: {os.getloadavg()[0]:.1f}")
    return 0


def _run_processes(options: list[str], environments: list[dict[str, str]]) -> bool:
    """Run this command once per environment. Return whether all of them succeeded."""
    command = [sys.executable, "-m", "benchmarks", "training", "attach", *options]
    common = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(command, cwd=PROJECT_ROOT, env={**common, **environment})
        for environment in environments
    ]
    codes = [process.wait(600) for process in processes]
    return not any(codes)


def _measure_stall(folder: Path, mib: int) -> int:
    import torch

    import ebbflow

    os.environ |= {
        "EBBFLOW__CHECKPOINT__INTERVAL": "steps",
        "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": str(_SAVE_EVERY),
    }
    weight = torch.nn.Parameter(torch.ones(mib * 2**18))  # of 4 bytes each
    model = torch.nn.ParameterDict({"weight": weight})
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gaps = []
    updates = []
    ended = time.perf_counter()
    for _ in ebbflow.attach(model, optimizer, store=str(folder / "stalls"), name="stall").steps(
        _SAVE_EVERY * _SAVES + 2
    ):
        gaps.append(time.perf_counter() - ended)
        time.sleep(_STEP_SECONDS)
        began = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - began)
        ended = time.perf_counter()
    spent = [gap + update for gap, update in zip(gaps, updates, strict=True)]
    saves = range(2 * _SAVE_EVERY, len(spent), _SAVE_EVERY)  # the iteration after each save
    usual = statistics.median(
        seconds for step, seconds in enumerate(spent[_WARM_UP:], _WARM_UP) if step % _SAVE_EVERY
    )
    source = weight.detach()
    target = torch.ones_like(weight)
    copies = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - began)
    figures = {"stalls": [spent[step] - usual for step in saves], "copies": copies}
    (folder / "stall.json").write_text(json.dumps(figures))
    return 0


def _measure(folder: Path, steps: int) -> int:
    import torch
    import torch.distributed as dist

    import ebbflow

    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    job = ebbflow.attach(model, optimizer, store=str(folder / "store"), name="bench")
    gaps: list[float] = []
    ended = 0.0
    used = 0.0
    working = 0.0
    for step in job.steps(_WARM_UP + steps):
        began = time.perf_counter()
        if step == _WARM_UP:
            used = time.process_time()
            working = 0.0
        if step >= _WARM_UP:
            gaps.append(began - ended)
        at = time.process_time()
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.log(loss=loss)
        time.sleep(max(0.0, _STEP_SECONDS - (time.perf_counter() - began)))
        working += time.process_time() - at
        last_used = time.process_time()
        ended = time.perf_counter()
    if dist.get_rank() == 0:
        figures = {"seconds": gaps, "cpu_seconds": last_used - used - working}
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()
    return 0

"""`ebbflow bench attach`: the time that an attached job takes between two steps of a script."""

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

from ebbflow.infra.instance import describe_machine
from ebbflow.infra.program import PROJECT_ROOT, python_path
from tests.support.gangs import free_port

_STEP_SECONDS = 0.05
_WARM_UP = 20  # steps that are not counted


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ebbflow bench attach", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--steps", type=int, default=200, help="steps that are counted (200)")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank_of is not None:
        return _measure(given.rank_of, given.steps)
    with tempfile.TemporaryDirectory() as folder:
        common = {"WORLD_SIZE": str(given.ranks), "LOCAL_WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks", "training", "attach", "--steps", str(given.steps)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank-of", folder],
                cwd=PROJECT_ROOT,
                env={**os.environ, **common, "PYTHONPATH": python_path(), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(given.ranks)
        ]
        codes = [rank.wait(600) for rank in ranks]
        if any(codes):
            return 1
        figures = json.loads(Path(folder, "figures.json").read_text())
    seconds = figures["seconds"]
    print(json.dumps({"kind": "measured", "machine": describe_machine(), "ranks": given.ranks}))
    for name, value in (("median", statistics.median(seconds)), ("mean", statistics.fmean(seconds))):
        print(f"{name} of {len(seconds)} steps: {1e6 * value:.0f} µs, {value / _STEP_SECONDS:.2%} of a 50 ms step")
    cpu = figures["cpu_seconds"] / len(seconds)
    print(f"processor time: {1e6 * cpu:.0f} µs a step, {cpu / _STEP_SECONDS:.2%} of a 50 ms step")
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
    ended, used, working = 0.0, 0.0, 0.0
    for step in job.steps(_WARM_UP + steps):
        began = time.perf_counter()
        if step == _WARM_UP:
            used, working = time.process_time(), 0.0
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

"""The command `ebbflow bench gpu`: measuring processes, one after the other, and the table of results.

Each line is measured in a process of its own, so that an error, a hang or a broken CUDA context
ends this line alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import EXPECTED, NO_RANGE, NOT_RUN, SIZES, Row, lines_of
from benchmarks.training.tables import table
from ebbflow.core.config.schema import DataConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.program import PROJECT_ROOT, python_path
from ebbflow.core.store import Store
from ebbflow.infra.instance import describe_machine
from ebbflow.training.data import prepare_tokens
from ebbflow.training.launch.transport import rendezvous_port

_LOG_TAIL_LINES = 15
_DESCRIBE_SECONDS = 120.0
_ERROR = "ERROR"
_WIDEST = 80  # characters of a cell; the whole error is printed as it occurs


def main(arguments: list[str]) -> int:
    given = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as name:
        device = _describe(given, Path(name))
        if "trouble" in device:
            hint = (
                "nvidia-smi shows what the driver sees; --device cpu --tiny rehearses this "
                "command without a GPU"
            )
            print(f"{device['trouble']}; fix: {hint}", file=sys.stderr)
            return Outcome.PREFLIGHT.exit_code
        found = _measure(given, Path(name), device)
    print(f"\n{render(found)}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["verdict"] not in (EXPECTED, NO_RANGE, NOT_RUN) for row in found["rows"]))


def render(found: dict[str, Any]) -> str:
    heads = ["line", "measured", "expected", "verdict"]
    rows = [
        [row["what"], row["measured"][:_WIDEST], row["expected"], row["verdict"]]
        for row in found["rows"]
    ]
    sources = sorted({f"{row['what']}: {row['source']}" for row in found["rows"] if row["source"]})
    return "\n".join(
        [table(heads, rows, text_columns=4), "", "sources of the expected ranges:", *sources]
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ebbflow bench gpu",
        description="Measure what a machine with GPUs should show before a job is trusted to it, offline.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_true",
        help="five minutes: small jobs, no model beyond 124M parameters",
    )
    size.add_argument(
        "--tiny", action="store_true", help="seconds: shows that the command works, not how fast"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal, with --tiny"
    )
    parser.add_argument(
        "--lines", metavar="LIST", help=f"of {','.join(lines_of(SIZES['full']))} (default: all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where jobs and saves are written (default: the temporary folder)",
    )
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="seconds for each line (default 600)"
    )
    given = parser.parse_args(arguments)
    if given.tiny:
        given.size = "tiny"
    elif given.quick:
        given.size = "quick"
    else:
        given.size = "full"
    lines = lines_of(SIZES[given.size])
    if given.lines:
        given.lines = given.lines.split(",")
    else:
        given.lines = lines
    unknown = set(given.lines) - set(lines)
    if unknown:
        parser.error(
            f"--lines: there is no {', '.join(sorted(unknown))}; choose from {', '.join(lines)}"
        )
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu needs --tiny: the other sizes take hours on a CPU")
    return given


def _describe(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the facts of the devices, or `trouble` if they cannot be used."""
    if given.device == "cpu":
        return {"type": "cpu", "name": "CPU", "count": 1}
    task = folder / "describe.json"
    task.write_text(json.dumps({"parent_pid": os.getpid()}))
    device, why = _run_child(task, "describe", _DESCRIBE_SECONDS, on_cpu=False)
    return device or {"trouble": why}


def _measure(given: argparse.Namespace, folder: Path, device: dict[str, Any]) -> dict[str, Any]:
    machine = describe_machine()
    on_cpu = device["type"] == "cpu"
    if on_cpu:
        where = "a CPU, as a rehearsal of the command"
    else:
        where = f"{device['count']} × {device['name']}"
    shown = "".join(f"{name} {device[name]}, " for name in ("cuda", "nccl") if device.get(name))
    print(
        f"measured {machine['measured_at']} on {where}, {machine['cpu']}\n"
        f"torch {machine['torch']}, Python {machine['python']}, {shown}size {given.size}",
        flush=True,
    )
    texts = folder / "text"
    _write_text(texts, SIZES[given.size].text_bytes)
    tokens = prepare_tokens(
        DataConfig(path=str(texts)), Store.open(str(folder / "store")), project_root=PROJECT_ROOT
    )
    task = folder / "task.json"
    task.write_text(
        json.dumps(
            {
                "size": given.size,
                "folder": str(folder),
                "prepared": {**tokens.to_json(), "weight_unit": "tokens"},
                "device": device,
                "parent_pid": os.getpid(),
            }
        )
    )
    rows = []
    for line in given.lines:
        began = time.monotonic()
        measured, why = _run_child(task, line, given.deadline, on_cpu=on_cpu)
        line_seconds = time.monotonic() - began
        if measured is None:
            measured = [Row(what=line, measured=why, verdict=_ERROR).to_json()]
        for row in measured:
            print(f"{line}: {row['what']}: {row['measured']} · {row['verdict']}", flush=True)
            rows.append({"line": line, **row, "line_seconds": line_seconds})
    return {
        "kind": "measured",
        "size": given.size,
        "machine": machine,
        "device": device,
        "rows": rows,
    }


def _run_child(task: Path, line: str, seconds: float, *, on_cpu: bool) -> tuple[Any, str]:
    """Run a measuring process.

    Returns:
        Its result and "", or None and why there is none.
    """
    out = task.with_name(f"{line}.out")
    log = task.with_name(f"{line}.log")
    command = [sys.executable, "-m", "benchmarks.gpu.measure", str(task), line, str(out)]
    why = ""
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command,
                env=_environment(task, line, on_cpu=on_cpu),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            why = f"no result within {seconds:g} s"
        else:
            if code:
                why = f"the process ended with exit code {code}"
    if not why:
        return json.loads(out.read_text()), ""
    tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    print("\n".join([f"{line}: {why}; the end of its output:", *tail]), file=sys.stderr, flush=True)
    return None, f"{why}: {tail[-1]}" if tail else why


def _environment(task: Path, line: str, *, on_cpu: bool) -> dict[str, str]:
    """Return torchrun's variables for one process, so that it makes the group of an agent's rank."""
    port = rendezvous_port("127.0.0.1", f"{task}/{line}", attempt=0)
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": python_path(),
    }
    if on_cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def _write_text(folder: Path, size: int) -> None:
    """Write a text that is the same on every machine: sums, in ten files of equal size."""
    folder.mkdir()
    for part in range(10):
        with (folder / f"{part}.py").open("w") as file:
            number = part
            while file.tell() < size // 10:
                for root in range(500):
                    file.write(f"{number} + {root * root} = {number + root * root}\n")
                number += 10

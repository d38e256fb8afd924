"""The command `ebbflow bench gpu`: measuring processes, one after the other, and the table of what
they found.

Each line is measured in a process of its own, so that an error, a hang or a broken CUDA context
ends this line alone. On a CPU at tiny size one process measures several lines, until one of them
ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import EXPECTED, NO_RANGE, NOT_RUN, SIZES, Row
from benchmarks.gpu.measure import JOB_LINES, lines_of
from benchmarks.training.tables import table
from ebbflow.core.config.schema import DataConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.program import PROJECT_ROOT, python_path
from ebbflow.core.store import Store
from ebbflow.infra.instance import describe_machine
from ebbflow.training.data import prepare_tokens
from ebbflow.training.launch.transport import rendezvous_port

_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15
_DESCRIBE_SECONDS = 120.0
_ERROR = "ERROR"
_WIDEST = 80  # characters of a cell; the whole error is printed as it occurs


def main(arguments: list[str]) -> int:
    given = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as name:
        run = _Run(folder=Path(name), given=given)
        device = run.describe()
        if "trouble" in device:
            hint = (
                "nvidia-smi shows what the driver sees; --device cpu --tiny rehearses this "
                "command without a GPU"
            )
            print(f"{device['trouble']}; fix: {hint}", file=sys.stderr)
            return Outcome.PREFLIGHT.exit_code
        found = run.measure(device)
    print(f"\n{render(found)}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["verdict"] not in (EXPECTED, NO_RANGE, NOT_RUN) for row in found["rows"]))


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
    lines = list(lines_of(SIZES[given.size]))
    if given.lines:
        given.lines = given.lines.split(",")
    else:
        given.lines = lines
    if unknown := set(given.lines) - set(lines):
        parser.error(
            f"--lines: there is no {', '.join(sorted(unknown))}; choose from {', '.join(lines)}"
        )
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu needs --tiny: the other sizes take hours on a CPU")
    return given


@dataclass(frozen=True, kw_only=True)
class _Run:
    folder: Path
    given: argparse.Namespace

    def describe(self) -> dict[str, Any]:
        """Return the facts of the devices, or `trouble` if they cannot be used."""
        if self.given.device == "cpu":
            return {"type": "cpu", "name": "CPU", "count": 1}
        task = {"lines": ["describe"]}
        records, why = self._run_child(task, "describe", _DESCRIBE_SECONDS)
        if records:
            return records[0]["device"]
        return {"trouble": why}

    def measure(self, device: dict[str, Any]) -> dict[str, Any]:
        machine = describe_machine()
        on_cpu = device["type"] == "cpu"
        if on_cpu:
            where = "a CPU, as a rehearsal of the command"
        else:
            where = f"{device['count']} × {device['name']}"
        shown = "".join(f"{name} {device[name]}, " for name in ("cuda", "nccl") if device.get(name))
        print(
            f"measured {machine['measured_at']} on {where}, {machine['cpu']}\n"
            f"torch {machine['torch']}, Python {machine['python']}, {shown}size {self.given.size}",
            flush=True,
        )
        texts = self.folder / "text"
        _write_text(texts, SIZES[self.given.size].text_bytes)
        data = DataConfig(path=str(texts))
        tokens = prepare_tokens(
            data, Store.open(str(self.folder / "store")), project_root=PROJECT_ROOT
        )
        task = {
            "size": self.given.size,
            "folder": str(self.folder),
            "prepared": {**tokens.to_json(), "weight_unit": "tokens"},
            "device": device,
        }
        groups = [[name] for name in self.given.lines]
        lanes = 1
        # No time is judged, so that two processes may disturb each other
        if self.given.size == "tiny":
            groups = [
                [name for name in self.given.lines if (name in JOB_LINES) is own]
                for own in (False, True)
            ]
            lanes = 2
        rows: dict[str, list[dict[str, Any]]] = {}
        with ThreadPoolExecutor(lanes) as pool:
            for some in pool.map(lambda lines: self._measure_group(task, lines), groups):
                rows |= some
        return {
            "kind": "measured",
            "size": self.given.size,
            "machine": machine,
            "device": device,
            "rows": [{"line": name, **row} for name in self.given.lines for row in rows[name]],
        }

    def _measure_group(
        self, task: dict[str, Any], lines: Sequence[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the rows by line.

        A line that ends its process gets a row that says so, and the others go on.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        while left := [name for name in lines if name not in found]:
            records, why = self._run_child({**task, "lines": left}, left[0], self.given.deadline)
            for record in records:
                error = record.get("error")
                if error:
                    rows = [_error_row(record["line"], error)]
                else:
                    rows = record["rows"]
                found[record["line"]] = [
                    {**row, "line_seconds": record.get("seconds")} for row in rows
                ]
            ended = next((name for name in left if name not in found), None)
            if ended is not None:
                found[ended] = [_error_row(ended, why or "the process ended without a result")]
            for name in left:
                for row in found.get(name, ()):
                    print(
                        f"{name}: {row['what']}: {row['measured']} · {row['verdict']}", flush=True
                    )
        return found

    def _run_child(
        self, task: dict[str, Any], name: str, seconds: float
    ) -> tuple[list[dict[str, Any]], str]:
        """Run a measuring process. Return its records, and why it ended early, if it did."""
        path = self.folder / f"task-{name}.json"
        out = path.with_suffix(".out")
        log = path.with_suffix(".log")
        out.unlink(missing_ok=True)
        path.write_text(json.dumps({**task, "out": str(out), "parent_pid": os.getpid()}))
        with log.open("wb") as output:
            command = [sys.executable, "-m", "benchmarks.gpu.measure", str(path)]
            child = subprocess.Popen(
                command,
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        why = ""
        seen = 0
        limit = time.monotonic() + seconds
        try:
            while child.poll() is None:
                known = len(_records(out))
                if known > seen:
                    seen = known
                    limit = time.monotonic() + seconds
                if time.monotonic() > limit:
                    why = f"no result within {seconds:g} s"
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            child.kill()
            code = child.wait()
        if code and not why:
            why = f"the process ended with exit code {code}"
        if why:
            tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            print(
                "\n".join([f"{name}: {why}; the end of its output:", *tail]),
                file=sys.stderr,
                flush=True,
            )
        return _records(out), why

    def _environment(self, name: str) -> dict[str, str]:
        """Return torchrun's variables for a process alone, so that it makes the group that an
        agent's rank has.
        """
        port = rendezvous_port("127.0.0.1", f"{self.folder}/{name}", attempt=0)
        own = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        own |= {"MASTER_PORT": str(port), "PYTHONPATH": python_path()}
        if self.given.device == "cpu":
            own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own}


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a process, without a last one that is not complete."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _error_row(line: str, why: str) -> dict[str, Any]:
    return Row(what=line, measured=why, verdict=_ERROR).to_json()


def _write_text(folder: Path, size: int) -> None:
    """Write a text that is the same on every machine: sums, in ten files of equal size."""
    folder.mkdir()
    for part in range(10):
        with (folder / f"{part}.py").open("w") as file:
            number = part
            while file.tell() < size // 10:
                file.write(
                    "".join(
                        f"{number} + {one * one} = {number + one * one}\n" for one in range(500)
                    )
                )
                number += 10


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

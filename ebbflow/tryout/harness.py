"""Code shared by the tools: their arguments, a child process with a deadline, and a small job.

Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import Event, read_events
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import OwnProgram, die_with_parent, own_program_line
from ebbflow.core.program import PROJECT_ROOT, python_path
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangOutcome, GangSpec

if TYPE_CHECKING:
    from ebbflow.training.workload import WorkloadContext

_SAVES = 6  # commits of a small job
_START_SECONDS = 900.0  # for one start of the gang
_MOST_STARTS = 4


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """Exit code, output and JSON answer of a child process."""

    exit_code: int
    output: str  # stdout and stderr, or "" if they went to the terminal
    answer: dict[str, Any] | None  # the JSON object that it wrote; None if it wrote none


def config_parser(tool: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for a tool's arguments: CONFIG, `--set`, and options that only `ask_tool`
    passes.
    """
    parser = argparse.ArgumentParser(prog=f"ebbflow {tool}", description=description)
    parser.add_argument("config", nargs="?", help="YAML file, such as configs/laptop.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override, model.num_layers=2",
    )
    parser.add_argument("--resolved", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser


def given_config(parser: argparse.ArgumentParser, given: argparse.Namespace) -> RunConfig:
    """Return the configuration from the command line or, in a child process, from the parent.

    Raises ConfigError.
    """
    if given.resolved is not None:
        die_with_parent()
        return RunConfig.model_validate_json(given.resolved.read_text())
    if given.config is None:
        parser.error("CONFIG is missing")
    return load_config(given.config, given.set, project_root=PROJECT_ROOT).config


def write_answer(path: Path | None, answer: Mapping[str, Json]) -> None:
    """Write a tool's result as JSON to `path`, if it is given."""
    if path is not None:
        path.write_text(json.dumps(answer, indent=1) + "\n")


def ask_tool(
    tool: str,
    config: RunConfig,
    words: Sequence[str],
    *,
    seconds: float,
    shown: bool,
    environment: Mapping[str, str],
) -> ChildResult:
    """Run a tool in a child process, because this process must not import torch.

    The arguments are those of `run_child`. Raises TimeoutError.
    """
    with tempfile.TemporaryDirectory(prefix=f"ebbflow-{tool}-") as folder:
        resolved = Path(folder, "config.json")
        answer = Path(folder, "answer.json")
        resolved.write_text(config.model_dump_json())
        command = own_program_line(OwnProgram.TRYOUT, tool, "--resolved", str(resolved))
        command += ["--output", str(answer), *words]
        return run_child(command, answer, seconds=seconds, shown=shown, environment=environment)


def run_child(
    command: list[str],
    answer: Path,
    *,
    seconds: float,
    shown: bool,
    environment: Mapping[str, str],
) -> ChildResult:
    """Run a command, and return its exit code, output, and the answer that it writes to a file.

    At the deadline, kill the command and all its children, and raise TimeoutError.

    Args:
        shown: whether its output goes to the terminal.
        environment: variables besides those of this process.
    """
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    try:
        written = json.loads(answer.read_text())
    except (OSError, ValueError):
        written = None
    return ChildResult(exit_code=process.returncode, output=output or "", answer=written)


def torchrun_variables(ranks: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank of one node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def small_config(config: RunConfig, *, store: Path, steps: int) -> RunConfig:
    """Return the configuration of a small copy of a job, with fewer steps and ranks.

    It has six commits, one or two nodes, and at most one rank per core. The copy never continues
    with fewer nodes: fewer ranks would add up gradients in another order, and the sums would differ
    in their last bits.
    """
    nodes, processes = gang_size(config)
    config = config.changed(
        "training", max_steps=steps, evaluation_interval_steps=max(1, steps // 2)
    )
    config = config.changed(
        "checkpoint",
        interval="steps",
        interval_steps=max(1, steps // _SAVES),
        when_busy="wait",
        upload_mib_per_second=None,
    )
    config = config.changed("cluster", nodes=nodes, processes_per_node=processes, min_nodes=None)
    config = config.changed("metrics", port=None, push_url=None)
    return config.model_copy(update={"store": str(store)})


def gang_size(config: RunConfig) -> tuple[int, int]:
    """Return the number of nodes of a small job, and of ranks per node."""
    nodes = config.cluster.nodes
    if nodes == "auto":
        nodes = 2
    nodes = min(nodes, 2)
    processes = config.cluster.processes_per_node
    if processes == "auto":
        processes = 1
    cores = len(os.sched_getaffinity(0))
    return nodes, max(1, min(processes, cores // nodes))


def fixed_gang_size(config: RunConfig) -> tuple[int, int]:
    """Return the numbers of nodes and of ranks per node in a configuration from `small_config`."""
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    assert isinstance(nodes, int) and isinstance(processes, int)
    return nodes, processes


def single_rank_context(config: RunConfig) -> WorkloadContext:
    """Return the context that a workload gets in a gang of one rank. Imports torch."""
    from ebbflow.training.gang import Gang
    from ebbflow.training.workload_loader import workload_context

    return workload_context(config, Gang(), store=Store.open(config.store))


def prepare(config: RunConfig) -> JsonObject:
    """Prepare the data of a small job, and return the data's description. Imports torch."""
    from ebbflow.training.workload_loader import prepare_data

    return prepare_data(config, single_rank_context(config))


def local_spec(config: RunConfig, prepared: JsonObject, *, job: str, logs: Path) -> GangSpec:
    """Return the specification of a gang on this machine, for a configuration from
    `small_config`.
    """
    nodes, processes = fixed_gang_size(config)
    return GangSpec(
        job=job,
        run=job,
        attempt=0,
        node=0,
        nodes=nodes,
        processes_per_node=processes,
        main_address="127.0.0.1",
        config=config,
        store_uri=config.store,
        prepared=prepared,
        log_folder=str(logs),
    )


def run_to_end(spec: GangSpec, folder: Path) -> tuple[GangOutcome, int]:
    """Start a job's ranks up to four times until the job ends; return its outcome and the starts.

    Raises TrainingError.
    """
    last = ""
    for attempt in range(_MOST_STARTS):
        gang = LocalGang(
            replace(spec, attempt=attempt), folder / f"start-{attempt}", folder / "output.log"
        )
        try:
            outcome = gang.wait(_START_SECONDS)
        except GangError as error:
            if not error.curable:
                raise
            last = str(error)
            continue
        if outcome.outcome != Outcome.INTERRUPTED:
            return outcome, attempt + 1
        last = outcome.message
    raise TrainingError(
        f"job {spec.job} did not end within {_MOST_STARTS} starts; last error: {last}"
    )


def job_events(config: RunConfig, job: str) -> list[Event]:
    """Read all events of a small job."""
    return read_events(Store.open(config.store).sub(job_prefix(job)))

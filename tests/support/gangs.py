"""Small gangs of real processes: ranks that run a script, and what an agent needs to run a whole
gang.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.process import AGENT_PORTS
from ebbflow.core.program import python_path
from ebbflow.core.store import Store
from ebbflow.training.data import prepare_tokens
from ebbflow.training.launch.messages import GangSpec
from tests.support.warm import WarmProcess, start_warm

PROJECT_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_SECONDS = 120
SECRET = bytes(range(32))  # of a start whose agents are in one test process
KNOWN: dict[str, Any] = {"secret": lambda: SECRET}  # how a node's side is given it


def free_port() -> int:
    """Return a port on which nothing listens.

    It is below those that gangs choose (`AGENT_PORTS`) and those that Linux gives to outgoing
    connections, one of which could take it before it is used.
    """
    for port in random.SystemRandom().sample(range(10_000, AGENT_PORTS.start), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports is free")


def run_ranks(
    world_size: int,
    command: list[str],
    *,
    deadline_seconds: float = _DEADLINE_SECONDS,
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Run `command` once per rank, with torchrun's environment.

    Returns the outputs; fails with them if any failed.

    Of a module (`-m`), the ranks are forked from a process that has imported torch; else each is a
    new interpreter.
    """
    environment = dict(
        environment,
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        PYTHONPATH=python_path(environment),
    )
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank-{rank}.log") for rank in range(world_size)]
        processes = [
            _start_rank(command, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
            for rank, log in enumerate(logs)
        ]
        limit = time.monotonic() + deadline_seconds
        codes = []
        try:
            codes = [process.wait(max(0.0, limit - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
            outputs = [log.read_text(errors="replace") for log in logs]
            assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(outputs)
    return outputs


def train_gang(
    folder: Path, scenarios: dict[str, dict[str, Any]], *, world_size: int
) -> dict[str, list[dict]]:
    """Train each scenario, one after the other in one gang, as `tests.support.engine_rank` does.

    A scenario holds `config` (a RunConfig), `tokens` and what is to happen. Returns one result per
    rank for each.
    """
    path = folder / f"scenarios-{len(list(folder.glob('scenarios-*.json')))}.json"
    path.write_text(json.dumps(scenarios, default=lambda config: config.model_dump(mode="json")))
    run_ranks(world_size, ["-m", "tests.support.engine_rank", str(path)])
    ranks = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(world_size)]
    by_scenario = {}
    for name in scenarios:
        by_scenario[name] = [rank[name] for rank in ranks]
    return by_scenario


def with_settings(spec: GangSpec, **sections: dict[str, Any]) -> GangSpec:
    """The spec with other settings. sections: of the configuration, with the changed keys."""
    config = spec.config.model_dump(mode="json")
    for section, changes in sections.items():
        config[section] |= changes
    return replace(spec, config=RunConfig.model_validate(config))


def endless_gang(folder: Path, *, logs: str = "logs", **sections: dict[str, Any]) -> GangSpec:
    """Two nodes of one rank, far more steps than any test waits for. sections: of the
    configuration, besides.
    """
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.py").write_text(
            "def double(number):\n    return 2 * number\n" * 400
        )
    config = RunConfig(
        store=str(folder / "store"),
        model={"hidden_size": 32, "num_layers": 1, "num_heads": 2, "sequence_length": 32},
        training={"batch_size": 4, "max_steps": 1_000_000, "evaluation_interval_steps": 1_000_000},
        data={"path": str(folder / "text"), "held_out_fraction": 0.3, "held_out_samples": 4},
        **sections,
    )
    tokens = prepare_tokens(config.data, Store.open(config.store), project_root=folder)
    return GangSpec(
        job="job",
        run="run",
        attempt=0,
        node=0,
        nodes=2,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=config,
        store_uri=config.store,
        prepared=tokens.to_json(),
        log_folder=str(folder / logs),
    )


def _start_rank(
    command: list[str], environment: dict[str, str], log: Path
) -> WarmProcess | subprocess.Popen[bytes]:
    if command[0] == "-m":
        return start_warm(command[1], command[2:], environment=environment, output=log)
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=PROJECT_ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

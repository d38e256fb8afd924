"""A whole gang on this machine, one agent process per node: for rehearsals, soaks and benchmarks without Metaflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ebbflow.infra.errors import Outcome
from ebbflow.infra.program import python_path
from ebbflow.training.errors import GangError
from ebbflow.training.launch.ports import control_ports
from ebbflow.training.launch.spec import GangOutcome, GangSpec


class LocalGang:
    """One start of a gang. `spec` is node 0's; the other nodes' differ only by `node`.

    output: where all agents' output goes (rank 0's lines among it). alter: changes a node's spec, to see what a gang
    makes of a node that is not like the others; None instead of a spec: that node never comes. command: what the
    command of a node's agent begins with, and that becomes it (`nsenter …`).
    """

    def __init__(
        self,
        spec: GangSpec,
        folder: Path,
        output: Path,
        *,
        alter: Callable[[GangSpec], GangSpec | None] | None = None,
        command: Callable[[int], list[str]] = lambda node: [],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ports = control_ports(f"{spec.job}/{spec.run}", spec.attempt)
        environment = dict(os.environ, PYTHONPATH=python_path(os.environ.get("PYTHONPATH")))
        self._results = [folder / f"node-{node}.result.json" for node in range(spec.nodes)]
        self.agents_by_node: dict[int, subprocess.Popen[bytes]] = {}
        for node, result in enumerate(self._results):
            result.unlink(missing_ok=True)
            own_spec = replace(spec, node=node, candidate_ports=ports)
            if alter is not None and (own_spec := alter(own_spec)) is None:
                continue
            own = folder / f"node-{node}.spec.json"
            own.write_text(json.dumps(asdict(own_spec)))
            with open(output, "ab") as log:
                agent = [*command(node), sys.executable, "-m", "ebbflow.training.launch.node", str(own), str(result)]
                process = subprocess.Popen(agent, env=environment, stdout=log, stderr=subprocess.STDOUT)
            self.agents_by_node[node] = process

    @property
    def agents(self) -> list[subprocess.Popen[bytes]]:
        return list(self.agents_by_node.values())

    def wait(self, timeout_seconds: float) -> GangOutcome:
        """The outcome that node 0 tells. Raises GangError when the gang died, or did not end in time."""
        limit = time.monotonic() + timeout_seconds
        try:
            for agent in self.agents:
                agent.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise GangError(f"the gang did not end within {timeout_seconds:g} s") from None
        finally:
            self.kill()
        if not self._results[0].exists():
            raise GangError("node 0's agent was killed")
        result = json.loads(self._results[0].read_text())
        if "error" in result:
            raise GangError(result["error"], curable=result["curable"], outcome=Outcome(result["outcome"]))
        return GangOutcome(**result)

    def kill(self) -> None:
        """Every agent is gone when this returns; their ranks go with them."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()

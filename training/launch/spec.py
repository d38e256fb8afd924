"""What a launcher tells a node, and what a node's agent tells a worker. Plain data, as JSON between processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ebbflow.infra.config.schema import SurvivalConfig

SPEC_VARIABLE = "EBBFLOW_SPEC"
_LONGEST_SILENCE_SECONDS = 20.0
_SHORTEST_SILENCE_SECONDS = 4.0  # agents say something each second


@dataclass(frozen=True, kw_only=True)
class GangSpec:
    """One node's view of a gang to run. Every node gets the same but for `node`.

    main_address: where node 0's agent listens for the others.
    prepared: what the workload's `prepare` returned, with its fingerprint.
    terms, rehearse: node 0's count, and it tells the others.
    attempt: counts the starts that the scheduler made (Metaflow's retry count, plus earlier runs of the job).
    candidate_ports: control ports to try in order, the same on every node (see `control_ports`).
    promised_gpus: of each node by its placement; 0: the placement names none, as on this machine.
    """

    job: str
    run: str
    attempt: int
    node: int
    nodes: int
    processes_per_node: int
    main_address: str
    config: dict
    store_uri: str
    prepared: dict
    log_folder: str
    terms: dict | None = None
    rehearse: str | None = None
    candidate_ports: list[int] = field(default_factory=list)
    promised_gpus: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.node * self.processes_per_node
        return range(first, first + self.processes_per_node)

    @property
    def token(self) -> str:
        """Tells agents of this start from anybody else who happens to listen on the same port."""
        return f"{self.job}/{self.run}/{self.attempt}/{self.nodes}x{self.processes_per_node}"

    @property
    def silence_seconds(self) -> float:
        """How long another node's agent may say nothing: as long as a rank without progress is left alone, but not so
        short that a busy machine is taken for a lost one, nor so long that a lost one is paid for."""
        floor_seconds = self.survival.hang_floor_seconds
        return min(_LONGEST_SILENCE_SECONDS, max(_SHORTEST_SILENCE_SECONDS, floor_seconds))

    @property
    def survival(self) -> SurvivalConfig:
        return SurvivalConfig(**self.config.get("survival", {}))


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker process is to do. Rank and world size come from torchrun's environment contract.

    candidates: commit keys to restore from, newest of the lineage first; empty: start afresh.
    config: `RunConfig.model_dump(mode="json")`. prepared: what the workload's `prepare` returned, with its fingerprint.
    rehearse: a fault to inject (`ebbflow.training.rehearse.Fault.to_json`), already known never to have fired.
    overrides: what is to be done otherwise than config says (`ebbflow.training.guards.overrides.Overrides.to_json`).
    colocated_ranks: ranks that share this machine's cores.
    promised_gpus: see `GangSpec`.
    kept_path: folder for what ranks need not measure again in the agent's later generations.
    control_path: where the node's agent tells its ranks to leave. notice_path: where a rehearsed notice is left for it.
    """

    job: str
    run: str
    attempt: int
    node: int
    generation: int
    generation_id: str
    candidates: list[str]
    config: dict
    store_uri: str
    prepared: dict
    terms: dict | None = None
    rehearse: dict | None = None
    overrides: dict = field(default_factory=dict)
    colocated_ranks: int = 1
    promised_gpus: int = 0
    control_path: str | None = None
    kept_path: str | None = None
    notice_path: str | None = None
    heartbeat_path: str | None = None
    result_path: str | None = None
    agent_pid: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        return cls(**json.loads(text))

    @classmethod
    def from_environment(cls) -> WorkerSpec | None:
        """The spec that this process's agent wrote, or None when it was started by torchrun or by hand."""
        path = os.environ.get(SPEC_VARIABLE)
        return cls.from_json(Path(path).read_text()) if path else None


@dataclass(frozen=True, kw_only=True)
class GangOutcome:
    """How a gang ended when it ended by itself: `outcome` is a value of `ebbflow.infra.errors.Outcome`.

    goes_on: for this node only; its machine had a notice, and the others go on without it.
    """

    outcome: str
    step: int
    generation: int
    weights_sha256: str | None = None
    message: str = ""
    goes_on: bool = False

"""One agent per node owns its ranks; node 0's agent leads. `run_gang` is all that anybody else needs.

An agent imports no torch and never waits without a deadline. It ends its gang as soon as one rank or node is gone, and
says which one came first: that is the culprit, the others only followed. What the agents that are there can cure, they
cure at once: the next generation of the gang begins where this one ends, with the newest commit, in the same attempt.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from infra.config.schema import ClusterConfig, SurvivalConfig
from infra.errors import InfraError
from infra.events import (
    FAULT_DETECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    OUTCOME,
    EndReason,
)
from infra.layout import job_prefix
from infra.outcome import Outcome
from infra.store import Store
from training.checkpoint.generations import Generation
from training.errors import GangError, TrainingError
from training.launch.drain import Drain
from training.launch.echo import say
from training.launch.generation import NodeGeneration
from training.launch.leader import Leader, failed_to_open
from training.launch.node_log import NodeLog
from training.launch.peers import Lead, Member, Peers
from training.launch.spec import GangOutcome, GangSpec
from training.launch.standby import Standby
from training.launch.verdict import Start, Verdict, unaffordable

# For all nodes to have ended their ranks and closed their logs, after a verdict that the gang goes on.
REGROUP_SECONDS = 30.0


def run_gang(spec: GangSpec) -> GangOutcome:
    """Run this node's ranks as part of a gang, from roll-call to the end. Call it on every node, in the main thread.

    Returns the outcome that all ranks agreed on, the same on every node. Raises GangError, naming the culprit, for
    everything that no further generation with these agents can cure; its `curable` says whether a new attempt may end
    better (a node that died or never came) or not (another model than the commit's, a crash loop). No process that it
    started is alive when it returns or raises.
    """
    return _Agent(spec).run()


class _Agent:
    def __init__(self, spec: GangSpec) -> None:
        self._spec = spec
        self._cluster = ClusterConfig(**spec.config["cluster"])
        self._job_store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
        self._host = socket.gethostname()
        self._log = NodeLog(self._job_store, self._host)
        self._drain = Drain(spec)
        self._standby: Standby | None = None

    def run(self) -> GangOutcome:
        try:
            with self._signals(), self._warm():
                verdict = self._lead() if self._spec.node == 0 else self._follow()
        finally:
            self._drain.close()
            self._withdraw_metrics()
        return self._conclude(verdict)

    def _lead(self) -> Verdict:
        """Generation after generation, until one ends with the gang's last word."""
        lead = Lead(self._spec, self._host)
        leader = Leader(self._spec, self._job_store, born=self._log.since)
        last = Verdict(culprit="the agent was stopped", reason=EndReason.AGENT_STOPPED)
        try:
            generation: Generation | None = leader.open()
            spec = self._spec
            self._log.open(spec, generation.number)
            while generation is not None:
                ended = last = self._lead_generation(lead, leader, generation, spec)
                number, generation = generation.number, None
                if ended.again:
                    spec = self._in_place(self._spec, lead.nodes)
                    last, generation = self._go_on(lead, leader, ended, number)
                self._tell_end(ended, last, number)
                if generation is not None:
                    spec = self._in_place(self._spec, lead.nodes)
                    self._log.open(spec, generation.number, left_for=ended.reason)
            return last
        finally:
            lead.close()
            self._log.close(last.reason)

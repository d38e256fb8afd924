"""The agent of one node: run its part of a gang, as node 0 or as a follower.

Metaflow's task is a node's agent in the flow; this is the same without Metaflow, for several nodes on one machine.

An agent imports no torch and never waits without a deadline. It ends its gang as soon as one rank or node is gone, and
says which one came first: that is the culprit, the others only followed. What the agents that are there can cure, they
cure at once: the next generation of the gang begins where this one ends, with the newest commit, in the same attempt.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.infra.process import die_with_parent
from ebbflow.infra.program import begin_program, python_path
from ebbflow.infra.untrusted_text import guard_terminal
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch.coordinator import REGROUP_SECONDS, Coordinator
from ebbflow.training.launch.logs import flush
from ebbflow.training.launch.membership import FollowerPeers
from ebbflow.training.launch.messages import (
    GangOutcome,
    GangSpec,
    GenerationEnd,
    GenerationStart,
    RankOrder,
    end_for_left_out_node,
    end_from_stop_request,
)
from ebbflow.training.launch.node_runtime import NodeRuntime, end_from_agent_error
from ebbflow.training.launch.transport import control_ports


def run_follower(own: NodeRuntime) -> GenerationEnd:
    """The gang's last word. Raises GangError where node 0 cannot be found."""
    standing = own.standing()
    try:
        member = FollowerPeers(
            own.spec,
            own.host,
            own.start_seconds,
            own.is_leaving,
            secret=own.fetch_secret,
            standing=standing,
            opened=lambda number: own.log.open(own.spec, number),
        )
    except GangError:
        if own.drain.leaving:
            return end_from_stop_request(own.drain.cause)
        raise
    last = own.stopped()
    try:
        if standing is not None and (word := _outlive(own, member, standing)) is not None:
            last = word
            return word
        word = member.await_start(own.start_seconds)
        while isinstance(word, GenerationStart):
            spec = own.spec_among(word.nodes)
            own.log.open(spec, word.generation, left_for=last.reason)
            last = own.stopped()
            last = own.run_ranks(spec, word, member)
            if not last.again:
                return last
            if own.spec.node in last.left_out:
                return (last := end_for_left_out_node(last, own.drain.cause))
            own.drain.forget_nodes(last.left_out)
            member.ready()
            word = member.await_start(own.start_seconds + REGROUP_SECONDS)
        if word.generation and not own.log.is_open:  # it waited for a gang that never started, and is paid for
            own.log.open(own.spec, word.generation)
        last = word
        return word
    finally:
        for order in own.drain.record(own.log.emit):  # heard while it waited for the lead, which must know why
            member.order(order)
        member.close()
        own.log.close(last.reason)


def _outlive(own: NodeRuntime, member: FollowerPeers, standing: RankOrder) -> GenerationEnd | None:
    """The last word where there is one before this node can start."""
    heard: list[GenerationEnd] = []

    def meanwhile(seconds: float) -> str:
        if (verdict := member.report_wait(replace(standing, seconds=seconds))) is not None:
            heard.append(verdict)
        return heard[0].culprit if heard else ""

    if why := own.wait_out_notices(meanwhile):
        return heard[0] if heard else end_from_stop_request(why)
    member.report_wait_over()
    return None


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
                agent = [*command(node), sys.executable, "-m", "ebbflow.training.launch.agent", str(own), str(result)]
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


def run_gang(spec: GangSpec) -> GangOutcome:
    """Run this node's ranks as part of a gang, from roll-call to the end. Call it on every node, in the main thread.

    Returns the outcome that all ranks agreed on, the same on every node but one that the others go on without.
    Raises GangError, naming the culprit, for all that no further generation with these agents can cure; its `curable`
    says whether a new attempt may end better (a node that died or never came) or not (another model than the commit's,
    a crash loop). No process that it started is alive when it returns or raises.
    """
    use_signing_key(spec.config.get("checkpoint", {}).get("signing_key_env"))  # ranks and uploaders inherit it
    own = NodeRuntime(spec)
    with _signals(own.drain.on_signal):
        try:
            verdict = Coordinator(own).run() if spec.node == 0 else run_follower(own)
        except (TrainingError, InfraError):
            raise
        except Exception as error:  # a scheduler that only sees a process end takes it for a lost machine
            verdict = end_from_agent_error(error, spec.node)
        finally:
            own.close()
            flush()  # before the caller's own lines
    return _conclude(verdict)


def _conclude(verdict: GenerationEnd) -> GangOutcome:
    if verdict.outcome is None:
        raise GangError(
            verdict.culprit,
            user_code=verdict.user_code,
            curable=verdict.curable,
            outcome=Outcome(verdict.failed_as),
        )
    return verdict.outcome


@contextmanager
def _signals(asked_to_leave: Callable[[], object]) -> Iterator[None]:
    """SIGTERM and Ctrl-C mean: save, leave, and let the job go on elsewhere. A second Ctrl-C means: now."""

    def ask(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        asked_to_leave()

    asked: list[int] = []
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: list[str]) -> int:
    """Exit code 0 with the outcome in the result file, 1 with an "error" in it."""
    guard_terminal()
    spec_path, result_path = map(Path, argv)
    die_with_parent()
    spec = GangSpec(**json.loads(spec_path.read_text()))
    try:
        result: dict = asdict(run_gang(spec))
    except (TrainingError, InfraError) as error:
        curable = isinstance(error, InfraError) or error.curable  # a store that is away may be back
        result = {"error": str(error), "curable": curable, "outcome": error.outcome}
    result_path.write_text(json.dumps(result))
    return int("error" in result)


if __name__ == "__main__":
    begin_program()
    sys.exit(main(sys.argv[1:]))

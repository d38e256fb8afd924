"""Agent of one node, which starts and watches the node's ranks.

Node 0's agent is the coordinator; the agents of all other nodes are followers. As soon as one rank
or node of the gang fails, every agent ends its ranks, and the coordinator names the rank or node
that failed first. If the remaining nodes can continue, the next generation starts at once in the
same attempt, from the newest commit. An agent does not import torch, and each of its waits has a
deadline.
"""

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

from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.process import OwnProgram, die_with_parent, own_program_line
from ebbflow.core.program import begin_program, python_path
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.infra.slurm.environment import stop_signals
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch import messages
from ebbflow.training.launch.budget_lease import BudgetLease
from ebbflow.training.launch.coordinator import REGROUP_SECONDS, Coordinator
from ebbflow.training.launch.logs import flush_output
from ebbflow.training.launch.membership import FollowerPeers
from ebbflow.training.launch.node_runtime import NodeRuntime, end_from_agent_error
from ebbflow.training.launch.price_follower import PriceLookup
from ebbflow.training.launch.transport import control_ports


class LocalGang:
    """Gang on this machine, with one agent process per node and without Metaflow.

    All agents write their output to the file `output`. `spec` is the specification for node 0.
    `alter` receives each node's spec and returns a changed one, or None to start no agent for that
    node. `command` returns a prefix for the command line of a node's agent, such as `nsenter …`.
    """

    def __init__(
        self,
        spec: messages.GangSpec,
        folder: Path,
        output: Path,
        *,
        alter: Callable[[messages.GangSpec], messages.GangSpec | None] | None = None,
        command: Callable[[int], list[str]] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ports = control_ports(f"{spec.job}/{spec.run}", spec.attempt)
        environment = dict(os.environ, PYTHONPATH=python_path())
        self._results = [folder / f"node-{node}.result.json" for node in range(spec.nodes)]
        self.agents_by_node: dict[int, subprocess.Popen[bytes]] = {}
        for node, result in enumerate(self._results):
            result.unlink(missing_ok=True)
            node_spec: messages.GangSpec | None = replace(spec, node=node, candidate_ports=ports)
            if alter is not None:
                node_spec = alter(node_spec)
            if node_spec is None:
                continue
            spec_path = folder / f"node-{node}.spec.json"
            spec_path.write_text(node_spec.to_json())
            prefix = command(node) if command is not None else []
            with open(output, "ab") as log:
                program = own_program_line(OwnProgram.AGENT, str(spec_path), str(result))
                agent = [*prefix, *program]
                process = subprocess.Popen(
                    agent, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            self.agents_by_node[node] = process

    @property
    def agents(self) -> list[subprocess.Popen[bytes]]:
        return list(self.agents_by_node.values())

    def wait(self, timeout_seconds: float) -> messages.GangOutcome:
        """Wait until all agents have exited, and return node 0's outcome.

        Raises GangError on failure or timeout.
        """
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
            raise GangError(
                result["error"], curable=result["curable"], outcome=Outcome(result["outcome"])
            )
        return messages.GangOutcome(**result)

    def kill(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
            agent.wait()


def run_follower(own: NodeRuntime) -> messages.GenerationEnd:
    """Run the agent of a node other than node 0, and return the gang's result for this node."""
    notice = own.find_pending_notice()

    def opened(generation: int) -> None:
        own.log.open(own.spec, generation)

    target = (own.spec, own.host, own.start_seconds, own.is_leaving)
    try:
        peers = FollowerPeers(
            *target, secret=own.fetch_secret, pending_notice=notice, opened=opened
        )
    except GangError:
        if own.drain.leaving:
            return messages.end_from_stop_request(own.drain.cause)
        raise
    last = own.end_if_stopped()
    try:
        if notice is not None:
            early_end = _wait_out_notice(own, peers, notice)
            if early_end is not None:
                last = early_end
                return early_end
        following = peers.await_start(own.start_seconds)
        while isinstance(following, messages.GenerationStart):
            spec = own.spec_among(following.nodes)
            own.log.open(spec, following.generation, left_for=last.reason)
            last = own.end_if_stopped()
            last = own.run_ranks(spec, following, peers)
            if not last.again:
                return last
            if own.spec.node in last.left_out:
                last = messages.end_for_left_out_node(last, own.drain.cause)
                return last
            own.drain.forget_nodes(last.left_out)
            peers.ready()
            following = peers.await_start(own.start_seconds + REGROUP_SECONDS)
        # A gang that never started is paid for as well
        if following.generation and not own.log.is_open:
            opened(following.generation)
        last = following
        return following
    finally:
        # Node 0 must learn why this node leaves
        for order in own.drain.record_notices(own.log.emit):
            peers.order(order)
        peers.close()
        own.log.close(last.reason)


def run_gang(
    spec: messages.GangSpec,
    *,
    prices: PriceLookup | None = None,
    is_reserved: Callable[[], bool] | None = None,
) -> messages.GangOutcome:
    """Run this node's ranks as part of a gang until the gang ends, and return the outcome that all
    ranks agreed on.

    Call it on every node, in the main thread. When it returns or raises, all processes that it
    started have ended.

    Args:
        prices: looks up the price of the held pool while the gang runs, on node 0; None: the price
            of `spec.terms` applies.
        is_reserved: returns whether the team's budget still has the job's reservation, on node 0;
            None: it needs none.

    Raises:
        GangError: the gang failed, and another generation in this attempt cannot succeed. The
            message names the culprit; `curable` tells whether a new attempt may succeed.
        InfraError, TrainingError: the first generation could not be created in the store.
    """
    # Ranks and uploaders inherit it
    use_signing_key(spec.config.checkpoint.signing_key_env)
    own = NodeRuntime(spec)
    with _handle_signals(own.drain.on_signal):
        try:
            if spec.node == 0:
                end = _coordinate(own, prices, is_reserved)
            else:
                end = run_follower(own)
        except (TrainingError, InfraError):
            raise
        except Exception as error:  # without this, the scheduler would see a lost machine
            end = end_from_agent_error(error, spec.node)
        finally:
            own.close()
            flush_output()
    if end.outcome is None:
        failed_as = Outcome(end.failed_as)
        raise GangError(
            end.culprit, user_code=end.user_code, curable=end.curable, outcome=failed_as
        )
    return end.outcome


def main(argv: list[str]) -> int:
    """Run one agent. Return 0 if the gang ended with an outcome, 1 after an error.

    `argv` has two paths: the file with the agent's spec, and the file to which the agent writes its
    result.
    """
    guard_terminal()
    spec_path, result_path = map(Path, argv)
    die_with_parent()
    spec = messages.GangSpec.from_json(spec_path.read_text())
    try:
        result: dict = asdict(run_gang(spec))
    except (TrainingError, InfraError) as error:
        curable = isinstance(error, InfraError) or error.curable  # an unavailable store may recover
        result = {"error": str(error), "curable": curable, "outcome": error.outcome}
    result_path.write_text(json.dumps(result))
    return int("error" in result)


def _coordinate(
    own: NodeRuntime, prices: PriceLookup | None, is_reserved: Callable[[], bool] | None
) -> messages.GenerationEnd:
    if is_reserved is None:
        return Coordinator(own, prices).run()
    lease = BudgetLease(is_reserved, own.drain.on_signal)
    try:
        return Coordinator(own, prices).run()
    finally:
        lease.close()


def _wait_out_notice(
    own: NodeRuntime, peers: FollowerPeers, notice: messages.RankOrder
) -> messages.GenerationEnd | None:
    """Wait until a pending notice has expired.

    Return this node's result if the gang ends earlier, else None.
    """
    ends: list[messages.GenerationEnd] = []

    def report(seconds: float) -> str:
        end = peers.report_wait(replace(notice, seconds=seconds))
        if end is not None:
            ends.append(end)
        if ends:
            return ends[0].culprit
        return ""

    if why := own.wait_out_notices(report):
        if ends:
            return ends[0]
        return messages.end_from_stop_request(why)
    peers.report_wait_over()
    return None


@contextmanager
def _handle_signals(asked_to_leave: Callable[[], object]) -> Iterator[None]:
    """Call `asked_to_leave` on SIGTERM, on Ctrl-C and, under Slurm, on SIGUSR1.

    Raise KeyboardInterrupt if Ctrl-C follows such a signal.
    """

    def ask(number: int, _frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        asked_to_leave()

    asked: list[int] = []
    handled = (*stop_signals(os.environ), signal.SIGINT)
    before = {number: signal.signal(number, ask) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    begin_program()
    sys.exit(main(sys.argv[1:]))

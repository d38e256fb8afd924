"""One agent per node owns its ranks; node 0's agent leads. `run_gang` is all that anybody else needs.

An agent imports no torch and never waits without a deadline. It ends its gang as soon as one rank or node is gone, and
says which one came first: that is the culprit, the others only followed. What the agents that are there can cure, they
cure at once: the next generation of the gang begins where this one ends, with the newest commit, in the same attempt.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch.echo import flush
from ebbflow.training.launch.following import follow
from ebbflow.training.launch.leading import Leading
from ebbflow.training.launch.own_node import OwnNode
from ebbflow.training.launch.spec import GangOutcome, GangSpec
from ebbflow.training.launch.verdict import Verdict, agent_failed


def run_gang(spec: GangSpec) -> GangOutcome:
    """Run this node's ranks as part of a gang, from roll-call to the end. Call it on every node, in the main thread.

    Returns the outcome that all ranks agreed on, the same on every node but one that the others go on without.
    Raises GangError, naming the culprit, for all that no further generation with these agents can cure; its `curable`
    says whether a new attempt may end better (a node that died or never came) or not (another model than the commit's,
    a crash loop). No process that it started is alive when it returns or raises.
    """
    use_signing_key(spec.config.get("checkpoint", {}).get("signing_key_env"))  # ranks and uploaders inherit it
    own = OwnNode(spec)
    with _signals(own.drain.signalled):
        try:
            verdict = Leading(own).run() if spec.node == 0 else follow(own)
        except (TrainingError, InfraError):
            raise
        except Exception as error:  # a scheduler that only sees a process end takes it for a lost machine
            verdict = agent_failed(error, spec.node)
        finally:
            own.close()
            flush()  # before the caller's own lines
    return _conclude(verdict)


def _conclude(verdict: Verdict) -> GangOutcome:
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

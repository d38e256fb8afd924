"""Event logs as agents and ranks write them, on a clock that a test sets by hand."""

from __future__ import annotations

from hypothesis import strategies as st

from ebbflow.core.errors import Outcome
from ebbflow.core.events import (
    COMMIT,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_ENDED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    OUTCOME,
    PHASE,
    PLAN,
    PRICES,
    STEP,
    EndReason,
    Event,
)
from ebbflow.core.layout import commit_key
from ebbflow.cost.ledger.timeline import NodeTime

# The wall clock of the machines runs apart from their monotonic one, as on real machines.
WALL = 1_800_000_000.0

_some_seconds = st.floats(0.001, 30.0)

_PLANNED = [Outcome.COMPLETED, Outcome.BUDGET, Outcome.DEADLINE, Outcome.NON_FINITE]
_STEP_CLASSES = st.sampled_from(["useful_step", "data_wait", "evaluation", "checkpoint_stall"])


class GangLog:
    """One generation. nodes: the ranks of each node; every rank has a clock of its own, in seconds.

    machines: what each node knows of its machine.
    """

    def __init__(
        self,
        number: int,
        start: float,
        nodes: list[list[int]],
        parent: tuple[int, int] | None = None,
        machines: list[dict] | None = None,
    ) -> None:
        self.number = number
        self.start = start
        self.nodes = nodes
        self.events: list[Event] = []
        self.clock = {rank: start for ranks in nodes for rank in ranks}
        if parent is None:
            parent_key = None
        else:
            parent_key = key(*parent)
        if parent is None:
            step = 0
        else:
            step = parent[0]
        self.add(GENERATION_STARTED, start, parent=parent_key, parent_step=step, nodes=len(nodes))
        for node, ranks in enumerate(nodes):
            if machines is None:
                known = {}
            else:
                known = machines[node]
            self.add(NODE_STARTED, start, node=node, ranks=ranks, host=f"host-{node}", **known)

    def add(self, name: str, t: float, **fields) -> None:
        self.events.append(event(name, t, generation=self.number, **fields))

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.nodes) if rank in ranks)

    def wait(self, seconds: float) -> None:
        """Time that no rank accounts for."""
        for rank in self.clock:
            self.clock[rank] += seconds

    def phase(self, kind: str, seconds: float) -> None:
        for rank in self.clock:
            self.clock[rank] += seconds
            self.add(
                PHASE,
                self.clock[rank],
                rank=rank,
                node=self.node_of(rank),
                **{"class": kind, "seconds": seconds},
            )

    def steps(self, first: int, last: int, loss: float = 2.0, **seconds: float) -> None:
        for step in range(first, last + 1):
            for rank in self.clock:
                self.clock[rank] += sum(seconds.values())
                data = {"loss": loss / step, "tokens": 1000, "seconds": seconds}
                self.add(
                    STEP, self.clock[rank], rank=rank, node=self.node_of(rank), step=step, **data
                )

    def commit(self, step: int) -> None:
        self.add(
            COMMIT, self.now, rank=0, step=step, key=key(step, self.number), bytes=1, seconds=0.1
        )

    def outcome(self, outcome: str, sha256: str | None = "cd" * 32, message: str = "") -> None:
        data = {"outcome": outcome, "weights_sha256": sha256, "message": message}
        self.add(OUTCOME, self.now, rank=0, **data)

    def heartbeat(self, node: int, seconds: float) -> None:
        self.add(NODE_HEARTBEAT, self.start + seconds, node=node, seconds=seconds)

    def node_ended(self, node: int, seconds: float, reason: str = "completed") -> None:
        self.add(NODE_ENDED, self.start + seconds, node=node, seconds=seconds, reason=reason)

    def ended(
        self, reason: str, seconds: float, culprit: str = "", user_code: bool = False
    ) -> None:
        """The generation's end and the end of all its nodes."""
        self.add(
            GENERATION_ENDED,
            self.start + seconds,
            reason=reason,
            culprit=culprit,
            user_code=user_code,
        )
        for node in range(len(self.nodes)):
            self.node_ended(node, seconds, reason)

    @property
    def now(self) -> float:
        return max(self.clock.values())


def event(
    name: str, t: float, *, generation: int = 0, node: int = 0, rank: int = -1, step=None, **data
) -> Event:
    return Event(
        name=name,
        job="demo",
        run="run-1",
        attempt=max(0, generation - 1),
        generation=generation,
        node=node,
        rank=rank,
        step=step,
        t_wall=WALL + t,
        t_mono=t,
        data=data,
    )


def paid_node(
    start: float,
    seconds: float,
    *,
    generation: int = 1,
    node: int = 0,
    ranks: int = 1,
    **machine: object,
) -> NodeTime:
    """A node that is paid from `start` for `seconds`, without events. machine: what it knows of its
    machine.
    """
    return NodeTime(
        generation=generation,
        node=node,
        started_wall=WALL + start,
        start=start,
        end=start + seconds,
        measured=True,
        ranks=list(range(ranks)),
        events={},
        machine=dict(machine),
    )


def plan_event(
    usd_per_hour: float = 3.6,
    on_demand: float | None = 7.2,
    *,
    simulated: bool = False,
    t: float = 0.0,
    volume: str | None = None,
):
    """A plan of $3.60 per node and hour: a node-second costs a tenth of a cent.

    volume: dollars per hour of a root volume; None as in older plans.
    """
    chosen = {
        "instance_type": "g5.xlarge",
        "nodes": 1,
        "market": "spot",
        "usd_per_hour": usd_per_hour,
        "on_demand_usd_per_hour": on_demand,
        "price_kind": "recorded 2026-07-20",
        "expected_hours": 0.5,
        "expected_usd": 0.9,
        "tokens_per_second": 1000.0,
        "mfu": 0.3,
        "interruptions": 0.01,
    }
    if volume is not None:
        chosen["volume_usd_per_hour"] = volume
    return event(PLAN, t, simulated=simulated, chosen=chosen, refusal=None)


def prices_event(changes: list[tuple[float, float | str]], *, t: float = 1e6, **pool) -> Event:
    """Recorded price changes of the plan's pool. changes: (seconds after `WALL`, dollars per hour)."""
    where = {
        "instance_type": "g5.xlarge",
        "market": "spot",
        "region": None,
        "zone": None,
        "kind": "recorded",
    } | pool
    return event(
        PRICES, t, pools=[{**where, "changes": [[WALL + at, str(usd)] for at, usd in changes]}]
    )


def key(step: int, generation: int) -> str:
    return commit_key(step, generation, "ab" * 32)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[list[Event], int]:
    """Random jobs with kills, lost ends and unspoken time, and how many step executions they threw
    away.
    """
    events = [plan_event(draw(st.floats(0.1, 500.0)))]
    generations = draw(st.integers(1, 4))
    t = 1.0
    kept = 0
    parent = None
    thrown = 0
    for number in range(1, generations + 1):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        nodes = [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
        gang = GangLog(number, t, nodes, parent)
        gang.wait(draw(_some_seconds))
        gang.phase("startup", draw(_some_seconds))
        steps = draw(st.integers(0, 5))
        gang.steps(
            kept + 1, kept + steps, useful_step=draw(_some_seconds), data_wait=draw(_some_seconds)
        )
        last = number == generations and draw(st.booleans())
        if last:
            committed = steps
        else:
            committed = draw(st.integers(0, steps))
        if committed:
            gang.commit(kept + committed)
            parent = (kept + committed, number)
            kept = kept + committed
        thrown += steps - committed
        gang.wait(draw(st.sampled_from([0.0, 0.4, 7.0])))
        lived = gang.now - t + draw(_some_seconds)
        if last:
            gang.outcome("completed")
            gang.phase("shutdown", 0.1)
            gang.ended("completed", lived + 0.1)
        elif draw(st.booleans()):
            gang.ended("node_lost", lived)
        else:
            gang.heartbeat(0, lived)
        events += gang.events
        t = gang.now + 100.0
    return events, thrown


@st.composite
def faulty_jobs(draw: st.DrawFn) -> tuple[list[Event], float]:
    """Random jobs whose generations end in every way there is, most of them within a step that
    never completes.

    Returns the events and the rank-seconds that completed steps in the final weights spent on their
    own work.
    """
    events = [plan_event(draw(st.floats(0.1, 500.0)), draw(st.sampled_from([None, 7.2, 2000.0])))]
    generations = draw(st.integers(1, 4))
    t = 1.0
    kept = 0
    parent = None
    useful = 0.0
    for number in range(1, generations + 1):
        ends: list[str | None] = [None, *EndReason, *(_PLANNED if number == generations else [])]
        reason = draw(st.sampled_from(ends))
        gang = GangLog(number, t, [[0, 1], [2]][: draw(st.integers(1, 2))], parent)
        gang.phase("startup", draw(_some_seconds))
        steps = draw(st.integers(0, 3))
        own = draw(_some_seconds)
        gang.steps(kept + 1, kept + steps, useful_step=own, data_wait=draw(_some_seconds))
        if reason == Outcome.COMPLETED:
            committed = steps
        else:
            committed = draw(st.integers(0, steps))
        useful += committed * own * len(gang.clock)
        if committed:
            gang.commit(kept + committed)
            parent = (kept + committed, number)
            kept = kept + committed
        # What the ranks were in when the end came
        for kind in draw(st.lists(_STEP_CLASSES, max_size=3)):
            gang.phase(kind, draw(st.floats(0.001, 90.0)))
        for rank in draw(st.sets(st.sampled_from(sorted(gang.clock)))):
            del gang.clock[rank]  # a rank that was killed says nothing of its last step
        for kind in draw(st.lists(_STEP_CLASSES, max_size=2)):
            gang.phase(kind, draw(st.floats(0.001, 90.0)))
        lived = max(event.t_mono for event in gang.events) - t + draw(_some_seconds)
        if reason in _PLANNED:
            gang.add(OUTCOME, t + lived, rank=0, outcome=reason, weights_sha256=None, message="")
        if reason is None:
            gang.heartbeat(0, lived)
        else:
            gang.ended(reason, lived)
        events += gang.events
        t += lived + 100.0
    return events, useful

"""Preemption handling, which turns a spot interruption notice or a signal into orders to all ranks
to save and exit.

A node's agent reports a notice to the coordinator, which orders the ranks of all nodes to exit.
Each agent writes the order to its ranks' `OrderRecord`, and the ranks agree at the next step sync
after which step they save and exit.

A notice that already exists when an agent starts was probably received by an earlier attempt on the
same machine. The agent then starts no ranks until the notice has expired. If the agent exited at
once instead, one attempt after another could end because of the same notice.
"""

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from ebbflow.core.events import NOTICE, NOTICE_SOURCES
from ebbflow.infra.notices import (
    LEAVE,
    REBALANCE,
    STALE_SECONDS,
    MetadataSource,
    MetaflowSource,
    Notice,
    NoticeSource,
    NoticeWatcher,
    RehearsalSource,
)
from ebbflow.training.launch.evidence import SLOW, WorkerFailure
from ebbflow.training.launch.logs import print_line
from ebbflow.training.launch.membership import Peers
from ebbflow.training.launch.messages import (
    RETURNED,
    SIGTERM,
    GangSpec,
    NewTerms,
    OrderRecord,
    RankOrder,
)
from ebbflow.training.launch.workers import WorkerGroup

_CAUSES = {
    NoticeSource.SIGNAL: "SIGTERM",
    NoticeSource.METADATA: "spot interruption notice",
    NoticeSource.METAFLOW: "Metaflow's notice of a spot interruption",
    NoticeSource.REHEARSAL: "rehearsed notice",
}
# After the deadline of an order to exit; ranks that are still alive then have failed
_GRACE_SECONDS = 30.0
_FIRST_LOOK_SECONDS = 2.0
_LOOK_SECONDS = 0.1
# Deadline for the coordinator's order after a report; then this node acts alone
_COORDINATOR_SECONDS = 1.0


class Drain:
    """Receiver of a node's notices and signals, which turns them into orders to the node's ranks.

    Not thread-safe.

    Use it only in the agent's main thread.
    """

    def __init__(self, spec: GangSpec) -> None:
        self._node = spec.node
        self._stop_seconds = spec.config.checkpoint.stop_seconds
        self._save_seconds = spec.config.checkpoint.deadline_seconds
        self._config = spec.config.survival
        folder = Path(spec.log_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.rehearsal_path = folder / f"notice-node-{spec.node}.json"
        self._watcher = NoticeWatcher(
            [
                MetadataSource(),
                MetaflowSource(Path(self._config.notice_file)),
                RehearsalSource(self.rehearsal_path),
            ]
        )
        self._signalled_at: float | None = None  # time.monotonic() of the first signal
        self._signal_taken = False  # whether the signal has become a notice
        self._watched: list[str] | None = None  # names of the sources, as last reported
        self._unsent: list[Notice] = []  # neither recorded as an event nor sent yet
        # Notices that this node received before its ranks start. The ranks start only after these
        # have expired.
        self._pending: list[Notice] = []
        self._waits = False  # whether new notices of this kind become pending too
        self._unrecorded: list[Notice] = []  # pending and not recorded as an event yet
        self._ordered: list[
            tuple[float, RankOrder]
        ] = []  # (time.monotonic() of arrival, order of the coordinator)
        self._own: RankOrder | None = None  # order for the first notice to this node
        self._gone: set[int] = set()  # nodes that were left out, whose notices no longer matter
        self._own_leave_at = self._leave_at = self._machine_ends_at = self._act_alone_at = float(
            "inf"
        )
        self._record: OrderRecord | None = None

    def on_signal(self) -> None:
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()

    @property
    def leaving(self) -> bool:
        """Whether this node must exit, because of its own notice or signal or because of an order
        to all nodes.
        """
        self._receive()
        return self._leave_at < float("inf")

    def find_pending(self, longest_seconds: float) -> RankOrder | None:
        """Return the order for a notice that must expire before this node's ranks start; None if
        they may start now.

        If the notice expires more than `longest_seconds` from now, the ranks may start, because
        they have time to train.
        """
        self._watcher.wait_for_first_poll(_FIRST_LOOK_SECONDS)
        self._waits = True
        self._receive()
        repeatable = [notice for notice in self._unsent if may_be_repeated(notice)]
        shortest_wait = min(map(seconds_until_expired, repeatable), default=float("inf"))
        if shortest_wait <= longest_seconds:
            soonest = self._take_pending()
            if soonest is not None:
                return RankOrder(
                    seconds=seconds_until_expired(soonest),
                    cause=_CAUSES[soonest.source],
                    node=self._node,
                )
        self._act_on_unsent()
        return None

    def _take_pending(self) -> Notice | None:
        """Add new notices to the pending ones, and drop expired ones.

        Return the earliest pending one; None if none.
        """
        taken = [notice for notice in self._unsent if may_be_repeated(notice)]
        self._unsent = [notice for notice in self._unsent if notice not in taken]
        self._unrecorded += taken
        expired = time.monotonic() - STALE_SECONDS
        self._pending = [notice for notice in self._pending + taken if notice.ends_at >= expired]
        return min(self._pending, key=lambda notice: notice.ends_at, default=None)

    def wait_out_notices(self, meanwhile: Callable[[float], str]) -> str:
        """Wait until all pending notices have expired.

        Return "" if the ranks may start, else the reason why not.

        `meanwhile` is called repeatedly with the remaining seconds. If it returns a non-empty text,
        the wait ends, and this text is the reason.
        """
        announced = False
        why = ""
        while not why:
            soonest = self._take_pending()
            if soonest is None:
                break
            going = f"this machine is going away in {soonest.seconds_left:.0f} s"
            if not announced:
                announced = True
                cause = _CAUSES[soonest.source]
                print_line(f"node {self._node}: {going} ({cause}): no rank is started before that")
            if any(notice.source is NoticeSource.SIGNAL for notice in self._unsent):
                stop_cause = "SIGTERM"
            else:
                stop_cause = meanwhile(seconds_until_expired(soonest))
            if stop_cause:
                why = f"{stop_cause}, and {going}"
            time.sleep(_LOOK_SECONDS)
            self._receive()
        if announced and not why:
            print_line(
                f"node {self._node}: the notice has expired and this machine is still there: "
                "starting"
            )
        self._take_pending()
        self._act_on_unsent()
        return why

    def _act_on_unsent(self) -> None:
        self._waits = False
        for notice in self._unsent:
            self._act_on_notice(notice)

    def forget_nodes(self, nodes: Collection[int]) -> None:
        """Drop orders to exit that need no action in the next generation.

        These are the orders of `nodes`, which do not take part in it, and the orders to make room
        for a returned node, which takes part in it.
        """
        self._gone |= set(nodes)
        self._ordered = [
            (came_at, order)
            for came_at, order in self._ordered
            if order.node not in self._gone and order.cause != RETURNED
        ]
        leave_at = [came_at + order.seconds for came_at, order in self._ordered if order.leave]
        self._leave_at = min([self._own_leave_at, *leave_at])

    def find_overstaying_ranks(self, group: WorkerGroup) -> list[WorkerFailure]:
        """Return a failure for each rank that is still alive 30 s after its deadline to exit."""
        if time.monotonic() <= self._leave_at + _GRACE_SECONDS:
            return []
        text = (
            f"asked to leave ({self.cause}) and still running {_GRACE_SECONDS:g} s after its "
            "deadline"
        )
        late = {
            "message": text,
            "hung": True,
            "certainty": SLOW,
            "node": self._node,
            "timestamp": time.time(),
        }
        alive = [worker for worker in group.workers if worker.process.poll() is None]
        return [
            WorkerFailure(rank=worker.rank, step=worker.beat.step, phase=worker.beat.phase, **late)
            for worker in alive
        ]

    @property
    def cause(self) -> str:
        first = next((order for _, order in self._ordered if order.leave), self._own)
        if first is None or first.cause in (SIGTERM, RETURNED):
            if first is None:
                return ""
            return first.cause
        return f"{first.cause} to node {first.node}"

    def create_order_record(self, folder: Path) -> Path:
        """Create the order record for ranks that are about to start, and return its path.

        It contains all orders to exit that still apply.
        """
        path = folder / f"node-{self._node}.control"
        self._record = OrderRecord.create(path)
        for came_at, order in self._ordered:
            if order.leave:
                self._record.write(
                    replace(order, seconds=came_at + order.seconds - time.monotonic())
                )
        return path

    def hand_over_terms(self, new: NewTerms) -> None:
        """Pass new cost terms on to this node's running ranks."""
        if self._record is not None:
            self._record.write_terms(new)

    def announce_end(self) -> None:
        if self._record is not None:
            self._record.announce_end()

    def forward_orders(self, peers: Peers, emit: Callable[..., object]) -> None:
        """Report new notices to the coordinator, and pass the coordinator's orders on to the ranks."""
        self._receive()
        self._report_sources(emit)
        for order in self.record_notices(emit):
            peers.order(order)
        for order in peers.orders():
            if order.node in self._gone:  # sent before its node was left out
                continue
            now = time.monotonic()
            self._ordered.append((now, order))
            if order.leave:
                self._leave_at = min(self._leave_at, now + order.seconds)
            if self._record is not None:
                self._record.write(order)
        now = time.monotonic()
        # The coordinator's order may be late: without an order, the ranks of this node could not
        # save in time.
        if self._own is not None and self._record is not None and now >= self._act_alone_at:
            self._record.write(replace(self._own, seconds=self._leave_at - now))
        if now >= self._machine_ends_at:  # a rehearsed notice ends the machine at its time
            os.kill(os.getpid(), signal.SIGKILL)

    def record_pending(self, emit: Callable[..., object]) -> None:
        """Record new pending notices as events.

        Call this without delay, since the machine may soon be lost.
        """
        while self._unrecorded:
            self._emit_notice(self._unrecorded.pop(0), None, emit, waits=True)

    def record_notices(self, emit: Callable[..., object]) -> list[RankOrder]:
        self.record_pending(emit)
        orders = [(notice, self._order_for(notice)) for notice in self._unsent]
        for notice, order in orders:
            self._emit_notice(notice, order, emit)
        self._unsent.clear()
        return [order for _, order in orders if order is not None]

    def close(self) -> None:
        self._watcher.close()

    def _receive(self) -> None:
        news = self._watcher.new_notices()
        at = self._signalled_at
        if at is not None and not self._signal_taken:
            self._signal_taken = True
            news.append(
                Notice(
                    source=NoticeSource.SIGNAL,
                    action=LEAVE,
                    heard_at=at,
                    ends_at=at + self._stop_seconds,
                )
            )
        for notice in news:
            self._unsent.append(notice)
            if not (self._waits and may_be_repeated(notice)):
                self._act_on_notice(notice)
            if notice.source is NoticeSource.REHEARSAL:
                self._machine_ends_at = min(self._machine_ends_at, notice.ends_at)

    def _act_on_notice(self, notice: Notice) -> None:
        order = self._order_for(notice)
        if order is not None and order.leave:
            now = time.monotonic()
            self._own_leave_at = min(self._own_leave_at, now + order.seconds)
            self._leave_at = min(self._leave_at, self._own_leave_at)
            self._own = self._own or order
            self._act_alone_at = min(self._act_alone_at, now + _COORDINATOR_SECONDS)

    def _order_for(self, notice: Notice) -> RankOrder | None:
        """Return the order for a notice; None for a rebalance recommendation that the configuration
        ignores.
        """
        if notice.action == REBALANCE:
            seconds = {"save": float("inf"), "leave": self._save_seconds}.get(
                self._config.on_rebalance
            )
            cause = "rebalance recommendation"
            if seconds is None:
                return None
            return RankOrder(seconds=seconds, cause=cause, node=self._node)
        if notice.source is NoticeSource.SIGNAL:
            margin = 0.0
        else:
            margin = self._config.notice_margin_seconds
        seconds = max(notice.seconds_left - margin, 0.0)
        return RankOrder(seconds=seconds, cause=_CAUSES[notice.source], node=self._node)

    def _emit_notice(
        self,
        notice: Notice,
        order: RankOrder | None,
        emit: Callable[..., object],
        *,
        waits: bool = False,
    ) -> None:
        if notice.ends_at == float("inf"):
            left = None
        else:
            left = round(notice.seconds_left, 3)
        if waits:
            does = "wait"
        elif order is None:
            does = "nothing"
        elif order.leave:
            does = "leave"
        else:
            does = "save"
        emit(
            NOTICE,
            at=(time.time() - (time.monotonic() - notice.heard_at), notice.heard_at),
            source=notice.source.value,
            action=notice.action,
            seconds_left=left,
            save_seconds=round(order.seconds, 3) if order is not None and order.leave else None,
            does=does,
            detail=notice.detail,
        )
        if not waits:
            if left is None:
                what = notice.action
            else:
                what = f"{notice.action}, {left:.0f} s left"
            print_line(
                f"node {self._node}: notice by {notice.source.value}: {what}; the gang is to {does}"
            )

    def _report_sources(self, emit: Callable[..., object]) -> None:
        for problem in self._watcher.problems():
            emit(NOTICE_SOURCES, problem=problem)
            print_line(f"node {self._node}: notices may be missed: {problem}")
        decided = self._watcher.source_problems()
        if decided is None:
            return
        absent = {name: why for name, why in decided.items() if why}
        watched = [name for name in decided if name not in absent]
        if watched == self._watched:
            return
        if self._watched is not None:
            gained = [name for name in watched if name not in self._watched]
            print_line(f"node {self._node}: notices are now received from: {', '.join(gained)}")
        self._watched = watched
        emit(NOTICE_SOURCES, watched=watched, absent=absent)


def may_be_repeated(notice: Notice) -> bool:
    """Return whether an earlier attempt on this machine may already have received this notice."""
    return notice.reclaims and notice.source is not NoticeSource.REHEARSAL


def seconds_until_expired(notice: Notice) -> float:
    return max(notice.ends_at + STALE_SECONDS - time.monotonic(), 0.0)

"""Preemption: a spot interruption notice or signal to one node becomes an order to all ranks to save and exit.

A node's agent reports a notice to the coordinator, which orders the ranks of all nodes to exit. Each agent writes the
order to its ranks' `OrderRecord`, and the ranks agree at the next step sync after which step they save and exit.

A notice that already exists when an agent starts was probably received by an earlier attempt on the same machine. The
agent then starts no ranks until the notice has expired. If it exited at once instead, one attempt after another could
end because of the same notice.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ebbflow.infra.config.schema import CheckpointConfig, SurvivalConfig
from ebbflow.infra.events import NOTICE, NOTICE_SOURCES
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
from ebbflow.training.launch.messages import GangSpec, OrderRecord, RankOrder
from ebbflow.training.launch.workers import WorkerGroup


def may_be_repeated(notice: Notice) -> bool:
    """Return whether an earlier attempt on this machine may have received this notice already."""
    return notice.reclaims and notice.source is not NoticeSource.REHEARSAL


def seconds_until_expired(notice: Notice) -> float:
    """Return the seconds until a notice has expired, which is STALE_SECONDS after the time that it announced."""
    return max(notice.ends_at + STALE_SECONDS - time.monotonic(), 0.0)


class PendingNotices:
    """Notices that this node received before its ranks start. The ranks start only after these notices have expired.

    Attributes:
        open: Whether the node is still waiting, so that new notices are added to these.
    """

    def __init__(self) -> None:
        self.open = False
        self._waiting: list[Notice] = []
        self._unrecorded: list[Notice] = []

    def take(self, notices: Sequence[Notice]) -> list[Notice]:
        """Add the notices that an earlier attempt may have received already, and return all others."""
        pending = [notice for notice in notices if may_be_repeated(notice)]
        self._waiting += pending
        self._unrecorded += pending
        return [notice for notice in notices if notice not in pending]

    @property
    def soonest(self) -> Notice | None:
        """The pending notice that takes effect first; None if all have expired."""
        expired = time.monotonic() - STALE_SECONDS
        self._waiting = [notice for notice in self._waiting if notice.ends_at >= expired]
        return min(self._waiting, key=lambda notice: notice.ends_at, default=None)

    def take_unrecorded(self) -> list[Notice]:
        """Return the pending notices that no earlier call has returned; they are to be recorded as events."""
        unrecorded, self._unrecorded = self._unrecorded, []
        return unrecorded


_CAUSES = {
    NoticeSource.SIGNAL: "SIGTERM",
    NoticeSource.METADATA: "spot interruption notice",
    NoticeSource.METAFLOW: "Metaflow's notice of a spot interruption",
    NoticeSource.REHEARSAL: "rehearsed notice",
}
_GRACE_SECONDS = 30.0  # after the deadline of an order to exit; ranks that are still alive then have failed
_FIRST_LOOK_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_COORDINATOR_SECONDS = 1.0  # for the coordinator's order after a report; afterwards this node acts alone


class OrderChannel(Protocol):
    """Sender and receiver of orders between nodes; `ebbflow.training.launch.membership.Peers` implements it."""

    def order(self, order: RankOrder) -> None: ...
    def orders(self) -> list[RankOrder]: ...


class Drain:
    """Converter of one node's notices and signals into orders to its ranks, over all generations.

    Only the agent's main thread may use it.
    """

    def __init__(self, spec: GangSpec) -> None:
        self._node = spec.node
        self._stop_seconds = CheckpointConfig(**spec.config["checkpoint"]).stop_seconds
        self._save_seconds = CheckpointConfig(**spec.config["checkpoint"]).deadline_seconds
        self._config = SurvivalConfig(**spec.config.get("survival", {}))
        folder = Path(spec.log_folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.rehearsal_path = folder / f"notice-node-{spec.node}.json"
        self._watcher = NoticeWatcher(
            [MetadataSource(), MetaflowSource(Path(self._config.notice_file)), RehearsalSource(self.rehearsal_path)]
        )
        self._signalled_at: float | None = None
        self._sources_reported = False
        self._unsent: list[Notice] = []  # neither recorded as an event nor sent yet
        self._pending = PendingNotices()
        self._ordered: list[tuple[float, RankOrder]] = []  # (time.monotonic() of arrival, order of the coordinator)
        self._own: RankOrder | None = None  # order for the first notice to this node
        self._gone: set[int] = set()  # nodes that were left out, whose notices no longer matter
        self._own_leave_at = self._leave_at = self._machine_ends_at = self._act_alone_at = float("inf")
        self._record: OrderRecord | None = None

    def on_signal(self) -> None:
        """Record a SIGTERM or Ctrl-C. Safe in a signal handler."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()

    @property
    def leaving(self) -> bool:
        """Whether this node must exit, because of its own notice or signal or by an order to all nodes."""
        self._receive()
        return self._leave_at < float("inf")

    def find_pending(self, longest_seconds: float) -> RankOrder | None:
        """Look for a notice that must expire before this node starts its ranks.

        Args:
            longest_seconds: Longest wait. A notice that expires later leaves enough time for training, so the ranks
                start at once.

        Returns:
            Order with the seconds to wait and the notice's cause; None if the ranks may start.
        """
        self._watcher.wait_for_first_poll(_FIRST_LOOK_SECONDS)
        self._pending.open = True
        self._receive()
        waits = [seconds_until_expired(one) for one in self._unsent if may_be_repeated(one)]
        if min(waits, default=float("inf")) <= longest_seconds:
            self._unsent = self._pending.take(self._unsent)
            if (soonest := self._pending.soonest) is not None:
                return RankOrder(seconds=seconds_until_expired(soonest), cause=_CAUSES[soonest.source], node=self._node)
        self._act_on_pending()
        return None

    def wait_out_notices(self, meanwhile: Callable[[float], str]) -> str:
        """Wait until all pending notices have expired, including those that arrive during the wait.

        Args:
            meanwhile: Called repeatedly with the seconds that remain. If it returns a text, the wait ends for that
                reason.

        Returns:
            "" if this node's ranks may start, else the reason why not.
        """
        announced, why = False, ""
        while not why and (soonest := self._pending.soonest) is not None:
            going = f"this machine is going away in {soonest.seconds_left:.0f} s"
            if not announced:
                announced = True
                cause = _CAUSES[soonest.source]
                print_line(f"node {self._node}: {going} ({cause}): no rank is started before that")
            signalled = any(one.source is NoticeSource.SIGNAL for one in self._unsent)
            if why := "SIGTERM" if signalled else meanwhile(seconds_until_expired(soonest)):
                why += f", and {going}"
            time.sleep(_LOOK_SECONDS)
            self._receive()
            self._unsent = self._pending.take(self._unsent)
        if announced and not why:
            print_line(f"node {self._node}: the notice has expired and this machine is still there: starting")
        self._act_on_pending()
        return why

    def _act_on_pending(self) -> None:
        """Act on the notices that were received during the wait; from now on act on new notices at once."""
        self._pending.open = False
        for notice in self._unsent:
            self._act_on_notice(notice)

    def forget_nodes(self, nodes: Collection[int]) -> None:
        """Drop the orders that nodes outside of the next generation caused.

        Args:
            nodes: Nodes that were left out, by their numbers in `GangSpec.node`.
        """
        self._gone |= set(nodes)
        self._ordered = [(came_at, order) for came_at, order in self._ordered if order.node not in self._gone]
        leave_at = [came_at + order.seconds for came_at, order in self._ordered if order.leave]
        self._leave_at = min([self._own_leave_at, *leave_at])

    def find_overstaying_ranks(self, group: WorkerGroup) -> list[WorkerFailure]:
        """Return a failure for each rank that is still alive 30 s after the deadline by which it had to exit."""
        if time.monotonic() <= self._leave_at + _GRACE_SECONDS:
            return []
        text = f"asked to leave ({self.cause}) and still running {_GRACE_SECONDS:g} s after its deadline"
        return [
            WorkerFailure(rank=worker.rank, message=text, hung=True, certainty=SLOW, node=self._node,
                          step=worker.beat.step, phase=worker.beat.phase, timestamp=time.time())
            for worker in group.workers
            if worker.process.poll() is None
        ]  # fmt: skip

    @property
    def cause(self) -> str:
        """Cause of the first order to exit, for messages; "" without such an order."""
        first = next((order for _, order in self._ordered if order.leave), self._own)
        if first is None or first.cause == "SIGTERM":
            return "" if first is None else first.cause
        return f"{first.cause} to node {first.node}"

    def create_order_record(self, folder: Path) -> Path:
        """Create the order record for ranks that are about to start, with all orders to exit; return its path."""
        path = folder / f"node-{self._node}.control"
        self._record = OrderRecord.create(path)
        for came_at, order in self._ordered:
            if order.leave:
                self._record.write(replace(order, seconds=came_at + order.seconds - time.monotonic()))
        return path

    def forward_orders(self, channel: OrderChannel, emit: Callable[..., object]) -> None:
        """Report new notices to the coordinator, and pass the coordinator's orders on to the ranks."""
        self._receive()
        self._report_sources(emit)
        for order in self.record_notices(emit):
            channel.order(order)
        for order in channel.orders():
            if order.node in self._gone:  # sent before its node was left out
                continue
            now = time.monotonic()
            self._ordered.append((now, order))
            if order.leave:
                self._leave_at = min(self._leave_at, now + order.seconds)
            if self._record is not None:
                self._record.write(order)
        self._order_without_coordinator()
        if time.monotonic() >= self._machine_ends_at:  # a rehearsed notice ends the machine at its time
            os.kill(os.getpid(), signal.SIGKILL)

    def record_pending(self, emit: Callable[..., object]) -> None:
        """Record new pending notices as events, without delay, since the machine may soon be lost."""
        for notice in self._pending.take_unrecorded():
            self._emit_notice(notice, None, emit, waits=True)

    def record_notices(self, emit: Callable[..., object]) -> list[RankOrder]:
        """Record new notices as events, and return the orders for them."""
        orders = []
        self.record_pending(emit)
        for notice in self._unsent:
            order = self._order_for(notice)
            self._emit_notice(notice, order, emit)
            orders += [] if order is None else [order]
        self._unsent.clear()
        return orders

    def close(self) -> None:
        self._watcher.close()

    def _receive(self) -> None:
        news = self._watcher.new_notices()
        if self._signalled_at is not None and self._signalled_at >= 0:
            at, self._signalled_at = self._signalled_at, -1.0
            news.append(Notice(source=NoticeSource.SIGNAL, action=LEAVE, heard_at=at, ends_at=at + self._stop_seconds))
        for notice in news:
            self._unsent.append(notice)
            if not (self._pending.open and may_be_repeated(notice)):
                self._act_on_notice(notice)
            if notice.source is NoticeSource.REHEARSAL:
                self._machine_ends_at = min(self._machine_ends_at, notice.ends_at)

    def _act_on_notice(self, notice: Notice) -> None:
        order = self._order_for(notice)
        if order is not None and order.leave:
            now = time.monotonic()
            self._own_leave_at = min(self._own_leave_at, now + order.seconds)
            self._leave_at = min(self._leave_at, self._own_leave_at)
            self._own, self._act_alone_at = self._own or order, min(self._act_alone_at, now + _COORDINATOR_SECONDS)

    def _order_without_coordinator(self) -> None:
        """Order this node's ranks to exit if the coordinator has not done so in time, so that they can still save."""
        now = time.monotonic()
        if self._own is not None and self._record is not None and now >= self._act_alone_at:
            self._record.write(replace(self._own, seconds=self._leave_at - now))

    def _order_for(self, notice: Notice) -> RankOrder | None:
        """Return the order for a notice; None if the configuration ignores rebalance recommendations."""
        if notice.action == REBALANCE:
            seconds = {"save": float("inf"), "leave": self._save_seconds}.get(self._config.on_rebalance)
            cause = "rebalance recommendation"
            return None if seconds is None else RankOrder(seconds=seconds, cause=cause, node=self._node)
        margin = 0.0 if notice.source is NoticeSource.SIGNAL else self._config.notice_margin_seconds
        seconds = max(notice.seconds_left - margin, 0.0)
        return RankOrder(seconds=seconds, cause=_CAUSES[notice.source], node=self._node)

    def _emit_notice(
        self, notice: Notice, order: RankOrder | None, emit: Callable[..., object], *, waits: bool = False
    ) -> None:
        left = None if notice.ends_at == float("inf") else round(notice.seconds_left, 3)
        does = "wait" if waits else "nothing" if order is None else "leave" if order.leave else "save"
        now = time.monotonic()
        emit(
            NOTICE,
            at=(time.time() - (now - notice.heard_at), notice.heard_at),
            source=notice.source.value,
            action=notice.action,
            seconds_left=left,
            save_seconds=round(order.seconds, 3) if order is not None and order.leave else None,
            does=does,
            detail=notice.detail,
        )
        if waits:
            return
        time_left = "" if left is None else f", {left:.0f} s left"
        print_line(
            f"node {self._node}: notice by {notice.source.value}: {notice.action}{time_left}; the gang is to {does}"
        )

    def _report_sources(self, emit: Callable[..., object]) -> None:
        for problem in self._watcher.problems():
            emit(NOTICE_SOURCES, problem=problem)
            print_line(f"node {self._node}: notices may be missed: {problem}")
        if not self._sources_reported and (decided := self._watcher.source_problems()) is not None:
            self._sources_reported = True
            emit(NOTICE_SOURCES, watched=[name for name, absent in decided.items() if not absent], absent={
                name: absent for name, absent in decided.items() if absent
            })  # fmt: skip
            if "hop limit" in (absent := decided.get(NoticeSource.METADATA, "")):
                print_line(f"node {self._node}: spot interruption notices cannot be received: {absent}")

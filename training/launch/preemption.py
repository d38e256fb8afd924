"""Preemption: from a spot interruption notice to the order that all ranks leave after the same step.

To leave for one at once would take attempt after attempt for the same notice, and what starts now would hardly begin to
train. Whatever goes with the machine then goes with this one attempt.

Whoever hears that a machine goes tells the lead, and the lead tells all nodes. Each agent writes the order into the
record of its ranks (`ebbflow.training.launch.messages`), and through the step sync all ranks leave after the same step.
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
    """One that an attempt before this one may have heard already, of the same machine; a rehearsal is heard once."""
    return notice.reclaims and notice.source is not NoticeSource.REHEARSAL


def seconds_until_expired(notice: Notice) -> float:
    """Until it counts no more, if the machine is still there."""
    return max(notice.ends_at + STALE_SECONDS - time.monotonic(), 0.0)


class PendingNotices:
    """One node's. open: from the first look at the sources until what stands is over, or is left for after all."""

    def __init__(self) -> None:
        self.open = False
        self._waiting: list[Notice] = []
        self._unrecorded: list[Notice] = []

    def take(self, heard: Sequence[Notice]) -> list[Notice]:
        """What of `heard` stands is waited out from now on; returns the rest."""
        fresh = [one for one in heard if may_be_repeated(one)]
        self._waiting += fresh
        self._unrecorded += fresh
        return [one for one in heard if one not in fresh]

    @property
    def soonest(self) -> Notice | None:
        """Whose time comes first; None: nothing is waited out any more."""
        over = time.monotonic() - STALE_SECONDS
        self._waiting = [one for one in self._waiting if one.ends_at >= over]
        return min(self._waiting, key=lambda one: one.ends_at, default=None)

    def take_unrecorded(self) -> list[Notice]:
        """Those that no event tells of yet; each is handed out once."""
        fresh, self._unrecorded = self._unrecorded, []
        return fresh


_CAUSES = {
    NoticeSource.SIGNAL: "SIGTERM",
    NoticeSource.METADATA: "spot interruption notice",
    NoticeSource.METAFLOW: "Metaflow's notice of a spot interruption",
    NoticeSource.REHEARSAL: "rehearsed notice",
}
# Past the time that was given the machine is gone, or whoever sent SIGTERM has killed the process; where neither
# happens the agent does not wait for its ranks without end.
_GRACE_SECONDS = 30.0
_FIRST_LOOK_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_ECHO_SECONDS = 1.0  # for the lead to order what it was told; then this node's ranks are told all the same


class OrderChannel(Protocol):
    """Of the other nodes, what concerns orders (`ebbflow.training.launch.membership`)."""

    def order(self, order: RankOrder) -> None: ...
    def orders(self) -> list[RankOrder]: ...


class Drain:
    """One per agent, over all its generations. To be used by the agent's main thread."""

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
        self._unsent: list[Notice] = []  # heard, and neither recorded as an event nor sent yet
        self._standing = PendingNotices()
        self._ordered: list[tuple[float, RankOrder]] = []  # (time.monotonic() when it came, what the lead has ordered)
        self._own: RankOrder | None = None  # the first that came of a notice to this node
        self._gone: set[int] = set()  # nodes that were left out: their notices concern nobody any more
        self._own_leave_at = self._leave_at = self._machine_ends_at = self._echo_by = float("inf")
        self._control: OrderRecord | None = None

    def on_signal(self) -> None:
        """SIGTERM or Ctrl-C came. Does nothing that a signal handler may not."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()

    @property
    def leaving(self) -> bool:
        """Whether this node, or by the lead's order the whole gang, is to leave: nothing new is to be begun."""
        self._receive()
        return self._leave_at < float("inf")

    def standing(self, longest_seconds: float) -> RankOrder | None:
        """Before anything is begun: for how long a notice that stands already is to be waited out, and why.

        One that leaves time to train, so that the wait would be longer than `longest_seconds`, is heard as any other.
        None: there is nothing to be waited out.
        """
        self._watcher.wait_for_first_poll(_FIRST_LOOK_SECONDS)
        self._standing.open = True
        self._receive()
        if (
            min([seconds_until_expired(one) for one in self._unsent if may_be_repeated(one)], default=float("inf"))
            <= longest_seconds
        ):
            self._unsent = self._standing.take(self._unsent)
            if (soonest := self._standing.soonest) is not None:
                return RankOrder(seconds=seconds_until_expired(soonest), cause=_CAUSES[soonest.source], node=self._node)
        self._act_on_pending()
        return None

    def wait_out_notices(self, meanwhile: Callable[[float], str]) -> str:
        """Wait out what `standing` has found, and what comes to stand meanwhile; after that it counts no more.

        meanwhile: called all along with the seconds that are left; what it returns, if anything, is why to end it.
        Returns "" where the gang may start here, else why not: this process is to end before that time.
        """
        told = why = ""
        while not why and (soonest := self._standing.soonest) is not None:
            going = f"this machine is going away in {soonest.seconds_left:.0f} s"
            if not told:
                told = f"node {self._node}: {going} ({_CAUSES[soonest.source]}): no rank is started before that"
                print_line(told)
            signalled = any(one.source is NoticeSource.SIGNAL for one in self._unsent)
            if why := "SIGTERM" if signalled else meanwhile(seconds_until_expired(soonest)):
                why += f", and {going}"
            time.sleep(_LOOK_SECONDS)
            self._receive()
            self._unsent = self._standing.take(self._unsent)
        if told and not why:
            print_line(f"node {self._node}: the notice's time has passed and this machine is still there: it starts")
        self._act_on_pending()
        return why

    def _act_on_pending(self) -> None:
        """From now on a notice means to leave, those that were heard and not waited out among them."""
        self._standing.open = False
        for notice in self._unsent:
            self._act_on_notice(notice)

    def forget_nodes(self, nodes: Collection[int]) -> None:
        """Those nodes have left, by the numbers that they joined with, and the others go on: nobody else leaves for
        what was ordered because of them."""
        self._gone |= set(nodes)
        self._ordered = [(came_at, order) for came_at, order in self._ordered if order.node not in self._gone]
        leave_at = [came_at + order.seconds for came_at, order in self._ordered if order.leave]
        self._leave_at = min([self._own_leave_at, *leave_at])

    def find_overstaying_ranks(self, group: WorkerGroup) -> list[WorkerFailure]:
        """Ranks of this node that were told to leave and are still there long after their time: that wait ends too."""
        if time.monotonic() <= self._leave_at + _GRACE_SECONDS:
            return []
        text = f"told to leave ({self.cause}) and still here {_GRACE_SECONDS:g} s after its time"
        return [
            WorkerFailure(rank=worker.rank, message=text, hung=True, certainty=SLOW, node=self._node,
                          step=worker.beat.step, phase=worker.beat.phase, timestamp=time.time())
            for worker in group.workers
            if worker.process.poll() is None
        ]  # fmt: skip

    @property
    def cause(self) -> str:
        """Why, for people."""
        first = next((order for _, order in self._ordered if order.leave), self._own)
        if first is None or first.cause == "SIGTERM":
            return "" if first is None else first.cause
        return f"{first.cause} to node {first.node}"

    def create_order_record(self, folder: Path) -> Path:
        """The record of the ranks that are about to be started; what was ordered before holds for them too."""
        path = folder / f"node-{self._node}.control"
        self._control = OrderRecord.create(path)
        for came_at, order in self._ordered:
            if order.leave:
                self._control.tell(replace(order, seconds=came_at + order.seconds - time.monotonic()))
        return path

    def forward_orders(self, post: OrderChannel, emit: Callable[..., object]) -> None:
        """What the agent's loop calls: tell the lead what was heard here, and the ranks what the lead has ordered."""
        self._receive()
        self._report_sources(emit)
        for order in self.record(emit):
            post.order(order)
        for order in post.orders():
            if order.node in self._gone:  # it came in one breath with the news that they have left
                continue
            now = time.monotonic()
            self._ordered.append((now, order))
            if order.leave:
                self._leave_at = min(self._leave_at, now + order.seconds)
            if self._control is not None:
                self._control.tell(order)
        self._order_without_coordinator()
        if time.monotonic() >= self._machine_ends_at:  # a rehearsal takes the machine when it said so
            os.kill(os.getpid(), signal.SIGKILL)

    def record_pending(self, emit: Callable[..., object]) -> None:
        """Write down what is waited out, at once: of a machine that goes meanwhile nothing is written later."""
        for notice in self._standing.take_unrecorded():
            self._write(notice, None, emit, waits=True)

    def record(self, emit: Callable[..., object]) -> list[RankOrder]:
        """Write down what was heard and not yet told; what is to be done about it."""
        orders = []
        self.record_pending(emit)
        for notice in self._unsent:
            order = self._order(notice)
            self._write(notice, order, emit)
            orders += [] if order is None else [order]
        self._unsent.clear()
        return orders

    def close(self) -> None:
        self._watcher.close()

    def _receive(self) -> None:
        """Also where there is nobody yet to be told."""
        news = self._watcher.new_notices()
        if self._signalled_at is not None and self._signalled_at >= 0:
            at, self._signalled_at = self._signalled_at, -1.0
            news.append(Notice(source=NoticeSource.SIGNAL, action=LEAVE, heard_at=at, ends_at=at + self._stop_seconds))
        for notice in news:
            self._unsent.append(notice)
            if not (self._standing.open and may_be_repeated(notice)):
                self._act_on_notice(notice)
            if notice.source is NoticeSource.REHEARSAL:
                self._machine_ends_at = min(self._machine_ends_at, notice.ends_at)

    def _act_on_notice(self, notice: Notice) -> None:
        order = self._order(notice)
        if order is not None and order.leave:
            now = time.monotonic()
            self._own_leave_at = min(self._own_leave_at, now + order.seconds)
            self._leave_at = min(self._leave_at, self._own_leave_at)
            self._own, self._echo_by = self._own or order, min(self._echo_by, now + _ECHO_SECONDS)

    def _order_without_coordinator(self) -> None:
        """A lead that is frozen or gone must not cost the last save: the step sync tells the other nodes' ranks."""
        now = time.monotonic()
        if self._own is not None and self._control is not None and now >= self._echo_by:
            self._control.tell(replace(self._own, seconds=self._leave_at - now))

    def _order(self, notice: Notice) -> RankOrder | None:
        """What is to be done about it, now; None: nothing."""
        if notice.action == REBALANCE:
            seconds = {"save": float("inf"), "leave": self._save_seconds}.get(self._config.on_rebalance)
            cause = "rebalance recommendation"
            return None if seconds is None else RankOrder(seconds=seconds, cause=cause, node=self._node)
        margin = 0.0 if notice.source is NoticeSource.SIGNAL else self._config.notice_margin_seconds
        seconds = max(notice.seconds_left - margin, 0.0)
        return RankOrder(seconds=seconds, cause=_CAUSES[notice.source], node=self._node)

    def _write(
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
        if waits:  # it was said when it was heard
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
                print_line(f"node {self._node}: spot notices will not be heard: {absent}")

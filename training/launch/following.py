"""Any other node's agent: it joins node 0 and does what node 0 says, from the roll-call to the gang's last word."""

from __future__ import annotations

from dataclasses import replace

from ebbflow.training.errors import GangError
from ebbflow.training.launch.control import Order
from ebbflow.training.launch.leading import REGROUP_SECONDS
from ebbflow.training.launch.member import Member
from ebbflow.training.launch.own_node import OwnNode
from ebbflow.training.launch.verdict import Start, Verdict, left_out, told_to_leave


def follow(own: OwnNode) -> Verdict:
    """The gang's last word. Raises GangError where node 0 cannot be found."""
    standing = own.standing()
    try:
        member = Member(
            own.spec,
            own.host,
            own.start_seconds,
            own.told_to_leave,
            secret=own.fetch_secret,
            standing=standing,
            opened=lambda number: own.log.open(own.spec, number),
        )
    except GangError:
        if own.drain.leaving:
            return told_to_leave(own.drain.cause)
        raise
    last = own.stopped()
    try:
        if standing is not None and (word := _outlive(own, member, standing)) is not None:
            last = word
            return word
        word = member.await_start(own.start_seconds)
        while isinstance(word, Start):
            spec = own.in_place(word.nodes)
            own.log.open(spec, word.generation, left_for=last.reason)
            last = own.stopped()
            last = own.run_ranks(spec, word, member)
            if not last.again:
                return last
            if own.spec.node in last.left_out:
                return (last := left_out(last, own.drain.cause))
            own.drain.settle(last.left_out)
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


def _outlive(own: OwnNode, member: Member, standing: Order) -> Verdict | None:
    """The last word where there is one before this node can start."""
    heard: list[Verdict] = []

    def meanwhile(seconds: float) -> str:
        if (verdict := member.stands_by(replace(standing, seconds=seconds))) is not None:
            heard.append(verdict)
        return heard[0].culprit if heard else ""

    if why := own.outlive(meanwhile):
        return heard[0] if heard else told_to_leave(why)
    member.can_start()
    return None

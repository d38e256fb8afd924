"""Faults by signal: a process is ended or frozen from outside, at any moment of a step."""

from __future__ import annotations

import os
import signal

from benchmarks.chaos.fault import Aim, Fault, Means, Symptom
from benchmarks.chaos.orders import Strike
from benchmarks.chaos.scene import Scene
from ebbflow.core.events import EndReason
from ebbflow.training.launch.heartbeat import HeartbeatReading

_AGAIN = "the gang restarts from the newest commit"
_ELSEWHERE = "a new attempt, on another node"


def _step(beats: dict[int, HeartbeatReading], rank: int) -> int:
    if rank in beats:
        return beats[rank].step
    return -1


def _send(scene: Scene, pid: int, number: signal.Signals, rank: int) -> Strike:
    step = _step(scene.beats(), rank)
    os.kill(pid, number)
    return Strike.now(step=step, pid=pid)


def _kill_rank(scene: Scene, aim: Aim) -> Strike:
    return _send(scene, scene.rank_pid(aim.rank), signal.SIGKILL, aim.rank)


def _abort_rank(scene: Scene, aim: Aim) -> Strike:
    return _send(scene, scene.rank_pid(aim.rank), signal.SIGSEGV, aim.rank)


def _stop_rank(scene: Scene, aim: Aim) -> Strike:
    return _send(scene, scene.rank_pid(aim.rank), signal.SIGSTOP, aim.rank)


def _kill_agent(scene: Scene, aim: Aim) -> Strike:
    return _send(scene, scene.agent_pid(aim.node), signal.SIGKILL, aim.rank)


def _kill_uploader(scene: Scene, aim: Aim) -> Strike:
    return _send(scene, scene.uploader_pid(aim.rank), signal.SIGKILL, aim.rank)


SIGNALS = (
    Fault(
        kind="rank-kill",
        means=Means.SIGNAL,
        what="SIGKILL to a rank",
        inject=_kill_rank,
        action=_AGAIN,
        reasons=(EndReason.RANK_KILLED,),
    ),
    Fault(
        kind="rank-crash",
        means=Means.SIGNAL,
        what="SIGSEGV to a rank",
        inject=_abort_rank,
        action=_AGAIN,
        reasons=(EndReason.RANK_KILLED,),
    ),
    Fault(
        kind="rank-stop",
        means=Means.SIGNAL,
        what="SIGSTOP to a rank",
        inject=_stop_rank,
        action=_AGAIN,
        reasons=(EndReason.HANG,),
        where="",
    ),
    Fault(
        kind="agent-kill",
        means=Means.SIGNAL,
        what="SIGKILL to a node's agent, which takes its ranks along",
        inject=_kill_agent,
        action=_ELSEWHERE,
        reasons=(EndReason.NODE_LOST,),
        node_is_guilty=True,
        nodes=(1,),
    ),
    Fault(
        kind="uploader-kill",
        means=Means.SIGNAL,
        what="SIGKILL to a rank's uploader",
        inject=_kill_uploader,
        action="the save begins again in a new uploader; training goes on",
        symptom=Symptom.NOTHING,
    ),
)

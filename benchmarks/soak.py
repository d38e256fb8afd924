"""`ebbflow soak`: a job under random kills ends with the weights of an uninterrupted one, bit for bit.

The seed draws the victims: a rank, its uploader, a node's agent, or everything at once, each by
SIGKILL at a random moment. The schedule is printed, so that a failing seed can be run again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.process import children
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.training.data import prepare_tokens
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangOutcome, GangSpec

_VICTIMS = ("rank", "uploader", "agent", "everything")
_TIMEOUT_SECONDS = 600.0
_STEPS_PER_KILL = 200  # so that the job outlasts its kills
_CONFIG = {
    "model": {"hidden_size": 64, "num_layers": 2, "sequence_length": 64},
    "checkpoint": {"interval_steps": 10},
    "data": {"held_out_samples": 16},
}


@dataclass
class Tally:
    """The starts of a soaked job, and its kills by victim."""

    starts: int = 0
    kills: dict[str, int] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Return 0 if the soaked job ends like the uninterrupted one, else 1."""
    parser = argparse.ArgumentParser(
        prog="ebbflow soak", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--kills", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default 0)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ebbflow-soak-") as folder:
        spec = _spec(Path(folder), given.kills)
        uninterrupted, _ = _run(spec("uninterrupted"), Path(folder), kills=0, seed=given.seed)
        print(
            f"uninterrupted job: step {uninterrupted.step}, weights {uninterrupted.weights_sha256}",
            flush=True,
        )
        soaked, tally = _run(spec("soaked"), Path(folder), kills=given.kills, seed=given.seed)
    same = (
        soaked.weights_sha256 == uninterrupted.weights_sha256 and soaked.step == uninterrupted.step
    )
    kills = (
        ", ".join(f"{count} × {victim}" for victim, count in sorted(tally.kills.items())) or "none"
    )
    print(
        f"soaked job: step {soaked.step}, weights {soaked.weights_sha256}, {tally.starts} "
        f"starts, killed: {kills}"
    )
    print("equal, bit for bit" if same else f"DIFFERENT: run again with --seed {given.seed}")
    if same:
        return 0
    return 1


def _spec(folder: Path, kills: int) -> Callable[[str], GangSpec]:
    """Specs of jobs that share one store in `folder`, by job name."""
    steps = _STEPS_PER_KILL * max(kills, 2)
    training = {"batch_size": 16, "max_steps": steps, "evaluation_interval_steps": steps // 2}
    config = RunConfig(store=str(folder / "store"), training=training, **_CONFIG)
    store = Store.open(config.store)
    tokens = prepare_tokens(config.data, store, project_root=PROJECT_ROOT)
    return lambda job: GangSpec(
        job=job,
        run=job,
        attempt=0,
        node=0,
        nodes=2,
        processes_per_node=1,
        main_address="127.0.0.1",
        config=config,
        store_uri=config.store,
        prepared=tokens.to_json(),
        log_folder=str(folder / job / "logs"),
    )


def _run(spec: GangSpec, folder: Path, *, kills: int, seed: int) -> tuple[GangOutcome, Tally]:
    """Start the gang again until it ends by itself, killed again and again while kills are left."""
    chance = random.Random(seed)
    tally = Tally()
    while True:
        gang = LocalGang(
            replace(spec, attempt=tally.starts),
            folder / spec.job / f"start-{tally.starts}",
            folder / f"{spec.job}.log",
        )
        tally.starts += 1
        _torment(gang, tally, kills, chance)
        try:
            return gang.wait(_TIMEOUT_SECONDS), tally
        except GangError as error:
            if sum(tally.kills.values()) == 0 or tally.starts > 3 * kills + 3:
                raise
            print(f"start {tally.starts}: {str(error).splitlines()[0]}", flush=True)


def _torment(gang: LocalGang, tally: Tally, kills: int, chance: random.Random) -> None:
    """Kill until none are left to do or the gang has ended.

    A lost uploader ends no gang: training goes on.
    """
    while sum(tally.kills.values()) < kills and not _ended(gang):
        victim = chance.choice(_VICTIMS)
        after_seconds = chance.uniform(0.5, 12.0)
        if _kill(gang, victim, after_seconds, chance):
            tally.kills[victim] = tally.kills.get(victim, 0) + 1
            print(f"start {tally.starts}: {victim} killed after {after_seconds:.1f} s", flush=True)


def _ended(gang: LocalGang) -> bool:
    return all(agent.poll() is not None for agent in gang.agents)


def _kill(gang: LocalGang, victim: str, after_seconds: float, chance: random.Random) -> bool:
    """Whether there was such a victim. A gang that ends first is let go."""
    limit = time.monotonic() + after_seconds
    while time.monotonic() < limit:
        if _ended(gang):
            return False
        time.sleep(0.02)
    agents = [agent.pid for agent in gang.agents if agent.poll() is None]
    ranks = _children_of(_children_of(_children_of(agents)))  # of keepers, of standbys
    uploaders = _children_of(ranks)
    candidates = {"rank": ranks, "uploader": uploaders, "agent": agents, "everything": agents}[
        victim
    ]
    if not candidates:
        return False
    for pid in candidates if victim == "everything" else [chance.choice(candidates)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return True


def _children_of(pids: list[int]) -> list[int]:
    found: list[int] = []
    for pid in pids:
        found += children(pid)
    return found

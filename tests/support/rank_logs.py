"""Logs of ranks as agents leave them, made without any process."""

from __future__ import annotations

from pathlib import Path

from ebbflow.core.rank_logs import read_logs
from ebbflow.training.launch.heartbeat import HeartbeatReading
from ebbflow.training.launch.logs import RankLog


def beat(step: int, phase: str = "forward") -> HeartbeatReading:
    return HeartbeatReading(pid=1, step=step, phase=phase, t_mono=0.0)


def rank_log(
    folder: Path,
    rank: int = 0,
    *,
    generation: int = 1,
    limit_bytes: int = 64 * 2**20,
    tail_bytes: int | None = None,
) -> tuple[RankLog, Path]:
    raw = folder / "logs" / f"{generation:06d}-ab" / f"rank-{rank}.log"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.touch()
    place = {"job": "job", "generation": generation, "node": rank // 2, "rank": rank}
    return RankLog(raw, **place, limit_bytes=limit_bytes, tail_bytes=tail_bytes), raw


def write(raw: Path, data: bytes) -> None:
    with open(raw, "ab") as file:
        file.write(data)


def texts(folder: Path) -> list[str]:
    return [line.text for line in read_logs([folder], []).lines]


def three_ranks(folder: Path) -> None:
    """Two generations, of steps 10 to 12 and 10 to 20; each rank prints a line per step."""
    for generation, last in ((1, 12), (2, 20)):
        logs = [rank_log(folder, rank, generation=generation) for rank in range(3)]
        for step in range(10, last + 1):
            for rank, (log, raw) in enumerate(logs):
                write(raw, f"g{generation} r{rank} s{step}\n".encode())
                log.follow(beat(step))

"""A rank of a gang on one machine: private_rank.py KEYS_PATH READY. Joins, tells that it is there,
and leaves when READY is deleted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from ebbflow.training.gang import connect, disconnect


def main(keys_path: str, ready: str) -> None:
    gang = connect(
        start_seconds=60.0,
        collective_seconds=60.0,
        generation="000001-aaaa",
        device_choice="cpu",
        keys_path=Path(keys_path),
    )
    rows = gang.gather(torch.tensor([gang.rank]))
    assert rows.flatten().tolist() == list(range(gang.world_size))
    assert gang.store is not None
    gang.store.set(f"there/{gang.rank}", "yes")
    gang.store.wait([f"there/{rank}" for rank in range(gang.world_size)])
    mark = Path(ready)
    if gang.rank == 0:
        mark.touch()
    while gang.rank == 0 and mark.exists():
        time.sleep(0.02)
    gang.gather(torch.tensor([gang.rank]))
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])

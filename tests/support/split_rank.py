"""One of 16 ranks whose process group talks to nobody:
`python -m tests.support.split_rank CONFIGS.json OUT`.

It spreads the model of each configuration and saves which parts it holds, and which a commit gets
from it. Torch caches a mesh's coordinates in a process, so that one process cannot play several
ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.checkpoint.boxes import own_boxes
from ebbflow.training.checkpoint.save_plan import assign_shards
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.gang import Gang, leave
from tests.support.spread_rank import ModelOnly


def main() -> None:
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    gang = Gang(rank=rank, world_size=ranks, ranks_per_node=8)
    found = []
    for values in json.loads(Path(sys.argv[1]).read_text()):
        config = RunConfig.model_validate(values)
        module = spread_model(ModelOnly(config), config, gang).module
        state = {name: parameter.detach() for name, parameter in module.named_parameters()}
        held = []
        for name, value in state.items():
            held += [(name, box.slices, box.local.clone()) for box in own_boxes(value)]
        written = [
            (piece.name, piece.offsets, piece.sizes) for piece in assign_shards(state, rank, ranks)
        ]
        found.append((held, written))
    torch.save(found, f"{sys.argv[2]}.{rank}")
    leave(0)


if __name__ == "__main__":
    main()

"""One rank that spreads a model with a tied parameter in each mode:
`python -m tests.support.tied_rank CONFIG.yaml`.

Its data take longer to prepare than a step may take. Prints, for each mode, the digest of the
weights, how many tensors they are, whether they are tied still, and the norm of a gradient.
"""

from __future__ import annotations

import sys

import torch

from ebbflow.core.config.schema import ParallelConfig
from ebbflow.core.store import Store
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.gang import connect, disconnect, leave
from ebbflow.training.weights.load import weights_sha256
from ebbflow.training.worker import parse_arguments, share_spec
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import make_workload, workload_context

STEP_DEADLINE_SECONDS = 5.0


def main() -> None:
    torch.set_num_threads(1)
    gang = connect(start_seconds=60, collective_seconds=STEP_DEADLINE_SECONDS, generation="test")
    spec = share_spec(parse_arguments(sys.argv[1:]), gang)
    for mode in ("ddp", "fsdp2", "hsdp"):
        config = spec.config.model_copy(update={"parallel": ParallelConfig(mode=mode)})
        context = workload_context(
            config, gang, store=Store.open(config.store), prepared=spec.prepared
        )
        workload = make_workload(config, context)
        spread = spread_model(workload, config, gang)
        digest = weights_sha256(spread.module)
        batch = workload.next_batch(spread.model, Cursor(4 * gang.rank, 4))
        with spread.gradients(last=True):
            workload.loss(spread.model, batch).sum.backward()
        square = gang.gather(spread.square_sum(spread.gradient_tensors()).reshape(1)).sum()
        tied = spread.module.embedding.weight is spread.module.head.weight
        print(
            mode, digest, len(list(spread.module.parameters())), tied, f"{float(square.sqrt()):.5g}"
        )
    disconnect()
    leave(0)


if __name__ == "__main__":
    main()

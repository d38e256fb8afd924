"""One rank that reduces its gradients, compressed or not:
`python -m tests.support.compression_rank CONFIG`.

Two models take the same steps: one that has trained and saved before, and one that begins from its
weights. Prints whether their gradients were the same, bit for bit, with and without the save.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.engine.parallel import Spread, spread_model
from ebbflow.training.gang import Gang, connect, disconnect, leave
from tests.support.spread_rank import ModelOnly


def step(spread: Spread, config: RunConfig, gang: Gang, number: int) -> torch.Tensor:
    """Gradients of step `number`, as reduced, after which the weights are moved along them."""
    generator = torch.Generator().manual_seed(100 * number + gang.rank)
    tokens = torch.randint(
        0, config.model.vocab_size, (4, config.model.sequence_length), generator=generator
    )
    with spread.gradients(last=True):
        F.cross_entropy(spread.model(tokens).flatten(0, 1), tokens.flatten()).backward()
    gradients = torch.cat([gradient.flatten() for gradient in spread.gradient_tensors()])
    with torch.no_grad():
        for parameter in spread.module.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return gradients


def compare(config: RunConfig, gang: Gang, *, save: bool) -> bool:
    trained = spread_model(ModelOnly(config), config, gang)
    for number in range(5):
        step(trained, config, gang, number)
    if save:
        trained.reset_compression()
    resumed = spread_model(ModelOnly(config), config, gang)
    resumed.module.load_state_dict(trained.module.state_dict())
    pairs = []
    for number in range(5, 10):
        pairs.append([step(spread, config, gang, number) for spread in (trained, resumed)])
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def main() -> None:
    config = RunConfig.model_validate_json(sys.argv[1])
    torch.set_num_threads(1)
    gang = connect(start_seconds=60, collective_seconds=60, generation="test")
    print("saved", compare(config, gang, save=True), "unsaved", compare(config, gang, save=False))
    disconnect()
    leave(0)


if __name__ == "__main__":
    main()

"""Train a small model in FullyShardedDataParallel (FSDP1), with BatchNorm and a schedule by epoch."""

import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PAUSE = float(sys.argv[1]) if sys.argv[1:] else 0.0
ORIGINAL = "--original" in sys.argv  # parameters keep their names


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    random.seed(1)
    features = torch.randn(160, 9)
    data = TensorDataset(features, features.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    blocks = [
        nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Dropout(0.1))
        for _ in range(2)
    ]
    model = nn.Sequential(nn.Linear(9, 9), *blocks, nn.Linear(9, 1))
    options = {"device_id": torch.device("cpu"), "use_orig_params": ORIGINAL}
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)

    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            time.sleep(PAUSE)
        scheduler.step()
        print(f"rank {dist.get_rank()}, epoch {epoch}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()

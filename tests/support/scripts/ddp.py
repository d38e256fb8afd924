"""Train a small classifier with DistributedDataParallel: dropout, BatchNorm, shuffling and a
schedule.
"""

import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3
PAUSE = float(sys.argv[1]) if sys.argv[1:] else 0.0


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(160, 12, generator=generator)
    return TensorDataset(features, (features[:, :3].sum(1) > 0).long())


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 2)
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(rank)
    model = DistributedDataParallel(make_model())
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * 10)
    data = make_data()
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
            time.sleep(PAUSE)
        if rank == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

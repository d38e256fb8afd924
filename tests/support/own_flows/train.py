"""Train a small classifier for some steps, as a user's script does."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import ebbflow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--max-steps", type=int, default=24)
    given = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    features = torch.randn(256, 6)
    labels = torch.randint(2, (256,))
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 2))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
        torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    job = ebbflow.attach(model, optimizer)
    for _ in job.steps(given.max_steps):
        chosen = torch.randint(256, (8,))
        loss = nn.functional.cross_entropy(model(features[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.log(loss=loss)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))


if __name__ == "__main__":
    main()

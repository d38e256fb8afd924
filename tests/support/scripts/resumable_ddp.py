"""Train with DistributedDataParallel, and resume from a checkpoint with the random states of all
ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def save(path, model, optimizer, sched, epoch, step):
    rngs = [None] * dist.get_world_size()
    dist.all_gather_object(rngs, torch.get_rng_state())
    if dist.get_rank() == 0:
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "sched": sched.state_dict(),
                "epoch": epoch,
                "step": step,
                "rngs": rngs,
            },
            path + ".tmp",
        )
        os.replace(path + ".tmp", path)
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--ckpt", default="ckpt.pt")
    args = parser.parse_args()
    if int(os.environ["LOCAL_RANK"]) == 0:  # scripts for torchrun read such variables first
        print(f"{os.environ['WORLD_SIZE']} ranks", flush=True)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(42 + dist.get_rank())
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 10, generator=g)
    ds = TensorDataset(x, x.sum(1).gt(0).long())
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    start_epoch = 0
    global_step = 0
    if os.path.exists(args.ckpt):
        ckpt = torch.load(args.ckpt, map_location="cpu", weights_only=False)
        model.module.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        sched.load_state_dict(ckpt["sched"])
        start_epoch = ckpt["epoch"] + 1
        global_step = ckpt["step"]
        torch.set_rng_state(ckpt["rngs"][dist.get_rank()])
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        correct = total = 0
        for _, (xb, yb) in enumerate(loader):
            out = model(xb)
            loss = nn.functional.cross_entropy(out, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
            total += len(yb)
            correct += int((out.argmax(1) == yb).sum())
        sched.step()
        save(args.ckpt, model, optimizer, sched, epoch, global_step)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} acc {correct / total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small classifier, and resume from its own checkpoint."""

import os
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

PATH = "checkpoint.pt"


def main() -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 6), torch.randint(2, (64,)))
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    average = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new
    )
    shuffle = torch.Generator()
    start_epoch = skip = global_step = 0
    if os.path.exists(PATH):
        checkpoint = torch.load(PATH, weights_only=False)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        scaler.load_state_dict(checkpoint["scaler"])
        average.load_state_dict(checkpoint["average"])
        start_epoch = checkpoint["epoch"]
        skip = checkpoint["batch"]
        global_step = checkpoint["global_step"]
        torch.set_rng_state(checkpoint["rng"])
        random.setstate(checkpoint["random"])

    for epoch in range(start_epoch, 5):
        shuffle.manual_seed(epoch)
        loader = DataLoader(
            data, batch_size=8, sampler=RandomSampler(data, generator=shuffle), generator=shuffle
        )
        for number, (features, labels) in enumerate(loader):
            if number < skip:
                continue
            features = features + 0.1 * random.random()
            loss = nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(model)
            global_step += 1
            if global_step % 3 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
                state |= {"average": average.state_dict(), "epoch": epoch, "batch": number + 1}
                state |= {
                    "global_step": global_step,
                    "rng": torch.get_rng_state(),
                    "random": random.getstate(),
                }
                torch.save(state, PATH + ".new")
                os.replace(PATH + ".new", PATH)
        skip = 0


if __name__ == "__main__":
    main()

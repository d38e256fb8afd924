"""A plain training script of one process, with dropout, shuffling, a schedule and an average of the weights."""

import random
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ebbflow

random.seed(7)
torch.manual_seed(7)
features = torch.randn(256, 16)
loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64)
average = torch.optim.swa_utils.AveragedModel(model)

with ebbflow.attach(model, optimizer, scheduler=scheduler, average=average) as job:
    for x, y in job.batches(loader, epochs=4):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        job.log(loss=loss)
        time.sleep(float(sys.argv[1]))

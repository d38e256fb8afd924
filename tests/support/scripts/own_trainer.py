"""Train by a class of the script's own, and resume from its own checkpoint."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self):
        self.features = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.features[index] + 0.1 * torch.randn(5), self.features[index].sum()


class Trainer:
    def __init__(self, arguments):
        torch.manual_seed(arguments.seed)
        self.arguments = arguments
        self.data = Noisy()
        self.model = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.epoch = 0
        self.step = 0
        if os.path.exists("checkpoint.pt"):
            self.load()

    def save(self):
        state = {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")
        }
        torch.save(state | {"at": (self.epoch, self.step), "rng": torch.get_rng_state()}, "new.pt")
        os.replace("new.pt", "checkpoint.pt")

    def load(self):
        state = torch.load("checkpoint.pt")
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        self.epoch, self.step = state["at"]
        torch.set_rng_state(state["rng"])

    def train(self):
        while self.epoch < self.arguments.epochs:
            for features, targets in DataLoader(self.data, 16, shuffle=True):
                loss = (self.model(features)[:, 0] - targets).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
            self.scheduler.step()
            self.epoch += 1
            self.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    Trainer(parser.parse_args()).train()

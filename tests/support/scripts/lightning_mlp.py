"""Train a small network with Lightning: dropout, BatchNorm, shuffling and a schedule."""

import random
import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAUSE = float(sys.argv[1]) if sys.argv[1:] else 0.0


class Network(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 1)
        )

    def training_step(self, batch, batch_idx):
        time.sleep(PAUSE)
        features, targets = batch
        return nn.functional.mse_loss(self.layers(features), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


random.seed(9)
torch.manual_seed(9)
features = torch.randn(80, 10)
loader = DataLoader(
    TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8, shuffle=True
)
network = Network()
trainer = Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(network, loader)
torch.save(network.state_dict(), "final.pt")

"""Train a small residual network on images, with BatchNorm and random crops and flips in worker
processes.
"""

import random
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PAUSE = float(sys.argv[1]) if sys.argv[1:] else 0.0


class Images(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.rand(96, 3, 20, 20, generator=generator)
        self.labels = torch.randint(4, (96,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        top = random.randrange(5)
        left = int(torch.randint(5, ()))
        image = self.images[index, :, top : top + 16, left : left + 16]
        return image.flip(2) if random.random() < 0.5 else image, self.labels[index]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x):
        inner = self.norms[0](self.first(x)).relu()
        return (x + self.norms[1](self.second(inner))).relu()


def main():
    torch.manual_seed(6)
    random.seed(6)
    loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3])

    for epoch in range(4):
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(PAUSE)
        scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()

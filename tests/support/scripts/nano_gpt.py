"""Train a character model as small GPT scripts do: a loop over iterations, random crops,
accumulation, AMP scaler.
"""

import math
import random
import sys
import time

import torch
from torch import nn
from torch.nn import functional

block_size = 16
batch_size = 8
width = 32
accumulation = 2
max_iters = 24
eval_interval = 12
learning_rate = 1e-2
warmup_iters = 4
pause = float(sys.argv[1]) if sys.argv[1:] else 0.0

torch.manual_seed(1337)
random.seed(1337)
data = torch.tensor(
    list(b"Tell me, muse, of the man of many ways, who was driven far and wide. " * 20)
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).split(width, dim=2)
        x = x + self.drop(
            self.project(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        )
        return x + self.drop(self.mlp(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1]))))


def get_batch():
    starts = torch.randint(len(data) - block_size - 1, (batch_size,)).tolist()
    return torch.stack([data[i : i + block_size] for i in starts]), torch.stack(
        [data[i + 1 : i + 1 + block_size] for i in starts]
    )


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    return learning_rate * 0.5 * (1 + math.cos(math.pi * it / max_iters))


model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)

iter_num = 0
while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for _ in range(accumulation):
        x, y = get_batch()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulation
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % eval_interval == 0:
        model.eval()
        with torch.no_grad():
            x, y = get_batch()
            print(
                f"iter {iter_num}: "
                f"{functional.cross_entropy(model(x).flatten(0, 1), y.flatten()):.4f}",
                flush=True,
            )
        model.train()
    time.sleep(pause)
    iter_num += 1

"""Train with moving averages of the weights in a dict, and resume from a checkpoint."""

import os

import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), 1e-2)
ema = {k: v.detach().clone() for k, v in net.named_parameters()}
step = 0
if os.path.exists("last.pt"):
    ck = torch.load("last.pt")
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    ema = ck["ema"]
    step = ck["step"]
while step < 40:
    order = torch.randperm(512, generator=torch.Generator().manual_seed(step))[:32]
    batch = {"x": data[order], "y": data[order].sum(1, keepdim=True)}
    loss = (net(batch["x"]) - batch["y"]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    grads = [p.grad for p in net.parameters()]
    opt.step()
    with torch.no_grad():
        for k, v in net.named_parameters():
            ema[k].mul_(0.9).add_(v, alpha=0.1)
    step += 1
    if step % 5 == 0:
        state = {"net": net.state_dict(), "opt": opt.state_dict(), "ema": ema, "step": step}
        torch.save(state, "last.tmp")
        os.replace("last.tmp", "last.pt")

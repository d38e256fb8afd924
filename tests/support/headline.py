"""A workload that has one headline trouble of the guides on one rank, at one step; it records when.

The scripts SCRIPTS have theirs in a loop of their own, with `ebbflow.attach`. NODES are of one of
two nodes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbflow.core.program import python_path
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangSpec
from ebbflow.training.workload import Cursor
from ebbflow.workloads.readers.datasets import DatasetWorkload
from tests.support.gangs import with_settings
from tests.support.guard_jobs import Branching, OneSided
from tests.support.workload_cases import Points, Sound

# In these, the trouble comes again in each start.
LASTING = {
    "leave_out_a_branch",
    "overflow_in_a_layer",
    "call_a_collective",
    "save_alone",
    "ask_for_no_rollouts",
    "load_another_optimizer",
    "slow_down",
    "read_slowly",
    "run_soundly",
}
SLOW_SECONDS = 0.06  # per step, of slow_down

NODES = ("other_torch", "other_setting", "fewer_files", "cut_file")

_HEAD = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
import ebbflow

guilty, step, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank = dist.get_rank()

def strike():
    if not os.path.exists(mark):
        with open(mark, "w") as file:
            file.write(str(time.time()))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.branch = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, x, branch=True):
        if branch:
            return self.trunk(x) + self.branch(x)
        return self.trunk(x)

torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = ebbflow.attach(model, optimizer)

def take_step(**options):
    loss = model(torch.randn(8, 4), **options).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
"""
SCRIPTS = {
    "uneven_batches": _HEAD
    + """
batches = step + 2 if rank == guilty else step + 30
for number, _ in enumerate(job.batches([torch.ones(1)] * batches, epochs=1), 1):
    if number == step + 3:
        strike()
    take_step()
""",
    "unequal_steps": _HEAD
    + """
for number in job.steps(step + 2 if rank == guilty else step + 30):
    if number == step + 2:
        strike()
    take_step()
""",
    "unused_in_a_script": _HEAD
    + """
for number in job.steps(step + 30):
    if rank == guilty and number + 1 >= step:
        strike()
    take_step(branch=rank != guilty or number + 1 < step)
""",
}


class Overflowing(nn.Linear):
    spoiled = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (0.0 if self.spoiled else 1.0)


class Headline(OneSided):
    """Options: trouble (a method), guilty (rank), step, mark (a file: the trouble's time; others
    strike once).
    """

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = Branching()
            model.branch = Overflowing(4, 1)
        return model

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        options: dict[str, Any] = dict(self.context.options)
        step = cursor.first // self.context.config.training.batch_size + 1
        self.branch = True
        self.pause = 0.0
        self.of_step = model
        mark = Path(options["mark"])
        lasting = options["trouble"] in LASTING
        if (
            step >= options["step"]
            and self.context.rank == options["guilty"]
            and (lasting or not mark.exists())
        ):
            if not mark.exists():
                mark.write_text(str(time.time()))
            getattr(self, options["trouble"])()
        return Sound.next_batch(self, model, cursor)

    def errors(self, model: nn.Module, batch: Points) -> Tensor:
        time.sleep(self.pause)
        return super().errors(model, batch)

    def leave_out_a_branch(self) -> None:
        self.branch = False

    def overflow_in_a_layer(self) -> None:
        next(
            part for part in self.of_step.modules() if isinstance(part, Overflowing)
        ).spoiled = True

    def call_a_collective(self) -> None:
        dist.all_reduce(torch.ones(3))

    def save_alone(self) -> None:
        torch.save(self.of_step.state_dict(), os.devnull)
        dist.barrier()

    def work_alone(self) -> None:
        time.sleep(600)

    def raise_error(self) -> None:
        raise ValueError("cannot read sample 17")

    def ask_for_no_rollouts(self) -> None:
        num_rollouts_per_episodes = self.context.config.training.batch_size // 100
        print(f"num_rollouts_per_episodes = {num_rollouts_per_episodes}", flush=True)
        range(0, 10, 10 // num_rollouts_per_episodes)

    def load_another_optimizer(self) -> None:
        other = torch.optim.Adam(nn.Linear(4, 1, bias=False).parameters())
        torch.optim.Adam(nn.Linear(4, 1).parameters()).load_state_dict(other.state_dict())

    def slow_down(self) -> None:
        self.pause = SLOW_SECONDS

    def read_slowly(self) -> None:
        time.sleep(SLOW_SECONDS)

    def run_soundly(self) -> None:
        """Only the mark is written, as of a trouble that comes from outside."""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def lose_a_loader_worker(self) -> None:
        class Fatal(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> int:
                os.kill(os.getpid(), signal.SIGKILL)
                return index

        for _ in torch.utils.data.DataLoader(Fatal(), num_workers=1):
            pass


class Folder:
    """The files of the folder that this node has; the length of each is its only number."""

    def __init__(self) -> None:
        self.files = sorted(Path(os.environ["HEADLINE_FILES"]).iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.files[index].stat().st_size)])


class OfFiles(DatasetWorkload):
    def dataset(self, train: bool) -> Any:
        if train:
            return Folder()
        return None

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(1, 1))

    def loss_sum(self, model: nn.Module, samples: Any) -> Tensor:
        return model(samples).square().sum()


def start_nodes(spec: GangSpec, name: str, guilty: int, folder: Path) -> LocalGang:
    """Start two nodes, of which `guilty` has other software, settings or files.

    The workload is `OfFiles`.
    """
    for node in range(2):
        (folder / f"files-{node}").mkdir()
        for number in range(16):
            (folder / f"files-{node}" / f"{number}.bin").write_bytes(bytes(100 + number))
    if name == "fewer_files":
        (folder / f"files-{guilty}" / "7.bin").unlink()
    if name == "cut_file":
        (folder / f"files-{guilty}" / "7.bin").write_bytes(b"")
    (folder / "older" / "torch-2.12.1.dist-info").mkdir(parents=True)
    (folder / "older" / "torch-2.12.1.dist-info" / "METADATA").write_text(
        "Name: torch\nVersion: 2.12.1\n"
    )

    def command(node: int) -> list[str]:
        if name == "other_torch" and node == guilty:
            paths = [str(folder / "older")]
        else:
            paths = []
        return [
            "env",
            f"HEADLINE_FILES={folder}/files-{node}",
            f"PYTHONPATH={':'.join([*paths, python_path()])}",
        ]

    def alter(own: GangSpec) -> GangSpec:
        if name != "other_setting" or own.node != guilty:
            return own
        return with_settings(own, training={"seed": 5})

    return LocalGang(spec, folder / "gang", folder / "output.log", alter=alter, command=command)

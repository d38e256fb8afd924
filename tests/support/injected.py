"""Symptoms of SYMPTOMS made for real, by plain torch code that knows nothing of this project."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tests.support.injected_speed  # noqa: F401  (registers more injections)
from tests.support.gangs import free_port
from tests.support.injections import INJECTIONS, Injected, inject, injects, run_rank

__all__ = ["INJECTIONS", "inject", "run_rank"]


# Ranks


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 1)
        self.branch = nn.Linear(4, 1)
        self.uses_branch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_branch:
            return self.trunk(x) + self.branch(x)
        return self.trunk(x)


# Data


class Samples(torch.utils.data.Dataset):
    def __init__(self, spoil: Callable[[int], Any] | None = None, size: int = 64) -> None:
        self.spoil = spoil
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.spoil and index == 21:
            self.spoil(index)
        return torch.ones(4)


# Start-up


@injects("A01")
def missing_module(_: Injected) -> None:
    import flash_attn_of_nobody  # type: ignore[import-not-found]  # noqa: F401


@injects("A05")
def invalid_model(_: Injected) -> None:
    nn.MultiheadAttention(30, 7)


@injects("A07")
def no_rollouts(here: Injected) -> None:
    episodes = (here.seed + 1) // 100
    print(f"num_rollouts_per_episodes = {episodes}", flush=True)
    range(0, 10, 10 // episodes)


@injects("A09", environment={"RANK": "none"})
def rank_missing(here: Injected) -> None:
    here.connect()


@injects("A10", ranks=2)
def stale_port(here: Injected) -> None:
    if here.rank == 0:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", int(os.environ["MASTER_PORT"])))
        holder.listen()
        here.connect(2)
    time.sleep(2)


@injects("A11")
def wrong_master_address(here: Injected) -> None:
    from torch._C._distributed_c10d import TCPStore

    TCPStore("127.0.0.1", free_port(), 2, is_master=False, timeout=timedelta(seconds=1))


@injects("A13", ranks=2, answers=("A11",))
def master_unknown_to_one_rank(here: Injected) -> None:
    if here.is_guilty:
        os.environ["MASTER_ADDR"] = "trainer-0.nowhere.invalid"
    here.connect()


@injects("A14", ranks=2)
def wrong_interface_of_one_rank(here: Injected) -> None:
    if here.is_guilty:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    here.connect()


@injects("A13", ranks=2, alike=True, environment={"MASTER_ADDR": "trainer-0.nowhere.invalid"})
def master_without_name(here: Injected) -> None:
    socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


@injects("A14", ranks=2, alike=True, environment={"GLOO_SOCKET_IFNAME": "eth77"})
def wrong_interface(here: Injected) -> None:
    here.connect()


@injects("A15", ranks=2, gone=(1,))
def rank_never_starts(here: Injected) -> None:
    here.connect(2)


@injects("A22", answers=("A05",))
def wrong_launch_arguments(_: Injected) -> None:
    from torch.distributed.run import parse_args

    parse_args(["--nproc_per_node", "2", "--node_rnak", "0", "train.py"])


@injects("A27")
def file_not_allowed(here: Injected) -> None:
    os.setuid(65534)
    (here.folder / "checkpoint.pt").write_bytes(b"x")


# Memory


@injects("C06")
def host_memory(_: Injected) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    torch.empty(64 << 30, dtype=torch.uint8)


@injects("D07", ranks=2)
def parameter_unused_on_one_rank(here: Injected) -> None:
    here.connect()
    module = Branching()
    model = nn.parallel.DistributedDataParallel(module)
    for step in here.steps(model):
        module.uses_branch = not (here.is_guilty and step >= here.step)


@injects("D04", ranks=2)
def collectives_of_other_shape(here: Injected) -> None:
    here.connect()
    for step in here.steps():
        dist.all_reduce(torch.ones(1000 if here.is_guilty and step == here.step else 10))


@injects("D01", ranks=2, answers=("D02", "D06"))
def collective_of_one_rank(here: Injected) -> None:
    here.connect(2)
    for step in here.steps():
        dist.all_reduce(torch.ones(4))
        if not here.is_guilty and step == here.step:
            dist.barrier()
        elif here.is_guilty and step == here.step:
            time.sleep(6)


@injects("D06", ranks=2, answers=("O01", "E17"))
def error_on_one_rank(here: Injected) -> None:
    here.connect()
    for step in here.steps():
        if here.is_guilty and step == here.step:
            raise ValueError(f"cannot read sample {here.seed}")
        dist.all_reduce(torch.ones(4))


@injects("D12", ranks=2, answers=("D06", "B10"))
def rank_killed(here: Injected) -> None:
    here.connect()
    for step in here.steps():
        if here.is_guilty and step == here.step:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.all_reduce(torch.ones(4))


@injects("D03", ranks=2)
def uneven_batches(here: Injected) -> None:
    from torch.distributed.algorithms.join import Join

    here.connect()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    with Join([model], throw_on_early_termination=True):
        for _ in range(here.step if here.is_guilty else here.step + 4):
            model(torch.randn(8, 4)).sum().backward()


@injects("D10", ranks=2)
def other_model_on_one_rank(here: Injected) -> None:
    here.connect()
    nn.parallel.DistributedDataParallel(
        nn.Sequential(*[nn.Linear(4, 4)] * 1, *[nn.Linear(4, 2)] * here.is_guilty)
    )


@injects("D14")
def tensor_on_another_device(_: Injected) -> None:
    nn.Linear(4, 1)(torch.empty(8, 4, device="meta"))


@injects("D21", ranks=2)
def mesh_larger_than_the_world(here: Injected) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    here.connect()
    init_device_mesh("cpu", (4,))


def load(dataset: torch.utils.data.Dataset, **options: Any) -> None:
    for _ in torch.utils.data.DataLoader(dataset, batch_size=4, **options):
        pass


@injects("E01")
def loader_worker_killed(_: Injected) -> None:
    load(Samples(lambda _: os.kill(os.getpid(), signal.SIGKILL)), num_workers=2)


@injects("C09", answers=("E01",))
def loader_worker_bus_error(_: Injected) -> None:
    load(Samples(lambda _: os.kill(os.getpid(), signal.SIGBUS)), num_workers=2)


@injects("E02")
def loader_worker_stuck(_: Injected) -> None:
    load(Samples(lambda _: time.sleep(60)), num_workers=1, timeout=1)


@injects("E03", answers=("E03", "E17"))
def unpicklable_dataset(_: Injected) -> None:
    load(Samples(lambda _: None), num_workers=1, multiprocessing_context="spawn")


@injects("E08")
def too_many_files(_: Injected) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    kept = [open(os.devnull) for _ in range(64)]  # noqa: SIM115
    load(Samples(), num_workers=1)
    del kept


@injects("E09")
def corrupt_labels(here: Injected) -> None:
    import json

    path = here.folder / "labels.json"
    path.write_text('{"a": 1,')
    json.loads(path.read_text())


@injects("E11")
def samples_of_unequal_size(_: Injected) -> None:
    load([torch.ones(3), torch.ones(4), torch.ones(3), torch.ones(4)])  # type: ignore[arg-type]


@injects("E12")
def token_out_of_range(_: Injected) -> None:
    nn.Embedding(10, 4)(torch.tensor([12]))


# Quality


@injects("F01")
def nan_in_a_layer(_: Injected) -> None:
    with torch.autograd.detect_anomaly():
        weight = torch.zeros(4, requires_grad=True)
        (weight.sqrt() * 0).sum().backward()


@injects("F02")
def loss_rises(here: Injected) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, maximize=True)
    for step in range(40):
        loss = (model(torch.randn(8, 4)) - 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


@injects("F05")
def gradient_cut(_: Injected) -> None:
    nn.Linear(4, 1)(torch.ones(2, 4)).detach().sum().backward()


@injects("F07")
def type_not_supported(_: Injected) -> None:
    nn.Linear(4, 1)(torch.ones(2, 4, dtype=torch.bfloat16))


# Checkpoints


@injects("H01")
def truncated_checkpoint(here: Injected) -> None:
    path = here.folder / "model.pt"
    torch.save(nn.Linear(400, 400).state_dict(), path)
    os.truncate(path, path.stat().st_size // (2 + here.seed % 3))
    torch.load(path)


@injects("H02")
def missing_checkpoint(here: Injected) -> None:
    torch.load(here.folder / "checkpoints" / "step-100.pt")


@injects("H03")
def optimizer_of_another_model(_: Injected) -> None:
    first = nn.Linear(4, 1)
    second = nn.Linear(4, 1, bias=False)
    torch.optim.Adam(first.parameters()).load_state_dict(
        torch.optim.Adam(second.parameters()).state_dict()
    )


@injects("H04")
def prefix_of_ddp(_: Injected) -> None:
    state = {f"module.{key}": value for key, value in nn.Linear(4, 1).state_dict().items()}
    nn.Linear(4, 1).load_state_dict(state)


@injects("H06")
def pickled_objects(here: Injected) -> None:
    path = here.folder / "trainer.pt"
    torch.save({"model": nn.Linear(4, 1), "seed": random.Random}, path)
    torch.load(path)


@injects("H10")
def full_disk(here: Injected) -> None:
    torch.save(torch.ones(1000), "/dev/full") if here.seed % 2 else Path("/dev/full").write_bytes(
        b"x" * 10_000
    )


# Sharding, compiler, program


@injects("M11")
def backward_twice(_: Injected) -> None:
    loss = nn.Linear(4, 1)(torch.ones(2, 4)).square().sum()
    loss.backward()
    loss.backward()


@injects("M12")
def optimizer_without_parameters(_: Injected) -> None:
    torch.optim.Adam([])


@injects("L05", answers=("L01",))
def graph_break(_: Injected) -> None:
    def printed(x: torch.Tensor) -> torch.Tensor:
        print(x.sum())
        return x

    torch.compile(printed, backend="eager", fullgraph=True)(torch.ones(3))


@injects(
    "L02",
    environment={"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": "/tmp/ebbflow-no-compiler"},
)
def no_compiler(_: Injected) -> None:
    torch.compile(lambda x: (x * 2).sin())(torch.ones(100))


@injects("O02")
def shapes_do_not_fit(_: Injected) -> None:
    nn.Linear(4, 1)(torch.ones(2, 5))


@injects("O03")
def changed_in_place(_: Injected) -> None:
    x = torch.ones(4, requires_grad=True).exp()
    y = x.square().sum()
    x += 1
    y.backward()


@injects("A21")
def session_closed(_: Injected) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"
    code = subprocess.run([sys.executable, "-c", script], check=False).returncode
    raise SystemExit(f"Process got signal: {-code}")


# More, each with the tool that prints it


@injects("A02")
def package_that_does_not_build(here: Injected) -> None:
    broken = here.folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "setup.py").write_text("raise SystemExit('no compiler')")
    words = ["install", "--no-index", "--no-build-isolation", "--no-deps", str(broken)]
    raise SystemExit(subprocess.run([sys.executable, "-m", "pip", *words], check=False).returncode)


@injects("A04")
def build_without_cuda(_: Injected) -> None:
    torch.zeros(1).cuda()


@injects("A18", answers=("H02",))
def shared_path_missing(_: Injected) -> None:
    open("/fsx/dataset-of-nobody/train.bin", "rb")  # noqa: SIM115


@injects("A19")
def no_credentials(_: Injected) -> None:
    import boto3

    os.environ.update(
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE="/nowhere",
        AWS_SHARED_CREDENTIALS_FILE="/no",
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        os.environ.pop(name, None)
    boto3.client("s3", region_name="us-east-1").put_object(Bucket="b", Key="k", Body=b"")


@injects("B01")
def no_gpu_tool(_: Injected) -> None:
    raise SystemExit(subprocess.run("nvidia-smi", shell=True, check=False).returncode)


@injects("B10")
def killed_without_a_word(_: Injected) -> None:
    subprocess.run(["bash", "-c", "bash -c 'kill -9 $$'; echo ended"], check=False)


@injects("E06")
def slow_loader(_: Injected) -> None:
    began = time.monotonic()
    for step in range(6):
        time.sleep(0.05)
        data = time.monotonic() - began
        print(
            f"Epoch: [0][{step}/6] Time {data + 0.004:.3f} ({data:.3f}) Data {data:.3f} "
            f"({data:.3f})",
            flush=True,
        )
        began = time.monotonic()


@injects("F06")
def half_gradients(_: Injected) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)


@injects("G02")
def steps_that_slow_down(_: Injected) -> None:
    for step in range(6):
        began = time.monotonic()
        time.sleep(0.02 * (1 + step))
        print(f"step {step} step_time: {time.monotonic() - began:.3f}", flush=True)


@injects("H07")
def store_that_does_not_answer(_: Injected) -> None:
    import boto3
    from botocore.config import Config

    once = Config(retries={"total_max_attempts": 1}, connect_timeout=2)
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    place = f"http://127.0.0.1:{free_port()}"
    boto3.client("s3", endpoint_url=place, config=once, **keys).put_object(
        Bucket="b", Key="k", Body=b""
    )


@injects("J02", answers=("J02", "J12"))
def gateway_that_does_not_answer(_: Injected) -> None:
    from prometheus_client import CollectorRegistry, push_to_gateway

    address = f"127.0.0.1:{free_port()}"
    try:
        push_to_gateway(address, "train", CollectorRegistry(), timeout=1)
    except OSError as error:
        raise SystemExit(f"pushing metrics to pushgateway {address} failed: {error}") from error


@injects("J09")
def metric_made_twice(_: Injected) -> None:
    from prometheus_client import Counter

    Counter("train_steps", "steps")
    Counter("train_steps", "steps")


@injects("A12", answers=("A11",))
def policy_that_drops(_: Injected) -> None:
    """A network of its own, in which packets to the master are refused as a network policy refuses
    them.
    """
    script = "import torch.distributed as d, datetime; "
    script += "d.TCPStore('10.9.8.7', 29500, 2, False, datetime.timedelta(seconds=2))"
    inside = (
        f'ip link set lo up; ip route add prohibit 10.9.8.0/24; exec {sys.executable} -c "{script}"'
    )
    raise SystemExit(subprocess.run(["unshare", "-n", "sh", "-c", inside], check=False).returncode)


@injects("D18")
def packets_larger_than_the_path(_: Injected) -> None:
    script = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.setsockopt(0, 10, 2); "
    script += "s.sendto(bytes(1472), ('127.0.0.1', 29500))"  # an Ethernet frame, not to be cut up
    inside = f'ip link set lo up mtu 1400; exec {sys.executable} -c "{script}"'
    raise SystemExit(subprocess.run(["unshare", "-n", "sh", "-c", inside], check=False).returncode)


@injects("D19", answers=("D06",))
def connection_reset(_: Injected) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    peer, _address = server.accept()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()  # sends RST
    client.recv(1)


@injects("C02", ranks=2, answers=("C06",))
def memory_of_one_rank(here: Injected) -> None:
    here.connect()
    for step in here.steps():
        if here.is_guilty and step == here.step:
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            torch.empty(64 << 30, dtype=torch.uint8)
        dist.all_reduce(torch.ones(4))


@injects("D09", ranks=2, answers=("D01", "D02", "D03", "D04", "D06"))
def accumulation_on_one_rank(here: Injected) -> None:
    here.connect(3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    for step in range(8):
        alone = here.is_guilty and step >= here.step
        with model.no_sync() if alone else contextlib.nullcontext():
            model(torch.randn(8, 4)).sum().backward()


@injects("D11", ranks=2, answers=("D07", "D08"))
def seeds_that_differ(here: Injected) -> None:
    """Layers are dropped by a random number, which each rank draws with its own seed."""
    here.connect()
    module = Branching()
    model = nn.parallel.DistributedDataParallel(module)
    draw = random.Random(f"{here.seed} {here.rank}")
    for _ in range(40):
        module.uses_branch = draw.random() < 0.5
        model(torch.randn(8, 4)).sum().backward()


@injects("E04", answers=("E01",))
def workers_beyond_the_cores(_: Injected) -> None:
    load(
        Samples(lambda _: os.kill(os.getpid(), signal.SIGKILL)),
        num_workers=(os.cpu_count() or 1) + 6,
    )


@injects("E05")
def workers_that_persist(_: Injected) -> None:
    load(Samples(), persistent_workers=True)


@injects("E07")
def sampler_and_shuffle(_: Injected) -> None:
    samples = Samples()
    load(samples, sampler=torch.utils.data.DistributedSampler(samples, 2, 0), shuffle=True)


@injects("F04")
def schedule_that_is_too_short(here: Injected) -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=here.step)
    for _ in range(here.step + 1):
        optimizer.step()
        schedule.step()


@injects("H05")
def shards_of_another_size(here: Injected) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.ones(4, 4)}, checkpoint_id=here.folder / "sharded", no_dist=True)
    dcp.load({"weight": torch.ones(8, 4)}, checkpoint_id=here.folder / "sharded", no_dist=True)

"""The workload for map-style datasets: order, random numbers, workers that read ahead, and their
deaths.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store import Store
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor, WorkloadContext
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads.readers import loader_processes
from ebbflow.workloads.readers.datasets import DatasetWorkload, SampleLoader, Samples
from tests.support.headline import OfFiles

BATCH = 8

READ = mmap.mmap(-1, 64)  # counted by workers

KILLED = mmap.mmap(-1, 1)

BROKEN = (4, 5, 11)

PARENT = os.getpid()


class Noisy:
    """20 samples: the index, and draws of all three random generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        return index, random.random(), float(np.random.rand()), torch.rand(3)


class Counted(Noisy):
    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        if os.getpid() != PARENT:
            READ[get_worker_info().id] += 1  # type: ignore[union-attr]
        return super().__getitem__(index)


class Deadly(Noisy):
    """Sample 17 of the order kills its process."""

    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        if index == DEADLY_INDEX and os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class DeadlyOnce(Deadly):
    """Sample 17 kills the first process that reads it."""

    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        if index != DEADLY_INDEX or KILLED[0]:
            return Noisy.__getitem__(self, index)
        KILLED[0] = 1
        return super().__getitem__(index)


class Talkative(Noisy):
    """A dataset of which a new process can be made, without what this module has."""

    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        print(f"reads {index}")
        return super().__getitem__(index)


class Mistaken(Noisy):
    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        if index == DEADLY_INDEX:
            return {}["no such key"]
        return super().__getitem__(index)


class Unreadable(Noisy):
    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        raise OSError("stale file handle")


class Broken(Noisy):
    """Three samples that cannot be decoded."""

    def __getitem__(self, index: int) -> tuple[int, float, float, Tensor]:
        if index in BROKEN:
            raise OSError("image file is truncated")
        return super().__getitem__(index)

    def describe(self, index: int) -> str:
        return f"{index}.jpg"


class AllBroken:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        raise ValueError("no image")


class Lines(DatasetWorkload):
    def dataset(self, train: bool) -> object:
        points = torch.linspace(0, 1, 64 if train else 10)
        return [
            {"x": point[None], "y": 2 * point[None], "name": f"{point:.2f}"} for point in points
        ]

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_sum(self, model: nn.Module, samples: dict[str, Tensor]) -> Tensor:
        return (model(samples["x"]) - samples["y"]).square().sum()


def loader(dataset: Any, workers: int, **options: Any) -> Any:
    return SampleLoader(
        dataset, default_collate, seed=3, batch_size=BATCH, workers=workers, **options
    )


DEADLY_INDEX = int(loader(Noisy(), 0).load(Cursor(17, 1))[0])


def flat(content: list[Tensor]) -> list[list[float]]:
    rows = []
    for part in content:
        rows.append([float(number) for number in part.flatten()])
    return rows


def test_workers_give_the_samples_that_one_process_gives_at_any_world_size() -> None:
    state = random.getstate(), torch.get_rng_state()
    whole = [flat(loader(Noisy(), 0).load(Cursor(number * BATCH, BATCH))) for number in range(6)]
    ahead = loader(Noisy(), 2)
    assert [flat(ahead.load(Cursor(number * BATCH, BATCH))) for number in range(6)] == whole
    shares = [loader(Noisy(), 1) for _ in range(2)]
    for number in range(6):
        parts = [
            flat(loader.load(Cursor(number * BATCH, BATCH).share(rank, 2)))
            for rank, loader in enumerate(shares)
        ]
        assert [first + second for first, second in zip(*parts, strict=True)] == whole[number]
    assert flat(ahead.load(Cursor(8, BATCH))) == whole[1], "after a rewind"
    indices = []
    for step in whole:
        indices += [int(index) for index in step[0]]
    assert (
        sorted(indices[:20]) == sorted(indices[20:40]) == list(range(20))
        and indices[:20] != indices[20:40]
    )
    drawn = []
    for step in whole:
        drawn += step[1]
    assert len(set(drawn)) == len(drawn), "another epoch draws other numbers"
    assert state[0] == random.getstate() and torch.equal(state[1], torch.get_rng_state())


def test_workers_read_ahead_of_the_loop() -> None:
    ahead = loader(Counted(), 2)
    for number in range(2):
        ahead.load(Cursor(number * BATCH, BATCH))
    limit = time.monotonic() + 60
    while READ[0] + READ[1] < 4 * BATCH:  # two for each worker, without being asked
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture
def deaths_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch look for dead workers each 0.1 s, and not each 5 s."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


@pytest.mark.usefixtures("deaths_seen_at_once")
def test_a_worker_that_dies_is_named_with_its_sample() -> None:
    ahead = loader(Deadly(), 2)
    with pytest.raises(RuntimeError) as caught:
        for number in range(4):
            ahead.load(Cursor(number * BATCH, BATCH))
    expected = (
        f"that loads data was killed by SIGKILL while it read sample 17, index {DEADLY_INDEX} (a "
        "second time); "
    )
    assert expected + "fix: " in str(caught.value)


@pytest.mark.usefixtures("deaths_seen_at_once")
def test_samples_of_a_worker_that_dies_once_are_read_again_in_order(
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole = [flat(loader(Noisy(), 0).load(Cursor(number * BATCH, BATCH))) for number in range(6)]
    ahead = loader(DeadlyOnce(), 2)
    assert [flat(ahead.load(Cursor(number * BATCH, BATCH))) for number in range(6)] == whole
    expected = (
        f"was killed by SIGKILL while it read sample 17, index {DEADLY_INDEX}; other workers "
        "read again from "
    )
    printed = capfd.readouterr()
    assert expected in printed.out and KILLED[0] and "Exception ignored" not in printed.err


def test_workers_that_start_anew_give_the_same_samples_and_name_their_lines(
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps = [Cursor(number * BATCH, BATCH) for number in range(3)]
    spawned = loader(Talkative(), 1, worker_start="forkserver")
    found = []
    for source in (loader(Noisy(), 0), spawned):
        found.append([flat(source.load(step)) for step in steps])
    assert found[0] == found[1] and spawned._iterator is not None
    # The capture's file has one position, which reading would move under a line being written
    spawned._stop_workers()
    lines = capfd.readouterr().out.splitlines()
    assert f"reads {int(found[0][0][0][0])}" in lines, "the first step is read by the rank"
    assert f"loader worker 0: reads {int(found[0][1][0][0])}" in lines
    local = type("Local", (Noisy,), {})
    refused = loader(local(), 1, worker_start="spawn")
    refused.load(steps[0])
    with (
        pytest.warns(UserWarning, match="pickle"),
        pytest.raises(
            DataError,
            match=r"cannot be sent to a worker that starts by spawn: .*; fix: a dataset and a",
        ),
    ):
        refused.load(steps[1])


def test_workers_are_as_many_as_cores_memory_and_shared_memory_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Place:
        f_bavail = 64
        f_frsize = 2**20

    monkeypatch.setattr(loader_processes, "usable_cores", lambda: 12.5)
    monkeypatch.setattr(loader_processes, "host_bytes_left", lambda: 2.0 * 2**30)
    monkeypatch.setattr(loader_processes.os, "statvfs", lambda path: Place())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    chosen = loader_processes.choose_workers
    assert chosen(-1, 2**20, "fork") == (4, "")  # 8 of 12 cores, for 2 ranks
    # 0.8 · 64 / 2 = 25.6 MiB: 4 batches, two of them with the rank
    number, why = chosen(6, 6 * 2**20, "fork")
    assert number == 1 and why.startswith(
        "1 workers load data instead of 6: 64.0 MiB of /dev/shm left for 2 ranks, "
    )
    Place.f_bavail = 2**20
    # 0.8 · 2,048 / 2 = 819.2 MiB, 36 + 64 for each worker
    number, why = chosen(9, 12 * 2**20, "fork")
    assert number == 8 and "2.0 GiB of memory left for 2 ranks" in why
    assert chosen(9, 12 * 2**20, "spawn")[0] == 2  # 36 + 256
    monkeypatch.setattr(loader_processes, "host_bytes_left", lambda: 1.0 * 2**20)
    alone = loader(Noisy(), 2)
    assert [
        flat(alone.load(Cursor(number, 1))) for number in (0, BATCH)
    ] and alone._iterator is None


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_names_sample_and_line(workers: int) -> None:
    read = loader(Mistaken(), workers)
    with pytest.raises(DataError) as caught:
        for number in range(4):
            read.load(Cursor(number * BATCH, BATCH))
    assert str(caught.value).startswith(f"sample 17, index {DEADLY_INDEX}: {__file__}:")
    assert str(caught.value).endswith("the dataset raised KeyError: 'no such key'")
    with pytest.raises(RuntimeError, match=r"^sample 0, index \d+: OSError: stale file handle$"):
        loader(Unreadable(), workers).load(Cursor(0, BATCH))


def test_corrupt_samples_are_replaced_within_their_budget(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the next one that is not, in any number of workers, in later epochs and after a restart."""
    found = []
    for workers, first in ((0, 0), (2, 0), (1, 3)):
        read = loader(Broken(), workers, corrupt_samples=3)
        steps = [flat(read.load(Cursor(number * BATCH, BATCH))) for number in range(first, 8)]
        found.append(steps[3 - first :])
        assert read.corrupt_count == 3
    assert found[0] == found[1] == found[2]
    plain = [flat(loader(Noisy(), 0).load(Cursor(number * BATCH, BATCH))) for number in range(3, 8)]
    for step, without in zip(found[0], plain, strict=True):
        for index, original in zip(step[0], without[0], strict=True):
            assert index == {4: 6, 5: 6, 11: 12}.get(int(original), original)
    text = capfd.readouterr().out
    assert "(4.jpg): OSError: image file is truncated; replaced by the next one (" in text
    assert "(3 of at most 3 corrupt)" in text
    for workers in (0, 1):
        read = loader(Broken(), workers, corrupt_samples=2)
        with pytest.raises(
            DataError,
            match=r"3 corrupt samples of 20 are more than .*corrupt_samples 2; fix: repair",
        ):
            for number in range(8):
                read.load(Cursor(number * BATCH, BATCH))
    alone = SampleLoader(AllBroken(), default_collate, seed=3, batch_size=2, corrupt_samples=9)
    with pytest.raises(DataError, match="all 2 samples are corrupt; fix: repair them"):
        alone.load(Cursor(0, 2))
    with pytest.raises(RuntimeError, match=r"\(\d+.jpg\): OSError: image file is truncated"):
        for number in range(8):
            loader(Broken(), 0).load(Cursor(number * BATCH, BATCH))


def context(tmp_path: Path, **options: object) -> WorkloadContext:
    values = {
        "workload": f"{__name__}:Lines",
        "workload_options": options,
        "training": {"batch_size": 8},
    }
    config = RunConfig.model_validate(values)
    return WorkloadContext(config=config, store=Store.open(str(tmp_path)), project_root=tmp_path)


def test_ten_lines_pass_the_examination_of_a_workload(tmp_path: Path) -> None:
    own = context(tmp_path)
    trial = try_workload(own.config, own)
    assert "evaluate gives held_out_loss" in trial.text and trial.shape is not None
    assert (
        trial.shape.parameters == 25
        and trial.shape.flops_per_sample == 150
        and trial.shape.units == 2
    )
    workload = Lines(own)
    batch = workload.next_batch(workload.model(), Cursor(0, 5))
    parts = batch.split(3)
    assert [part.weight for part in parts] == [1, 2, 2]
    assert torch.equal(torch.cat([part.content["x"] for part in parts]), batch.content["x"])
    names = []
    for part in parts:
        names += part.content["name"]
    assert names == batch.content["name"]
    empty = workload.next_batch(workload.model(), Cursor(3, 0))
    assert empty.weight == 0 and empty.content["x"].shape == (0, 1)
    assert isinstance(empty, Samples)


def test_the_fingerprint_is_that_of_the_data_and_not_of_the_workers(tmp_path: Path) -> None:
    first = Lines.prepare(context(tmp_path))
    assert (
        first
        == Lines.prepare(context(tmp_path, workers=7))
        != Lines.prepare(context(tmp_path, split="b"))
    )
    for options, said in (
        ({"workers": -2}, "workers is -2"),
        ({"worker_start": "thread"}, "worker_start is 'thread'"),
    ):
        with pytest.raises(DataError, match=rf"workload_options\.{said}; fix"):
            Lines(context(tmp_path, **options))


def test_a_node_with_different_data_than_prepared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = {}
    for place in ("a", "moved/b"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(3):
            (tmp_path / place / f"{number}.bin").write_bytes(bytes(number))
        monkeypatch.setenv("HEADLINE_FILES", str(tmp_path / place))
        prepared[place] = OfFiles.prepare(context(tmp_path))
    assert prepared["a"] == prepared["moved/b"], "another mount point does not matter"
    own = replace(context(tmp_path), prepared=prepared["a"])
    OfFiles(own)
    (tmp_path / "moved/b" / "2.bin").write_bytes(b"")
    with pytest.raises(
        DataError,
        match=r"other data on this node .*: 3 samples on both, but files have other names",
    ):
        OfFiles(own)
    (tmp_path / "moved/b" / "2.bin").unlink()
    with pytest.raises(
        DataError, match=r"other data on this node .*: 2 samples instead of 3; fix: copy or mount"
    ):
        OfFiles(own)
    OfFiles(replace(own, prepared={"fingerprint": "of an older version"}))


def test_the_evaluation_is_the_same_at_any_number_of_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    rows: list[Tensor] = []
    for rank in range(3):
        workload = Lines(context(tmp_path))
        object.__setattr__(workload.context, "rank", rank)
        object.__setattr__(workload.context, "world_size", 3)
        object.__setattr__(workload.context, "gather", lambda row: rows.append(row) or row[None])
        with torch.no_grad():
            workload.evaluate(model)
    with torch.no_grad():
        alone = Lines(context(tmp_path)).evaluate(model)["held_out_loss"]
    assert float(sum(rows)) / 10 == pytest.approx(alone, rel=1e-6)


def test_the_example_of_the_guide_passes_the_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    page = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text()
    code = re.search(
        r"```python\n(import torch\nfrom torch import Tensor, nn\nfrom torchvision.*?)```",
        page,
        re.DOTALL,
    )
    assert code is not None
    text = code[1].replace("/data", str(tmp_path / "data"))
    # A large package: the example's crop without it
    if importlib.util.find_spec("torchvision") is None:
        text = text.replace("from torchvision.transforms import v2\n", "from PIL import Image\n")
        text = re.sub(
            r"SHRINK = .*\n",
            "def SHRINK(one):\n    at = torch.randint(9, ()).item()\n    return "
            "torch.frombuffer(bytearray(one.crop((at, 0, at + 64, 64)).tobytes()), "
            "dtype=torch.uint8).view(64, 64, 3).permute(2, 0, 1) / 255\n",
            text,
        )
    (tmp_path / "pictures.py").write_text(text)
    for part in ("train", "held_out"):
        for colour, name in ((20, "dark"), (220, "light")):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(4):
                image.new("RGB", (72, 64), (colour, number, 0)).save(
                    tmp_path / "data" / part / name / f"{number}.png"
                )
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig.model_validate(
        {"workload": "pictures:Pictures", "training": {"batch_size": 4}}
    )
    own = WorkloadContext(config=config, store=Store.open(str(tmp_path)), project_root=tmp_path)
    assert "evaluate gives held_out_loss" in try_workload(config, own).text

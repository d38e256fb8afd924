"""State of a user's script: any state dict survives the way through JSON, and a loader goes on at
any batch.
"""

from __future__ import annotations

import ast
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ebbflow.training.attach.capture import ScriptState
from ebbflow.training.attach.guards import describe_promise
from ebbflow.training.attach.influence import (
    Influence,
    Kind,
    Place,
    ScriptFile,
    find_influence,
    find_random_draws,
)
from ebbflow.training.attach.script_state import ScriptWatch
from ebbflow.training.attach.state import (
    BatchSource,
    StrayReads,
    find_enumerate,
    find_frozen,
    find_generators,
    join_state,
    restore_frozen,
    split_state,
)
from ebbflow.training.checkpoint.restore import RestoreResult, RestoreSeconds
from ebbflow.training.errors import AttachError
from ebbflow.training.gang import Gang
from ebbflow.tryout.resume_findings import (
    LostState,
    compare,
    find_deciding,
    find_passing,
    find_unlike,
)
from ebbflow.tryout.resume_patches import Places, explain
from ebbflow.tryout.script_copy import copy_folder
from ebbflow.tryout.script_tracer import Tracer, TrainedWeights
from tests.support.attached_scripts import ROOT

GLOBAL = random.Random(7)

BEST = """
best, total = 1e9, 0
for epoch in job.epochs(9):
    total = 0
    for batch in job.batches(loader):
        total += train(model, batch)
    {last}

def keep(model, loss):
    torch.save(model.state_dict(), "best.pt")
    return loss
"""
SAVE_BEST = "mean = total / 9\n    if mean < best:\n        best = mean; torch.save(1, 'best.pt')"
EPOCHS = """
for epoch in job.epochs(4, loader):
    {first}
    for images, labels in {batches}:
        {skip}
        loss = loss_of(model(images), labels)
        loss.backward()
        total = total + loss
    print(epoch, loss.item(), total)
"""


class Noisy(Dataset[Any]):
    """A dataset with random numbers of its own, as augmentation has them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


class Unsized(Noisy):
    """A data set whose length only its own batch sampler would know."""

    def __len__(self) -> int:
        raise ValueError("the length is unknown")


class Growing(Noisy):
    """A data set that goes on through its own state, as a replay buffer does."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Counting(IterableDataset[Any]):
    """A dataset that goes on through its own state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        while self.next < 24:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class OwnGenerators(Noisy):
    """A dataset whose random numbers come from generators in its transforms, as some augmentation
    libraries have.
    """

    def __init__(self) -> None:
        self.transforms = {
            "crop": [numpy.random.default_rng(3)],
            "flip": numpy.random.RandomState(4),
        }
        self.generator = torch.Generator()
        self.common = torch.default_generator

    def __getitem__(self, index: int) -> tuple[int, float]:
        crop = self.transforms["crop"][0]
        flip = self.transforms["flip"]
        noise = (
            crop.random()
            + flip.rand()
            + GLOBAL.random()
            + float(torch.rand((), generator=self.generator))
        )
        return index, noise


class Stream(IterableDataset[Any]):
    """A stream without a state, whose samples have random numbers of their own."""

    def __iter__(self) -> Any:
        return (number + torch.rand(()) for number in range(24))


class Loop:
    """A class of a script, as its author keeps the optimizer."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        self.step = 3


class PlainRows(Noisy):
    """A dataset of a script without random numbers."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index


def examined_watch() -> ScriptWatch:
    watch = ScriptWatch(dict)
    for _ in range(3):
        watch.look()
    return watch


def test_a_promise_is_not_made_before_the_script_was_examined() -> None:
    found = describe_promise(
        torch.nn.Linear(2, 2),
        has_optimizer=True,
        source=None,
        same_data="sampler",
        resized="",
        stray="",
        watch=ScriptWatch(dict),
    )
    assert found == {"level": "not yet examined", "same_data": "sampler", "reasons": []}


def test_a_promise_names_what_may_differ() -> None:
    def promise(loader: Any, **facts: Any) -> dict[str, Any]:
        if loader is None:
            source = None
        else:
            source = BatchSource(loader, 1, print)
        common = {
            "has_optimizer": True,
            "same_data": "random states",
            "resized": "",
            "stray": "",
            "watch": examined_watch(),
        }
        return describe_promise(torch.nn.Linear(2, 2), source=source, **(common | facts))

    assert promise(DataLoader(Noisy())) == {
        "level": "bit for bit",
        "same_data": "sampler",
        "reasons": [],
    }
    assert promise(None) == {"level": "bit for bit", "same_data": "random states", "reasons": []}
    assert promise(None, resized="2 ranks, then 1")["level"] == "within tolerance"
    stream = promise([1, 2])
    assert (
        stream["level"] == "not exact"
        and not stream["same_data"]
        and "list has no sampler" in stream["reasons"][0]
    )
    stray = promise(None, stray="a.py:3")
    assert (
        stray["level"] == "not exact"
        and not stray["same_data"]
        and "a.py:3 draws" in stray["reasons"][0]
    )
    assert promise(None, has_optimizer=False)["reasons"] == [
        "attach was given no optimizer, so that its state starts anew"
    ]


def test_a_state_dict_survives() -> None:
    state = OrderedDict(
        steps=3,
        rate=math.inf,
        name="x",
        flags=(True, None),
        milestones=Counter([2, 2, 3]),
        raw=b"\x00\xff",
        nested={0: [torch.arange(3)], (1, "a"): {"empty": b""}},
    )
    tensors: dict[str, torch.Tensor] = {}
    form = json.loads(json.dumps(split_state(state, "state.x", tensors), allow_nan=False))
    found = join_state(form, tensors)
    assert torch.equal(found["nested"][0].pop(), state["nested"][0].pop())  # type: ignore[index]
    assert found == state and type(found) is OrderedDict and type(found["milestones"]) is Counter
    with pytest.raises(AttachError, match=r"state\.y\.0: a .*Generator.* fix: "):
        split_state({"generator": torch.Generator()}, "state.y", {})


def read(source: BatchSource, epoch: int, skip: int) -> list[Any]:
    read_batches = []
    for batch in source.epoch(epoch, skip):
        read_batches.append([part.tolist() for part in batch])
    return read_batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_at_any_batch(workers: int) -> None:
    def source() -> BatchSource:
        torch.manual_seed(5)
        loader = DataLoader(
            Noisy(), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        return BatchSource(loader, 11, print)

    torch.manual_seed(1)
    whole = source()
    epochs = [read(whole, epoch, 0) for epoch in range(2)]
    assert epochs[0] != epochs[1] and sorted(
        index for batch in epochs[1] for index in batch[0]
    ) == list(range(24))
    torch.manual_seed(2)  # the order does not depend on the state of torch's generator
    resumed = read(source(), 1, 2)
    indices = [batch[0] for batch in resumed]
    assert indices == [batch[0] for batch in epochs[1][2:]]
    # Their random numbers depend on the batch alone; those of this process are part of the commit
    if workers:
        assert resumed == epochs[1][2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_generators_of_a_dataset_give_each_batch_the_same_numbers(workers: int) -> None:
    def source() -> BatchSource:
        return BatchSource(
            DataLoader(OwnGenerators(), batch_size=4, shuffle=True, num_workers=workers), 11, print
        )

    own = torch.get_rng_state()
    whole = source()
    epochs = [read(whole, epoch, 0) for epoch in range(2)]
    noise = []
    for epoch in epochs:
        for batch in epoch:
            noise += batch[1]
    assert (
        len(set(noise)) == 48
        and len(find_generators(OwnGenerators())) == 4
        and not find_generators(Noisy())
    )
    assert read(source(), 1, 2) == epochs[1][2:]
    assert torch.equal(own, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_state_gives_the_same_batches_when_it_is_read_again(
    workers: int,
) -> None:
    def source() -> BatchSource:
        persistent = {"num_workers": workers, "persistent_workers": workers > 0}
        return BatchSource(DataLoader(Stream(), batch_size=4, **persistent), 5, print)

    torch.manual_seed(1)
    first, whole = (
        [batch.tolist() for batch in read] for read in map(source().epoch, (2, 3), (0, 0))
    )
    torch.manual_seed(2)  # the model of another run has drawn other numbers
    own = torch.get_rng_state()
    rest = [batch.tolist() for batch in source().epoch(3, 4)]
    assert rest == whole[4:] and torch.equal(torch.get_rng_state(), own)
    assert first != whole


def test_a_loop_that_counts_its_batches_from_0_is_named() -> None:
    class Job:
        batch = 3

    def batches() -> Any:
        yield find_enumerate(sys._getframe(1))

    for _, place in enumerate(batches()):
        assert place.startswith("test_attached_state.py:") and place.endswith(": enumerate")
    for number, place in enumerate(batches(), Job.batch):
        assert number == 3 and not place


def test_a_loader_that_a_script_reads_across_steps_is_named() -> None:
    def read(*saved: Any, gradients: bool = True, steps: tuple[int, ...] = (4, 5)) -> str:
        said: list[str] = []
        strays = StrayReads(saved, said.append)
        loader = DataLoader(saved[0] if saved else Noisy(), batch_size=4)
        with strays.watch(), torch.set_grad_enabled(gradients):
            batches = iter(loader)
            for step in steps:
                strays.step = step
                next(batches)
        assert bool(said) == bool(strays.found)
        return strays.found

    assert read().startswith("test_attached_state.py:")
    assert not read(gradients=False) and not read(steps=(4, 4)) and not read(steps=(0, 0)), (
        "an evaluation, and the job"
    )
    assert not read(Counting()), "its position is saved with the job"


def test_the_doctor_names_an_index_by_which_a_script_accumulates() -> None:
    def run(numbers: list[int], weights: str) -> list[dict[str, Any]]:
        common = {"objects": {}, "rng": {}, "batch": "b"}
        return [
            common | {"params": letter, "counters": {"i": i}}
            for letter, i in zip(weights, numbers, strict=True)
        ]

    whole = run([0, 1, 2, 3, 0, 1, 2, 3], "abcdefgh")
    assert compare(whole, run([0, 1, 2], "cDE"), 4) == (2, [("index", "i")])
    assert compare(whole, run([2, 3, 0], "cde"), 4) == (2, [])


def test_the_doctor_sees_the_attributes_of_a_scripts_own_classes(tmp_path: Path) -> None:
    loop = Loop()
    others = Counter("ab")
    both = {"loop": loop, 3: [loop]}
    tracer = Tracer([tmp_path / "trace"], 0, 1, Path(__file__).parent)
    found = dict(tracer.variables(sys._getframe()))
    assert found["loop"] is loop and found["others"] is others
    assert found["loop.optimizer"] is loop.optimizer and found["loop.step"] == 3
    assert (
        found["both['loop']"] is loop is found["both[3][0]"]
        and found["both['loop'].step"] == both["loop"].step
    )
    assert not any(name.startswith("others.") for name in found)


def test_the_doctor_takes_a_dict_of_moving_averages_for_a_state_and_not_a_batch() -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    weights = TrainedWeights(list(model.parameters()), model)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert weights.state_of(average) is average and weights.state_of(list(average.values()))
    for other in (
        model.state_dict(),
        [parameter.grad for parameter in model.parameters()],
        {"x": torch.ones(4, 3)},
        [],
    ):
        assert weights.state_of(other) is None

    def record(params: str, average: str, snapshot: str = "") -> dict[str, Any]:
        objects = {"average": ["dict", average]} | (
            {"snapshot": ["dict", snapshot]} if snapshot else {}
        )
        return {"params": params, "objects": objects, "counters": {}, "rng": {}}

    whole = [record("a", "1"), record("b", "2"), record("c", "3", "s"), record("d", "4", "s")]
    assert compare(whole, [record("c", "1")], 3) == (2, [("dict", "average")])
    assert compare(whole, [record("c", "3")], 3) == (2, [])
    text = explain(
        {"a.py": "average = {}"}, LostState("dict", "average"), Places("a.py", "a.py:7", "a.py:5")
    )
    assert text[1:] == ["      advice (not tried): save its state, and load it"]


def test_the_doctor_excuses_numbers_that_begin_anew_in_each_epoch_or_repeat_another() -> None:
    source = (
        "step = 0\nfor epoch in range(3):\n  correct = 0\n  for i, x in enumerate(loader):\n    "
        "step += 1\n"
    )
    passing = find_passing([source + "def count(self):\n  total = 0\nwhile True: count(1)\n"])
    assert passing == {"correct", "i", "total"}

    def record(params: str, **counters: int) -> dict[str, Any]:
        return {"params": params, "objects": {}, "counters": counters, "rng": {}}

    whole = [record(letter, i=n, step=n, own=n) for n, letter in enumerate("abcdef")]
    assert compare(whole, [record("d", i=0, step=3, own=0)], 4, passing=passing) == (3, [])
    lost = [record("d", i=0, step=0, own=0)]
    assert compare(whole, lost, 4, passing=passing, deciding=frozenset({"step"})) == (
        3,
        [("counter", "step")],
    )


def test_the_doctor_only_remarks_on_counts_that_decide_nothing() -> None:
    def run(weights: str, wall: int) -> list[dict[str, Any]]:
        counts = [
            {"saves": n // 2, "m.n": 2 * n, "step": n, "wall": wall + n}
            for n in range(len(weights))
        ]
        rest = {"objects": {}, "rng": {}}
        return [
            rest | {"params": letter, "counters": count}
            for letter, count in zip(weights, counts, strict=True)
        ]

    whole = run("abcdef", 1000)
    resumed = run("def", 9000)
    unlike = find_unlike(whole, run("abcd", 1007))
    assert unlike == {"wall"} and not find_unlike(whole, run("abcd", 1000))
    decides = frozenset({"step"})
    at, found = compare(whole, resumed, 4, deciding=decides, unlike=unlike)
    assert at == 3 and set(found) == {("counter", "step"), ("unused", "saves"), ("unused", "m.n")}
    at, found = compare(whole, run("dEF", 9000), 4, deciding=decides, unlike=unlike)
    assert set(found) == {("counter", "step"), ("counter", "saves"), ("counter", "m.n")}, (
        "one of them may explain it"
    )
    for record in (
        whole + resumed
    ):  # of two counts with the same values, the one that decides is named
        record["counters"] = {"twin": record["counters"]["step"]} | record["counters"]
    assert ("counter", "step") in compare(whole, resumed, 4, deciding=decides, unlike=unlike)[1]


@pytest.mark.parametrize(
    ("text", "deciding"),
    [
        ("while t.step < total:\n  t.step += 1\n  seen += 8", {"t", "step", "total"}),
        ("for epoch in range(first, 5):\n  seen += 8\n  print(f'{seen}')", {"epoch"}),
        ("for n in range(total - done):\n  seen += 8", set()),
        (
            "while True:\n  step += 1\n  if step >= 9: break\n  if step - last > 2: last = step",
            {"step"},
        ),
        ("def tick(self):\n  if self.n % 2: return\n  print(self.n)", set()),
        ("if step > 1000: group['lr'] = 0.1", {"step"}),
        ("lr = schedule(step)", {"schedule", "step"}),
        ("torch.save({'at': (step, 1), 'name': f'{saves}'}, f'{saves}.pt')", {"step"}),
        ("trainer.save_to(path, at=step)\nlog(seen)", {"path", "step"}),
    ],
)
def test_the_doctor_knows_the_counts_that_decide_something(text: str, deciding: set[str]) -> None:
    assert find_deciding([text]) == deciding


def test_the_doctor_looks_for_counts_in_the_saved_file() -> None:
    text = "state = {'global': step}\nlog({'seen': seen})"
    assert find_deciding([text]) == {"step", "seen"}, "no save was seen"
    in_file = {("step", "/global"), ("saves", "/global"), ("t.epoch", "/epoch")}
    assert find_deciding([text], in_file) == {"step", "epoch"}
    assert find_deciding([text], set()) == set()
    assert find_deciding(
        ["json.dump({'step': t.step}, file)\nlog(json.dumps({'seen': seen}))"], set()
    ) == {"t", "step"}


@pytest.mark.slow
def test_the_doctor_links_large_files_and_keeps_the_originals(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shared = tmp_path / "shared"
    copy = tmp_path / "copies" / "0"
    for new in (folder / "data", folder / "runs", shared):
        new.mkdir(parents=True)
    (shared / "x.txt").write_text("shared")
    (folder / "train.py").write_text("text")
    (folder / "latest").symlink_to("train.py")
    (folder / "data" / "outer").symlink_to("../../shared")
    for name in ("large.bin", "checkpoint.pt", "appended.bin", "removed.bin"):
        with open(folder / "data" / name, "wb") as file:
            file.truncate(9 << 20)
    copy_folder(folder, copy)
    data = copy / "data"
    assert (copy / "train.py").read_text() == "text" and not (copy / "train.py").is_symlink()
    assert (copy / "latest").readlink() == copy / "train.py" and not (copy / "runs").exists()
    assert (data / "large.bin").readlink() == folder / "data" / "large.bin"
    assert (data / "outer").readlink() == shared and (
        data / "outer" / "x.txt"
    ).read_text() == "shared"

    code = (
        "import os, torch, pathlib; from ebbflow.tryout.script_tracer import Tracer; folder = "
        "pathlib.Path.cwd()\n"
    )
    code += (
        "Tracer([folder / 'trace'], 0, 1, folder).install(); torch.save(1, 'data/checkpoint.pt')\n"
    )
    code += (
        "open('data/appended.bin', 'ab').write(b'x'); open('data/outer/x.txt', "
        "'w').write('changed')\n"
    )
    code += (
        "os.mkdir('data/outer/new'); os.remove('data/removed.bin'); open('train.py', "
        "'a').write('more')\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert (data / "appended.bin").stat().st_size == (9 << 20) + 1
    assert (data / "outer" / "x.txt").read_text() == "changed" and (data / "outer" / "new").is_dir()
    assert (data / "checkpoint.pt").stat().st_size < 9000 and not (data / "removed.bin").exists()
    assert [path.name for path in shared.iterdir()] == ["x.txt"] and (
        shared / "x.txt"
    ).read_text() == "shared"
    assert {path.stat().st_size for path in (folder / "data").iterdir() if path.is_file()} == {
        9 << 20
    }


@pytest.mark.slow
def test_requires_grad_is_restored_under_the_names_without_wrappers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.requires_grad = False
    frozen = find_frozen(model)
    said = []
    assert frozen == ["0.weight"]
    model[0].weight.requires_grad = True
    model[1].bias.requires_grad = False
    restore_frozen(torch.compile(model), frozen, said.append)  # type: ignore[arg-type]
    assert find_frozen(model) == frozen and "0.weight, 1.bias" in said[0]
    restore_frozen(model, frozen, said.append)
    restore_frozen(model, None, said.append)
    assert len(said) == 1


def test_a_dataset_with_a_state_resumes_from_it() -> None:
    source = BatchSource(DataLoader(Counting(), batch_size=4), 11, print)
    batches = source.epoch(0, 0)
    first = [next(batches).tolist() for _ in range(2)]
    state = source.state()
    again = BatchSource(DataLoader(Counting(), batch_size=4), 11, print)
    again.load(state)
    assert first + [batch.tolist() for batch in again.epoch(0, 2)] == [
        list(range(n, n + 4)) for n in range(0, 24, 4)
    ]


@pytest.mark.parametrize(
    ("samples", "ranks", "batch", "second", "warned"),
    [
        (24, 1, 2, False, False),
        (20, 1, 2, False, True),
        (20, 2, 2, False, False),
        (20, 1, 0, False, False),  # between two epochs, the next of which may read other data
        (20, 1, 2, True, False),  # of several loaders the restored one is not known
    ],
)
def test_a_data_set_of_another_length_is_named_once_after_a_restore(
    samples: int, ranks: int, batch: int, second: bool, warned: bool
) -> None:
    def open_state() -> ScriptState:
        return ScriptState(Gang(), torch.nn.Linear(1, 1), None, {})

    said: list[str] = []
    before = open_state()
    before.open_source(DataLoader(Noisy(), batch_size=4), said.append)
    if second:
        before.open_source(DataLoader([1, 2]), said.append)
    before.batch = batch
    captured = before.capture(5)
    extra = json.loads(json.dumps(captured.fields))
    spent = RestoreSeconds(list=0.0, download=0.0, verify=0.0, load=0.0, agree=0.0)
    restored = RestoreResult(
        step=5,
        extra=extra,
        key="commits/a",
        rng="restored",
        world_size=ranks,
        bytes_read=0,
        seconds=0.0,
        split=spent,
        further=captured.tensors,
    )
    after = open_state()
    after.restore(restored, said.append)
    loader = DataLoader(list(range(samples)), batch_size=4)
    after.open_source(loader, said.append)
    after.open_source(loader, said.append)
    after.open_source(DataLoader([1, 2]), said.append)
    assert len(said) == warned
    if warned:
        assert "had 24 samples at the restored commit and has 20 now" in said[0]


def test_a_data_set_whose_length_cannot_be_had_or_that_has_a_state_is_not_compared() -> None:
    unsized = DataLoader(Unsized(), batch_sampler=[[0, 1], [2, 3]])
    assert BatchSource(unsized, 11, print).samples is None
    assert BatchSource(DataLoader(Growing(), batch_size=4), 11, print).samples is None
    assert BatchSource(DataLoader(Noisy(), batch_size=4), 11, print).samples == 24


def test_a_torchdata_loader_resumes_from_its_state() -> None:
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata: requirements-dev.txt"
    )

    def source() -> BatchSource:
        torch.manual_seed(3)
        return BatchSource(
            loaders.StatefulDataLoader(Noisy(), batch_size=4, shuffle=True), 11, print
        )

    whole = source()
    batches = whole.epoch(0, 0)
    first = [next(batches)[0].tolist() for _ in range(2)]
    tensors: dict[str, torch.Tensor] = {}
    form = split_state(whole.state(), "s", tensors)
    state = json.loads(json.dumps(form))
    rest = [batch[0].tolist() for batch in batches]
    again = source()
    again.load(join_state(state, tensors))
    kept = torch.get_rng_state()
    assert (
        form == state
        and [batch[0].tolist() for batch in again.epoch(0, 2)] == rest
        and len(first + rest) == 6
    )
    assert torch.equal(kept, torch.get_rng_state()), (
        "the script's own random numbers are not drawn from"
    )


def draw_in_collate(rows: list[Any]) -> torch.Tensor:
    return torch.rand(len(rows))


@pytest.mark.parametrize(
    ("first", "batches", "skip", "name", "carried"),
    [
        # Written anew by the first batch of each epoch
        ("model.train()", "loader", "pass", "loss", False),
        ("model.train()", "tqdm(enumerate(loader))", "pass", "loss", False),
        ("model.train()", "job.batches(data)", "pass", "loss", False),
        ("total = 0", "loader", "pass", "total", False),
        ("scale(model, loss); loss.backward()", "loader", "pass", "loss", True),
        # The queue may be empty, and the first batch may be skipped
        ("model.train()", "queue", "pass", "loss", True),
        ("model.train()", "loader", "if labels is None: continue", "loss", True),
    ],
)
def test_a_variable_is_carried_between_epochs_if_it_is_read_before_it_is_written(
    first: str, batches: str, skip: str, name: str, carried: bool
) -> None:
    """A commit at the end of an epoch is made at the line of the loop over the epochs."""
    tree = ast.parse(EPOCHS.format(first=first, batches=batches, skip=skip))
    machines = frozenset({"loader", "model"})
    place = Place(source=ScriptFile(tree), body=tree.body, line=2, machines=machines)
    assert find_influence(place, name, Kind.TENSORS).trains is carried


@pytest.mark.parametrize(
    ("last", "name", "influence"),
    [
        (SAVE_BEST, "best", Influence(save_line=9)),
        # Its mean is that of the rest of the epoch after a resume in the middle of one
        (SAVE_BEST, "total", Influence(save_line=9, is_reset=True)),
        ("print(best, total)", "total", Influence(is_reset=True)),
        ("scheduler.step(total)", "total", Influence(trains=True, is_reset=True)),
        ("if total < best:\n        best = keep(model, total)", "best", Influence(save_line=8)),
        ("if total < best:\n        best = total\n    save_model(model)", "best", Influence()),
        (
            "best = min(best, total)\n    if best < total - 1:\n        break",
            "best",
            Influence(trains=True),
        ),
    ],
)
def test_a_variable_that_decides_what_the_script_saves_is_told_from_one_that_trains(
    last: str, name: str, influence: Influence
) -> None:
    tree = ast.parse(BEST.format(last=last))
    source = ScriptFile(tree)
    source.functions["keep"] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    place = Place(source=source, body=tree.body, line=5, machines=frozenset({"loader", "model"}))
    assert find_influence(place, name, Kind.PLAIN) == influence


def test_the_place_of_a_random_draw_in_a_dataset_is_found() -> None:
    assert find_random_draws(Noisy(), default_collate).startswith("test_attached_state.py:")
    assert find_random_draws(PlainRows(), draw_in_collate).startswith("test_attached_state.py:")
    assert find_random_draws(PlainRows(), default_collate, [1], None) == ""

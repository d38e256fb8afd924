"""Base of workloads with a map-style dataset: you write only the dataset, the model and the loss.

The order is a function of the seed: each epoch reads every index once, in a new order, at any
number of ranks. Random numbers are seeded for each sample, so augmentation is the same after a
resume and at another world size. Worker processes read ahead, so the training loop does not wait
for data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate, get_worker_info

from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.process import describe_exit
from ebbflow.core.remarks import remark
from ebbflow.training.attach.state import derive_seed, random_numbers_of, seed_all
from ebbflow.training.data.tokens import SampleOrder
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.training.workload_loader import MISTAKES, describe_mistake
from ebbflow.workloads.readers.loader_processes import (
    AHEAD,
    choose_workers,
    count_bytes,
    name_output,
)

T = TypeVar("T")
_NOTHING = -1  # a worker reads no sample
_MOST_DEATHS = 5  # of worker processes of a rank, since it started
START_METHODS = ("fork", "forkserver", "spawn")

_DEATH_FIX = (
    "fix: read this sample with workload_options.workers 0 to see why, or give the machine more "
    "memory if its kernel killed it"
)
# Files of a larger dataset whose sizes are compared; a mounted bucket takes 50 ms for each
_SIZES_COMPARED = 1_000

# Those which may change when a job is continued
_FREE_OPTIONS = ("corrupt_samples", "worker_start")


class Indexed(Protocol):
    """A map-style dataset, which has a length and a sample for each index.

    Examples are a torch `Dataset` and a list.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Samples:
    """Batch of one rank's samples in a step.

    `content` is what the collate function returns: nested tensors.
    """

    content: Any
    count: int

    @property
    def weight(self) -> float:
        return float(self.count)

    def split(self, parts: int) -> list[Samples]:
        bounds = [number * self.count // parts for number in range(parts + 1)]
        cuts = itertools.pairwise(bounds)
        return [
            Samples(_slice(self.content, first, end, self.count), end - first)
            for first, end in cuts
        ]


class SampleLoader:
    """Loader of the samples at a cursor (a position in the order of samples), with worker
    processes.

    Workers read ahead as soon as a cursor follows the one before. A worker that dies is replaced,
    and its samples are read again, in order. A sample that ends two workers ends the load.

    Args:
        batch_size: samples per step of all ranks, by which cursors advance.
        workers: number of worker processes; 0: read in this process; -1: as many as suit this
            machine.
        worker_start: how they start: fork, forkserver or spawn. The latter two pickle the dataset.
        pin_memory: whether the samples come in pinned memory, for a copy to the GPU in the
            background.
        corrupt_samples: number of samples that may be corrupt; each is named and replaced by the
            next one.
    """

    def __init__(  # noqa: PLR0913 - the options of a loader
        self,
        dataset: Indexed,
        collate: Callable[[list[Any]], Any],
        *,
        seed: int,
        batch_size: int,
        workers: int = 0,
        worker_start: str = "fork",
        pin_memory: bool = False,
        corrupt_samples: int = 0,
    ) -> None:
        self._reader = _Reader(
            dataset, collate, seed, shuffled=True, corrupt_samples=corrupt_samples
        )
        self._batch_size = batch_size
        self._workers = workers
        self._pin_memory = pin_memory
        self._worker_start = worker_start
        self._batch_bytes = 0
        self._expected: Cursor | None = None
        self._iterator: Any = None
        self._receiver: _Receiver | None = None
        self._died_at: list[int] = []  # the sample that each dead worker read

    def load(self, cursor: Cursor) -> Any:
        """Load and collate the samples at a cursor; the result is on the CPU.

        Raises:
            DataError: the dataset has a mistake, such as a KeyError. The message names the sample
                and the line.
            RuntimeError: the dataset raised another error, or a worker died. The message names the
                sample.
        """
        follows = cursor == self._expected
        self._expected = Cursor(cursor.first + self._batch_size, cursor.count)
        if not self._workers or not follows:
            self._stop_workers()  # they read what is not needed any more
            content = self._reader[cursor]
            self._batch_bytes = self._batch_bytes or count_bytes(content)
            return self._pin(content)
        while True:
            if self._receiver is None:
                self._iterator = self._start(cursor)
                if self._iterator is None:  # no worker fits into this machine
                    return self._pin(self._reader[cursor])
                self._receiver = _Receiver(self._iterator)
            try:
                content = self._receiver.take()
                break
            except RuntimeError as error:
                self._replace_dead_worker(error, cursor)
        if isinstance(content, _Failure):
            raise content.error
        return content

    def _pin(self, content: Any) -> Any:
        """Copy samples that this process has read to pinned memory, if they go to a GPU.

        Otherwise the copy to the GPU would make the host wait.
        """
        if not self._pin_memory:
            return content
        return _change_tensors(content, Tensor.pin_memory)

    def _stop_workers(self) -> None:
        if self._receiver is not None:
            self._receiver.end()
        self._receiver = self._iterator = None

    def _replace_dead_worker(self, error: RuntimeError, cursor: Cursor) -> None:
        """Stop all workers after one has died, so that new ones read again from the cursor.

        Raises RuntimeError if the same sample, or too many workers, have died.
        """
        sample, death = self._find_death()
        if not death:
            raise RuntimeError(str(error)) from error
        self._died_at.append(sample)
        again = sample != _NOTHING and self._died_at.count(sample) > 1
        if again or len(self._died_at) > _MOST_DEATHS:
            if again:
                count = "a second time"
            else:
                count = f"the {len(self._died_at)}th that died on this rank"
            raise RuntimeError(f"{death} ({count}); {_DEATH_FIX}") from error
        remark(f"{death}; other workers read again from sample {cursor.first} on")
        self._stop_workers()

    @property
    def corrupt_count(self) -> int:
        """Number of corrupt samples that this rank has met since it started."""
        return self._reader.corrupt_count

    def _start(self, cursor: Cursor) -> Any:
        """Start workers, and return an iterator over their batches from a cursor on.

        Return None if no worker fits into the memory.
        """
        workers, why = choose_workers(self._workers, self._batch_bytes, self._worker_start)
        if why:
            print(why, flush=True)
        if not workers:
            self._workers = 0
            return None
        self._reader.read_now = torch.full((workers,), _NOTHING, dtype=torch.int64).share_memory_()
        loader: DataLoader[Any] = DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=_Ahead(cursor, self._batch_size),
            collate_fn=_same,  # type: ignore[arg-type]
            num_workers=workers,
            prefetch_factor=AHEAD,
            pin_memory=self._pin_memory,
            worker_init_fn=name_output,
            multiprocessing_context=self._worker_start,
            generator=torch.Generator(),
        )
        before = signal.getsignal(signal.SIGCHLD)
        try:
            iterator = iter(loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise DataError(
                f"the dataset cannot be sent to a worker that starts by {self._worker_start}: "
                f"{error}; fix: a dataset and a collate that can be pickled (a static method), "
                "or workload_options.worker_start fork"
            ) from error
        # torch raises from its handler wherever the loop is. Without it, the loader finds a dead
        # worker in `next`.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)
        return iterator

    def _find_death(self) -> tuple[int, str]:
        """Find a dead worker; return the sample that it was reading, and a description of its
        death.

        The description is "" if all workers are alive.
        """
        for number, process in enumerate(getattr(self._iterator, "_workers", [])):
            code = process.exitcode
            if code not in (None, 0) and self._reader.read_now is not None:
                sample = int(self._reader.read_now[number])
                what = "between two samples"
                if sample != _NOTHING:
                    what = (
                        f"while it read sample {sample}, index "
                        f"{self._reader.indices(Cursor(sample, 1))[0]}"
                    )
                how = describe_exit(code)
                return sample, f"worker {number} that loads data {how} {what}"
        return _NOTHING, ""


class DatasetWorkload:
    """Base class of workloads with a map-style dataset.

    A subclass has `dataset`, `model` and `loss_sum`.

    Options (`workload_options`): `workers`, the processes of each rank that read ahead (2; 0: none;
    -1: as many as suit the machine), `worker_start`, how they start (fork, forkserver or spawn),
    and `corrupt_samples`, the samples that may be corrupt (0).
    """

    weight_unit = "samples"

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context
        self._parameters = 0.0
        training = context.config.training
        workers = context.options.get("workers", 2)
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < -1:
            raise DataError(
                f"workload_options.workers is {workers!r}; fix: a number of processes, such as "
                "2, or -1 to choose it"
            )
        start = context.options.get("worker_start", "fork")
        if start not in START_METHODS:
            raise DataError(
                f"workload_options.worker_start is {start!r}; fix: {', '.join(START_METHODS)}"
            )
        corrupt = context.options.get("corrupt_samples", 0)
        if not isinstance(corrupt, int) or isinstance(corrupt, bool) or corrupt < 0:
            raise DataError(
                f"workload_options.corrupt_samples is {corrupt!r}; fix: a number of samples, "
                "such as 10"
            )
        # A dataset that draws itself is the same on every rank
        with random_numbers_of(training.seed):
            train = self.dataset(True)
            held_out = self.dataset(False)
        self._loader = SampleLoader(
            train,
            self._find_collate(),
            seed=training.seed,
            batch_size=training.batch_size,
            workers=workers,
            worker_start=start,
            pin_memory=context.device.type == "cuda",
            corrupt_samples=corrupt,
        )
        self._train = train
        _compare_data(train, context.prepared)
        if held_out is None:
            self._held_out_count = 0
        else:
            self._held_out_count = min(len(held_out), context.config.data.held_out_samples)
        if held_out is not None:
            self._held_out = _Reader(
                held_out,
                self._find_collate(),
                training.seed,
                shuffled=False,
                corrupt_samples=corrupt,
            )

    @classmethod
    def prepare(cls, context: WorkloadContext) -> JsonObject:
        """Return a description of the data: a fingerprint, the number of samples, and a digest of
        the files.

        The fingerprint covers the workload's name, the options, the length and, if the dataset has
        one, its `fingerprint`.
        """
        dataset = cls(context)._train
        own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", "")
        options = {
            name: value for name, value in context.options.items() if name not in _FREE_OPTIONS
        }
        known = [context.config.workload, {**options, "workers": 0}, len(dataset), str(own)]
        found = {
            "fingerprint": hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        }
        return found | {"samples": len(dataset), "file_digest": _digest_files(dataset)}

    def dataset(self, train: bool) -> Any:
        """Return the dataset to train on or, with `train` False, the one to evaluate on.

        None means that there is no evaluation.
        """
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return the model on the meta device."""
        raise NotImplementedError

    def loss_sum(self, model: nn.Module, samples: Any) -> Tensor:
        """Return the sum (not the mean) of the losses of collated samples.

        There may be no samples.
        """
        raise NotImplementedError

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def _find_collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates samples: the subclass's `collate`, or torch's default.

        The default one is a function, since the method would be pickled with the workload.
        """
        if type(self).collate is DatasetWorkload.collate:
            return default_collate
        return self.collate

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the model's direct submodules that have parameters; each is sharded as a unit."""
        return [part for part in model.children() if list(part.parameters())]

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Samples:  # noqa: ARG002 (the interface of Workload)
        content = _move(
            self._loader.load(cursor if cursor.count else Cursor(cursor.first, 1)),
            self.context.device,
        )
        return Samples(content if cursor.count else _slice(content, 0, 0, 1), cursor.count)

    def loss(self, model: nn.Module, batch: Samples) -> Loss:
        return Loss(self.loss_sum(model, batch.content), batch.weight)

    def flops(self, batch: Samples) -> float:
        """Estimate the floating point operations of a batch: 6 per parameter and sample.

        This suits matrices. A model that shares weights over positions needs more.
        """
        if not self._parameters:
            self._parameters = float(
                sum(parameter.numel() for parameter in self.model().parameters())
            )
        return 6.0 * self._parameters * batch.weight

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss of the first `data.held_out_samples` samples of the held-out
        dataset.
        """
        if not self._held_out_count:
            return {}
        total = 0.0
        size = self.context.config.training.batch_size
        # Equally many passes on every rank
        for number in range(math.ceil(self._held_out_count / size)):
            whole = Cursor(number * size, min(size, self._held_out_count - number * size))
            share = whole.share(self.context.rank, self.context.world_size)
            content = _move(
                self._held_out[share if share.count else Cursor(whole.first, 1)],
                self.context.device,
            )
            loss = float(self.loss_sum(model, content))
            if share.count:
                total += loss
        row = torch.tensor([total], dtype=torch.float64, device=self.context.device)
        return {"held_out_loss": float(self.context.gather(row).sum()) / self._held_out_count}


def _slice(content: Any, first: int, end: int, count: int) -> Any:
    if isinstance(content, Tensor):
        return content[first:end]
    if isinstance(content, dict):
        return {key: _slice(value, first, end, count) for key, value in content.items()}
    if not isinstance(content, (list, tuple)):
        return content
    if any(isinstance(part, (Tensor, dict, list, tuple)) for part in content):
        return _like(content, [_slice(part, first, end, count) for part in content])
    if len(content) == count:  # texts, one for each sample
        return content[first:end]
    return content


def _like(content: Any, parts: list[Any]) -> Any:
    """Return the parts in a list, tuple or named tuple of the same type as `content`."""
    if hasattr(content, "_fields"):
        return type(content)(*parts)
    return type(content)(parts)


def _move(content: Any, device: torch.device) -> Any:
    return _change_tensors(content, lambda tensor: tensor.to(device, non_blocking=True))


def _change_tensors(content: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(content, Tensor):
        return change(content)
    if isinstance(content, dict):
        return {key: _change_tensors(value, change) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return _like(content, [_change_tensors(part, change) for part in content])
    return content


@dataclass(frozen=True)
class _Failure:
    """Result of a worker process that raised an exception."""

    error: Exception


class _Corrupt(Exception):
    """Error: a sample cannot be decoded."""


class _Reader:
    """Reader that loads and collates the samples at a cursor. Each worker process has a copy of it.

    Args:
        corrupt_samples: number of samples that may be corrupt. Each is replaced by the next index
            that can be read with the sample's random numbers, so the replacement does not depend on
            ranks or restarts.
    """

    def __init__(
        self,
        dataset: Indexed,
        collate: Callable[[list[Any]], Any],
        seed: int,
        *,
        shuffled: bool,
        corrupt_samples: int = 0,
    ) -> None:
        if not len(dataset):
            raise DataError(
                f"the dataset {type(dataset).__name__} is empty; fix: look at what it reads"
            )
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._shuffled = shuffled
        self._order = SampleOrder(len(dataset), seed)
        # Number of the sample that each worker reads, in shared memory
        self.read_now: Tensor | None = None
        self._budget = corrupt_samples
        # 1 for a corrupt index, in shared memory
        if corrupt_samples:
            self._corrupt = torch.zeros(len(dataset), dtype=torch.uint8).share_memory_()
        else:
            self._corrupt = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}  # it has a cache that cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = SampleOrder(len(self._dataset), self._seed)

    def indices(self, cursor: Cursor) -> list[int]:
        if self._shuffled:
            return self._order.window(cursor.first, cursor.count).tolist()
        return list(range(cursor.first, cursor.first + cursor.count))

    def __getitem__(self, cursor: Cursor) -> Any:
        worker = get_worker_info()
        if worker is None:
            with random_numbers_of(self._seed):
                return self._collate(
                    [
                        self._read(*position, None)
                        for position in enumerate(self.indices(cursor), cursor.first)
                    ]
                )
        try:
            return self._collate(
                [
                    self._read(*position, worker.id)
                    for position in enumerate(self.indices(cursor), cursor.first)
                ]
            )
        except Exception as error:  # torch would put its traceback into the message
            return _Failure(error if isinstance(error, DataError) else RuntimeError(str(error)))

    def _read(self, number: int, index: int, worker: int | None) -> Any:
        if self.read_now is not None and worker is not None:
            self.read_now[worker] = number
        for step in range(self._budget + 1):
            try:
                found = self._read_index(number, (index + step) % len(self._dataset))
                break
            except _Corrupt:
                continue
        else:
            raise DataError(f"all {len(self._dataset)} samples are corrupt; fix: repair them")
        if self.read_now is not None and worker is not None:
            self.read_now[worker] = _NOTHING
        return found

    def _read_index(self, number: int, index: int) -> Any:
        """Read the sample at `index`, with random numbers that are seeded by `number`.

        Raises _Corrupt if the sample is corrupt and may be replaced.
        """
        seed_all(derive_seed(self._seed, "sample" if self._shuffled else "held out", number))
        try:
            return self._dataset[index]
        except MISTAKES as error:
            raise DataError(
                f"sample {number}, index {index}: {describe_mistake(error, 'the dataset')}"
            ) from None
        except Exception as error:
            describe = getattr(self._dataset, "describe", None)
            about = f"sample {number}, index {index}{f' ({describe(index)})' if describe else ''}"
            problem = f"{about}: {type(error).__name__}: {' '.join(str(error).split())}"
            if self._corrupt is None or not _is_corrupt(error):
                raise RuntimeError(problem) from error
            # It is read again, because it may fail with some random numbers only
            known = int(self._corrupt[index])
            self._corrupt[index] = 1
            count = self.corrupt_count
            if count > self._budget:
                raise DataError(
                    f"{problem}; {count} corrupt samples of {len(self._dataset)} are more than "
                    f"workload_options.corrupt_samples {self._budget}; fix: repair them, or "
                    "allow more"
                ) from error
            if not known:
                print(
                    f"{problem}; replaced by the next one ({count} of at most {self._budget} "
                    "corrupt)",
                    flush=True,
                )
            raise _Corrupt from error

    @property
    def corrupt_count(self) -> int:
        """Number of corrupt samples that this rank has found since it started."""
        if self._corrupt is None:
            return 0
        return int(self._corrupt.sum())


def _is_corrupt(error: Exception) -> bool:
    """Return whether an error means that a sample was read, but cannot be decoded.

    An error of the operating system has a number, and does not mean that.
    """
    return isinstance(error, (ValueError, SyntaxError, EOFError)) or (
        isinstance(error, OSError) and not error.errno
    )


class _Ahead:
    """Endless sampler of the sample ranges that a rank loads step by step, from `first` on."""

    def __init__(self, first: Cursor, batch_size: int) -> None:
        self._first = first
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Cursor]:
        cursor = self._first
        while True:
            yield cursor
            cursor = Cursor(cursor.first + self._batch_size, cursor.count)


def _same(content: T) -> T:
    return content


class _Receiver(threading.Thread):
    """Thread that fetches the next batch from the workers while the training loop computes.

    The transfer takes milliseconds.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        # A worker that hangs must not keep the rank from its exit
        super().__init__(name="next-batch", daemon=True)
        self._iterator = iterator
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._asked.put(True)
        self.start()

    def run(self) -> None:
        while self._asked.get():
            try:
                self._found.put((next(self._iterator), None))
            except BaseException as error:
                # Its traceback would keep the loader of dead workers, whose finalizer fails in
                # later workers.
                self._found.put((None, error.with_traceback(None)))

    def take(self) -> Any:
        """Return the next batch, and start to fetch the one after it."""
        content, error = self._found.get()
        if error is not None:
            raise error
        self._asked.put(True)
        return content

    def end(self) -> None:
        """End the thread, and wait until it fetches no batch.

        It must not be in the middle of a batch when new workers are forked.
        """
        self._asked.put(False)
        self.join()


def _digest_files(dataset: Any) -> str:
    """Return a digest of the names and sizes of a dataset's files, or "" if it lists no files.

    The list is an attribute as in torchvision's folders: `samples`, `imgs`, `files` or `paths`.
    Names are relative.
    """
    lists = (getattr(dataset, name, None) for name in ("samples", "imgs", "files", "paths"))
    entries = next((list_ for list_ in lists if isinstance(list_, list | tuple) and list_), ())
    names = [entry[0] if isinstance(entry, list | tuple) and entry else entry for entry in entries]
    paths = [str(name) for name in names if isinstance(name, str | os.PathLike)]
    if not paths or len(paths) < len(names):
        return ""
    # Not os.path.relpath: a million calls take many seconds.
    start = os.path.commonprefix(paths).rfind(os.sep) + 1  # noqa: RUF071 (cut after a whole component)
    digest = hashlib.sha256("\n".join(path[start:] for path in paths).encode("utf-8", "replace"))
    for path in paths[:: math.ceil(len(paths) / _SIZES_COMPARED)]:
        try:
            size = os.path.getsize(path)
        except OSError:
            size = -1
        digest.update(f"{size} ".encode())
    return digest.hexdigest()


def _compare_data(dataset: Any, prepared: Mapping[str, Json]) -> None:
    """Raise DataError if this node's data differ from those on the node that prepared the job."""
    begin = "other data on this node than where they were prepared"
    fix = "fix: copy or mount the same files on all nodes, or read them from one store"
    count = prepared.get("samples")
    if count not in (None, len(dataset)):
        raise DataError(f"{begin}: {len(dataset)} samples instead of {count}; {fix}")
    digest = prepared.get("file_digest")
    if digest and digest != _digest_files(dataset):
        raise DataError(
            f"{begin}: {len(dataset)} samples on both, but files have other names or sizes; {fix}"
        )

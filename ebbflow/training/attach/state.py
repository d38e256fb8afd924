"""The state of a user's script besides model and optimizer, and the order of its data.

`split_state` separates a state dict into JSON, in which paths stand for tensors, and tensors;
`join_state` joins them.
"""

import contextlib
import hashlib
import itertools
import json
import linecache
import math
import os
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import FrameType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ebbflow.core.json_values import Json
from ebbflow.training.checkpoint.state import SHARED_PREFIX, model_tensors
from ebbflow.training.errors import AttachError

_LARGEST_BUFFER_BYTES = 16 * 2**20
_Iterate = Callable[[Any], Iterator[Any]]
_MAPPINGS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES = {"list": list, "tuple": tuple, "set": set}
# Limits of the search for random generators
_MOST_ITEMS = 64  # of a list
_MOST_OBJECTS = 10_000  # in all


class BatchSource:
    """Reader of a user's loader that can begin at any batch of any epoch.

    The order of an epoch depends only on the seed and the epoch. Batches to skip are left out in
    the sampler, so that the dataset does not load them. A loader or dataset with state_dict and
    load_state_dict is restored from its own state instead.

    Args:
        seed: this rank's seed.
        say: prints a warning.
        iterate: makes an iterator of the loader; default: the loader's own `__iter__`.
    """

    def __init__(
        self, loader: Any, seed: int, say: Callable[[str], None], iterate: _Iterate | None = None
    ) -> None:
        self.loader = loader
        self._seed = seed
        self._say = say
        self._iterate: _Iterate = iterate or getattr(type(loader), "__iter__", iter)
        dataset = getattr(loader, "dataset", None)
        stock = type(loader) is DataLoader
        workers = getattr(loader, "num_workers", 0) > 0
        # By accelerate
        self._prepared = hasattr(loader, "skip_batches") and hasattr(loader, "base_dataloader")
        self._stateful: Any = None
        if self._prepared:
            pass
        elif not stock and _is_stateful(loader):
            self._stateful = loader
        elif not workers and _is_stateful(dataset):
            self._stateful = dataset
        self._in_sampler = isinstance(loader, DataLoader) and not isinstance(
            dataset, IterableDataset
        )
        generator = getattr(loader, "generator", None)
        if generator is None:
            self._generator_seed = None
        else:
            self._generator_seed = generator.initial_seed()
        self._pending_state: Any = None
        self._wrapped = False
        if not hasattr(loader, "__iter__"):
            raise AttachError(
                f"job.batches: a {type(loader).__name__} cannot be iterated; fix: pass a DataLoader"
            )

    @property
    def same_data(self) -> str:
        """How a resumed run gets the same batches: "sampler" or "state_dict of …"; "" if it may
        not.
        """
        if self._stateful is not None:
            return f"state_dict of {type(self._stateful).__name__}"
        if self._in_sampler:
            return "sampler"
        return ""

    @property
    def length(self) -> int | None:
        """Number of batches per epoch; None if unknown."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    @property
    def samples(self) -> int | None:
        """Number of samples of the data set; None if it has no sampler, no length, or a state that
        changes it.
        """
        if not self._in_sampler or self._stateful is not None:
            return None
        try:
            return len(self.loader.dataset)
        except Exception:  # of the user's class; nothing depends on the number but a warning
            return None

    def state(self) -> Any:
        if self._stateful is None:
            return None
        return self._stateful.state_dict()

    def load(self, state: Any) -> None:
        self._pending_state = state

    def epoch(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return an iterator over the batches of `epoch`, without the first `skip` batches."""
        names = ("sampler", "batch_sampler", "dataset")
        parts = (getattr(self.loader, name, None) for name in names)
        for part in (self.loader, *parts):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
                break
        seed = derive_seed(self._seed, epoch)
        if self._stateful is not None:
            first = skip
            state = self._pending_state
            self._pending_state = None
            if state is not None:
                self._stateful.load_state_dict(state)
            if state is not None or skip == 0:
                return self._from_stream(seed, 0, first=first)
        shared = getattr(self.loader, "synchronized_generator", None)
        if shared is not None:  # of accelerate
            shared.manual_seed(seed)
        generator = getattr(self.loader, "generator", None)
        if generator is not None:
            generator.manual_seed(derive_seed(self._generator_seed, epoch))
        if not self._in_sampler or self._prepared or self._stateful is not None:
            if skip and not self._prepared:
                self._say(
                    f"reading {skip} batches of epoch {epoch} again to skip them: the loader has "
                    "no state_dict"
                )
            return self._from_stream(seed, skip)
        return self._from_sampler(seed, skip)

    def _from_stream(self, seed: int, skip: int, *, first: int = 0) -> Iterator[Any]:
        """Yield the batches of a loader without a sampler, except those with numbers below `skip`.

        `first` is the number of the loader's first batch.

        A batch's random numbers depend only on its number. None are drawn from the script's own,
        because a resumed run starts the loader once more, and that draws one.
        """
        if self._prepared:
            loader = self.loader.base_dataloader
        else:
            loader = self.loader
        # They would keep random states of earlier epochs
        if getattr(loader, "persistent_workers", False) is True:
            object.__setattr__(loader, "persistent_workers", False)
        with random_numbers_of(seed):  # the seed of the workers
            batches = iter(self._iterate(self.loader))
        for number in itertools.count(first):
            with random_numbers_of(derive_seed(seed, number)):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            if number >= skip:
                yield batch

    def _from_sampler(self, seed: int, skip: int) -> Iterator[Any]:
        loader = self.loader
        if loader.batch_sampler is None:  # the loader makes no batches
            name = "sampler"
        else:
            name = "batch_sampler"
        needed = name == "batch_sampler" and (
            loader.num_workers > 0 or find_generators(loader.dataset)
        )
        if needed and not self._wrapped:
            object.__setattr__(loader, "dataset", _SeededDataset(loader.dataset))
            self._wrapped = True
        sampler = getattr(loader, name)
        order = _EpochOrder(sampler, seed, skip, seeded=self._wrapped)
        object.__setattr__(loader, name, order)  # DataLoader refuses to change it in the usual way
        workers = getattr(loader, "_iterator", None)
        if workers is not None:  # persistent ones keep the sampler
            workers._index_sampler = order
        try:
            with random_numbers_of(seed):  # the seed of the workers
                return self._iterate(loader)
        finally:
            object.__setattr__(loader, name, sampler)


class StrayReads:
    """Detector of a DataLoader from which the script itself draws batches over several steps.

    A commit does not have its position, so that a resumed script draws its first batches once more.

    Args:
        saved: objects that are saved with the job. Loaders among them and in their attributes are
            no strays.
        say: prints a warning.

    Attributes:
        step: number of the step in which the script's code runs; 0 while the job itself reads.
        found: file and line that draw the batches; "" as long as there are none.
    """

    def __init__(self, saved: Iterable[Any], say: Callable[[str], None]) -> None:
        held: list[Any] = []
        for state in saved:
            held += [state, *getattr(state, "__dict__", {}).values()]
        self._saved = [getattr(value, "dataset", value) for value in held]
        self._say = say
        self.step = 0
        self.found = ""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        kind: Any = _BaseDataLoaderIter
        draw = kind.__next__

        def observe(batches: _BaseDataLoaderIter) -> Any:
            self._observe(batches, sys._getframe(1))
            return draw(batches)

        kind.__next__ = observe
        try:
            yield
        finally:
            kind.__next__ = draw

    def _observe(self, batches: _BaseDataLoaderIter, caller: FrameType) -> None:
        # Without gradients: an evaluation
        if self.found or not self.step or not torch.is_grad_enabled():
            return
        first = vars(batches).setdefault("_ebbflow_first_step", self.step)
        if first != self.step and not any(batches._dataset is dataset for dataset in self._saved):
            self.found = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            self._say(
                f"{self.found} draws batches whose position is not saved, and begins anew after "
                "a resume; fix: job.batches(loader, epochs=…), or one loader whose dataset has "
                "the samples of both"
            )


def split_state(state: object, path: str, tensors: dict[str, Tensor]) -> Json:
    """Split `state` into a JSON form, which is returned, and tensors, which are added to `tensors`.

    The form refers to the tensors by path.

    Raises:
        AttachError: a value is neither a tensor nor plain data (numbers, texts, lists, dicts).
    """
    if state is None or isinstance(state, bool | int | str):
        form = state
    elif isinstance(state, float):
        form = state if math.isfinite(state) else {"float": str(state)}
    elif isinstance(state, Tensor):
        tensors[path] = state.detach()
        form = {"tensor": path}
    elif isinstance(state, bytes):
        tensors[path] = (
            torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else torch.empty(0)
        )
        form = {"bytes": path}
    elif isinstance(state, list | tuple | set):
        form = _split_sequence(state, path, tensors)
    elif isinstance(state, Mapping):
        form = _split_mapping(state, path, tensors)
    elif _is_numpy_number(state):
        tensors[path] = torch.from_numpy(sys.modules["numpy"].array(state))
        form = {"array" if isinstance(state, sys.modules["numpy"].ndarray) else "number": path}
    else:
        kind = f"{type(state).__module__}.{type(state).__qualname__}"
        raise AttachError(
            f"{path}: a {kind} in state_dict() cannot be saved; fix: let its state_dict return "
            "tensors, numbers, texts, lists and dicts"
        )
    return form


def join_state(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state that `split_state` has split into `form` and `tensors`."""
    if not isinstance(form, dict):
        return form
    (kind, value), *_ = form.items()
    if kind == "tensor":
        state = tensors[value]
    elif kind == "float":
        state = float(value)
    elif kind == "bytes":
        state = tensors[value].numpy().tobytes()
    elif kind == "array":
        state = tensors[value].numpy()
    elif kind == "number":
        state = tensors[value].numpy()[()]
    elif kind in _MAPPINGS:
        pairs = {join_state(key, {}): join_state(inner, tensors) for key, inner in value}
        state = _MAPPINGS[kind](pairs)
    else:
        state = _SEQUENCES[kind](join_state(inner, tensors) for inner in value)
    return state


def from_bytes(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def own_buffers(model: nn.Module, *, every: bool) -> dict[str, Tensor]:
    """Return the small buffers that no state_dict has, by name; if `every`, return all small
    buffers.

    The other buffers can differ between ranks too, such as the running statistics of BatchNorm.
    """
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            lacking = name.rpartition(".")[2] in module._non_persistent_buffers_set
            small = buffer.numel() * buffer.element_size() <= _LARGEST_BUFFER_BYTES
            if (lacking or every) and small:
                found[f"buffer.{name}"] = buffer.detach()
    return found


def derive_seed(*parts: object) -> int:
    text = "\n".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def random_numbers_of(seed: int) -> Iterator[None]:
    """Seed the random generators with `seed` within the context, and restore their previous states
    afterwards.
    """
    numpy = sys.modules.get("numpy")
    kept = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    seed_all(seed)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        if numpy:
            numpy.random.set_state(kept[2])


def find_generators(dataset: Any) -> list[Any]:
    """Return the random generators that a dataset uses.

    They are searched in its attributes, such as transforms, and in the globals of its code.
    """
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    # Whose states are part of the commit
    common = [torch.default_generator, getattr(random, "_inst", None)]
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
        common.append(numpy.random.mtrand._rand)
    generators = []
    seen = {id(generator) for generator in common}

    def search(value: Any, depth: int) -> None:
        plain = value is None or isinstance(
            value, ModuleType | type | Tensor | str | bytes | int | float
        )
        if plain or id(value) in seen or depth == 0 or len(seen) > _MOST_OBJECTS:
            return
        seen.add(id(value))
        if isinstance(value, kinds):
            generators.append(value)
            return
        if isinstance(value, list | tuple):
            parts = value
        elif isinstance(value, Mapping):
            parts = value.values()
        else:
            parts = _names_of(value)
        for part in itertools.islice(parts, _MOST_ITEMS):
            search(part, depth - 1)

    search(dataset, 6)
    return generators


def change_iteration(loader: Any, iterate: Callable[[Any], Iterator[Any]]) -> None:
    """Let each loop over `loader` call `iterate(loader)`.

    Raises AttachError for types such as list.
    """
    try:
        changed = type(type(loader).__name__, (type(loader),), {"__iter__": iterate})
        # Accelerate's loaders refuse a plain assignment
        vars(object)["__class__"].__set__(loader, changed)
    except TypeError as error:
        raise AttachError(
            f"job.epochs: the job cannot follow a loop over a {type(loader).__name__}; fix: loop "
            "over job.batches(…) in it"
        ) from error


def split_states(states: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Apply `split_state` to each object's `state_dict()`.

    Return {name: JSON form}; add the tensors to `tensors`.
    """
    return {
        name: split_state(stateful.state_dict(), f"{SHARED_PREFIX}{name}", tensors)
        for name, stateful in states.items()
    }


def restore_buffers(model: nn.Module, own: Mapping[str, Tensor]) -> None:
    """Copy the buffers of this rank from a commit.

    A buffer whose shape differs from the commit's keeps its values.
    """
    for name, buffer in own_buffers(model, every=True).items():
        stored = own.get(name)
        if stored is not None and stored.shape == buffer.shape:
            buffer.copy_(stored)


def find_frozen(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained."""
    tensors = model_tensors(model)
    return [name for name, tensor in tensors.items() if _is_trained(tensor) is False]


def restore_frozen(model: nn.Module, frozen: list[str] | None, say: Callable[[str], None]) -> None:
    """Set requires_grad as in the commit, because a resumed script does not repeat the steps that
    changed it.

    Args:
        frozen: names from `find_frozen`; None in commits of older versions.

    Raises AttachError for parameters that DDP would not average among the ranks.
    """
    if frozen is None:
        return
    names = set(frozen)
    found = model_tensors(model)
    changed = [name for name, tensor in found.items() if _is_trained(tensor) is (name in names)]
    if not changed:
        return
    shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    trained = [name for name in changed if name not in names]
    if trained and isinstance(model, nn.parallel.DistributedDataParallel):
        raise AttachError(
            f"requires_grad of {shown} is not as in the commit, and DDP ignores parameters that "
            "were frozen when it was made; fix: freeze and unfreeze them before DDP, by the "
            "epoch or step of the job"
        )
    for name in changed:
        found[name].requires_grad_(name not in names)
    say(f"requires_grad of {shown} is set as in the commit")


def count_samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch, or 1 for a batch
    without tensors.
    """
    if isinstance(batch, Tensor):
        if batch.ndim:
            return batch.shape[0]
        return 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return count_samples(batch[0])
    return 1


def find_enumerate(frame: FrameType | None) -> str:
    """Return the file and line of a loop over `enumerate` in one of the innermost callers, or ""."""
    for _ in range(4):  # the script's loop, or a progress bar's
        if frame is None:
            break
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if "enumerate(" in line and ".batch" not in line:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: enumerate"
        frame = frame.f_back
    return ""


def _split_sequence(
    values: list | tuple | set, path: str, tensors: dict[str, Tensor]
) -> dict[str, list]:
    kind = next(kind for kind in (list, tuple, set) if isinstance(values, kind))
    forms = [split_state(value, f"{path}.{number}", tensors) for number, value in enumerate(values)]
    return {kind.__name__: forms}


def _split_mapping(values: Mapping, path: str, tensors: dict[str, Tensor]) -> dict[str, list]:
    kind = next((name for name, known in _MAPPINGS.items() if type(values) is known), "dict")
    forms = [
        [_key(key, path), split_state(value, f"{path}.{number}", tensors)]
        for number, (key, value) in enumerate(values.items())
    ]
    return {kind: forms}


def _is_numpy_number(state: Any) -> bool:
    """Return whether `state` is a numeric scalar or array of NumPy; False if NumPy is not loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(state, numpy.generic | numpy.ndarray):
        return False
    return state.dtype.kind in "biuf"


def _key(key: object, path: str) -> Json:
    if isinstance(key, str | int | bool | None):
        return key
    if isinstance(key, tuple):
        return {"tuple": [_key(part, path) for part in key]}
    raise AttachError(
        f"{path}: the key {key!r} of a dict has type {type(key).__name__}; fix: use texts or "
        "integers"
    )


def _names_of(value: Any) -> Iterator[Any]:
    """Yield an object's attributes, and the globals that its methods for loading samples use."""
    yield from list(getattr(value, "__dict__", {}).values())
    for name in ("__getitem__", "__getitems__", "__call__"):
        method: Any = getattr(type(value), name, None)
        code = getattr(method, "__code__", None)
        if code is not None:
            yield from (method.__globals__.get(other) for other in code.co_names)


def _seed_generator(generator: Any, seed: int) -> None:
    bits = getattr(generator, "bit_generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif bits is not None:  # numpy.random.Generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32)


class _SeededBatch(list[int]):
    """The indices of a batch, with the seed that is set before the batch is loaded."""

    seed = 0


class _SeededDataset:
    """Wrapper of a map-style dataset that seeds random generators before each batch.

    So a batch's random numbers depend on no other batch. In a worker process all generators are
    seeded; elsewhere only those of the dataset, because commits contain the state of the others.
    """

    _generators: list[Any] | None = None  # found in the process that loads the batches

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, batch: list[Any]) -> list[Any]:
        if isinstance(batch, _SeededBatch):
            if get_worker_info() is not None:
                seed_all(batch.seed)
            if self._generators is None:
                self._generators = find_generators(self._dataset)
            for generator in self._generators:
                _seed_generator(generator, batch.seed)
        whole = getattr(self._dataset, "__getitems__", None)
        if whole:
            return whole(list(batch))
        return [self._dataset[index] for index in batch]

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # not set yet, while a worker process unpickles this object
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)


class _EpochOrder:
    """Batch sampler for one epoch of a loader, without the first `skip` batches."""

    def __init__(self, sampler: Sampler[list[int]], seed: int, skip: int, *, seeded: bool) -> None:
        self._sampler = sampler
        self._seed = seed
        self._skip = skip
        self._seeds_batches = seeded

    def __len__(self) -> int:
        return len(cast(Sized, self._sampler))

    def __iter__(self) -> Iterator[list[int]]:
        with random_numbers_of(self._seed):
            order = iter(self._sampler)
            # A sampler shuffles when it is asked
            first = list(itertools.islice(order, self._skip, self._skip + 1))
        batches = itertools.chain(first, order)
        if self._seeds_batches:
            return self._seeded(batches)
        return batches

    def _seeded(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        for number, indices in enumerate(batches, start=self._skip):
            batch = _SeededBatch(indices)
            batch.seed = derive_seed(self._seed, number)
            yield batch


def _is_stateful(source: object) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _is_trained(tensor: Tensor) -> bool | None:
    if isinstance(tensor, nn.Parameter):
        return tensor.requires_grad
    return None  # a buffer

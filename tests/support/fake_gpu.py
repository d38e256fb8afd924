"""A CUDA device without a GPU: torch's own code runs on tensors that say they are on cuda:0, and
each wait is logged.

Values are computed on the CPU. Work on the current stream is done at once. A copy to page-locked
memory on another stream is done at the last legal moment: when the host or another stream waits for
it. So a copy that is not ordered before a later write gets the later values, as it may on a GPU.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ROOT = str(Path(__file__).resolve().parents[2])
_READS = (
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
)
GIB = 2**30


class GpuTensor(Tensor):
    """A tensor on the fake device. `host` has its values."""

    host: Tensor
    gpu: FakeGpu

    @staticmethod
    def __new__(cls, host: Tensor, gpu: FakeGpu) -> GpuTensor:
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
        )
        tensor.host = host
        tensor.gpu = gpu
        return tensor

    def __init__(self, host: Tensor, gpu: FakeGpu) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(
            leaf.gpu for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, GpuTensor)
        )
        return gpu.run(func, args, kwargs or {})

    # torch itself takes it for a CPU tensor: a build without CUDA cannot differentiate through
    # another.
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        self.gpu.note("read")  # into pageable memory: the host waits
        return self.host.detach().clone()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if any(
            torch.device(argument).type == "cpu"
            for argument in (*args, *kwargs.values())
            if isinstance(argument, str | torch.device)
        ):
            return self.cpu()
        return super().to(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Stream:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.pending = list[Callable[[], object]]()

    def flush(self, count: int | None = None) -> None:
        todo = self.pending[:count]
        self.pending = self.pending[len(self.pending[:count]) :]
        for callback in todo:
            callback()

    def wait_stream(self, other: Stream) -> None:
        other.flush()

    def wait_event(self, event: Event) -> None:
        event.reach()

    def synchronize(self) -> None:
        self.gpu.note("stream.synchronize")
        self.flush()


class Event:
    """`count` operations of its stream come before it."""

    def __init__(self, gpu: FakeGpu, enable_timing: bool = False) -> None:
        self.gpu = gpu
        self.stream = None
        self.count = 0
        self.place = 0  # its number among all recordings, from 1
        self.timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpu.current
        mark = self
        self.done = False
        self.gpu.recordings += 1
        self.place = self.gpu.recordings
        self.stream.pending.append(lambda: setattr(mark, "done", True))
        if self.stream is self.gpu.main:
            self.stream.flush()

    def reach(self) -> None:
        while self.stream is not None and not self.done:
            self.stream.flush(1)

    def query(self) -> bool:
        return self.stream is None or self.done

    def synchronize(self) -> None:
        assert self.place, "an event that is not recorded orders nothing"
        self.gpu.note("event.synchronize")
        self.reach()

    def wait(self, stream: Stream | None = None) -> None:
        self.reach()

    def elapsed_time(self, end: Event) -> float:
        if not (self.timed and end.timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        if not (self.place and end.place):
            raise RuntimeError("both events must be recorded")
        if end.place > self.place:
            return self.gpu.milliseconds
        return 0.0


class FakeGpu(TorchDispatchMode):
    """The device, as a context in which torch has one GPU.

    Attributes:
        waits: each wait of the host for the device: what it was, and the line of this project that
            caused it.
        refuse_pinning: whether page-locking memory fails.
        threads: the threads that page-locked memory.
        errors: the last error of each thread, by its number. As in CUDA, it fails the thread's next
            operation.
        peak_bytes: peak of the allocated memory; that of the reserved memory is 1 GiB more.
        free_bytes: free memory, of 80 GiB; torch itself holds 2 GiB.
        recorded: how allocations are recorded: the most entries, and the kind of stacks; None: not
            at all.
    """

    newest: FakeGpu  # the one in use

    def __init__(self) -> None:
        super().__init__()
        FakeGpu.newest = self
        self.waits: list[tuple[str, str]] = []
        self.main = self.current = Stream(self)
        self.refuse_pinning = False
        self.pinned = dict[int, int]()
        self.milliseconds = 10.0
        self.free_bytes = 77 * GIB
        self.peak_bytes = 3 * GIB
        self.recordings = 0
        self.threads = list[str]()
        self.errors = dict[int, int]()
        self.recorded: tuple[int, str] | None = None

    def note(self, what: str) -> None:
        frames = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(_ROOT) and ".venv" not in frame.filename
        ]
        own = [frame for frame in frames if "fake_gpu" not in frame.filename]
        self.waits.append(
            (
                what,
                f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno} {own[-1].name}"
                if own
                else "",
            )
        )

    def take_waits(self) -> list[tuple[str, str]]:
        waits = self.waits
        self.waits = []
        return waits

    def is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(begin <= start < begin + length for begin, length in self.pinned.items())

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.data_ptr()] = max(tensor.nbytes, 1)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if error := self.errors.pop(threading.get_ident(), 0):
            raise RuntimeError(f"CUDA error: error {error} of an earlier call")
        leaves = _pytree.tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, GpuTensor)]
        device = kwargs.get("device")
        if device is None:
            to = None
        else:
            to = torch.device(device).type
        plain_args, plain_kwargs = _pytree.tree_map(_host, (args, kwargs))
        if to == "cuda":
            plain_kwargs["device"] = torch.device("cpu")
        if func in _READS and inputs:
            self.note("item" if func is _READS[0] else str(func))
            return func(*plain_args, **plain_kwargs)
        if func is _aten._to_copy.default:
            return self._to_copy(func, args, plain_args, plain_kwargs, to)
        if func is _aten.copy_.default and isinstance(args[1], GpuTensor) != isinstance(
            args[0], GpuTensor
        ):
            return self._copy(args, plain_args, plain_kwargs)
        if plain_kwargs.pop("pin_memory", False):
            return self.pin(func(*plain_args, **plain_kwargs))
        out = func(*plain_args, **plain_kwargs)
        if to == "cpu" or (to is None and not inputs) or to == "meta":
            return out
        known = {id(input_.host): input_ for input_ in inputs}
        return _pytree.tree_map(
            lambda one: known[id(one)] if id(one) in known else self._wrap(one), out
        )

    def _wrap(self, one: Any) -> Any:
        if isinstance(one, Tensor) and not isinstance(one, GpuTensor):
            return GpuTensor(one, self)
        return one

    def _to_copy(
        self, func: Any, args: Any, plain_args: Any, plain_kwargs: dict[str, Any], to: str | None
    ) -> Any:
        on_gpu = isinstance(args[0], GpuTensor)
        out = func(*plain_args, **plain_kwargs)
        later = bool(plain_kwargs.get("non_blocking"))
        if to == "cuda" and not on_gpu and not (later and self.is_pinned(args[0])):
            self.note("pageable copy")
        if to == "cuda" or (to is None and on_gpu):
            return self._wrap(out)
        return out

    def _copy(self, args: Any, plain_args: Any, plain_kwargs: dict[str, Any]) -> Any:
        target, source = plain_args[:2]
        later = bool(plain_kwargs.get("non_blocking") or (len(plain_args) > 2 and plain_args[2]))
        if isinstance(args[0], GpuTensor):  # from the host
            if not (later and self.is_pinned(source)):
                self.note("pageable copy")
            target.copy_(source)
        elif not (later and self.is_pinned(target)):
            self.note("read")
            target.copy_(source)
        else:
            self.current.pending.append(lambda: target.copy_(source))
            if self.current is self.main:
                self.main.flush()
        return args[0]


@contextlib.contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Give torch one GPU."""
    gpu = FakeGpu()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before = gpu.current
        gpu.current = stream
        try:
            yield
        finally:
            gpu.current = before

    def register(start: int, length: int, flags: int) -> int:
        gpu.threads.append(threading.current_thread().name)
        if gpu.refuse_pinning:
            gpu.errors[threading.get_ident()] = 2
            return 2
        gpu.pinned[start] = length
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda start: gpu.pinned.pop(start, 0) and 0
    )
    fakes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: gpu.note("synchronize"),
        "current_stream": lambda device=None: gpu.current,
        "default_stream": lambda device=None: gpu.main,
        "stream": on,
        "Stream": lambda *_, **__: Stream(gpu),
        "Event": lambda enable_timing=False, **__: Event(gpu, enable_timing),
        "cudart": lambda: runtime,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: GIB,
        "memory_reserved": lambda device=None: 2 * GIB,
        "max_memory_allocated": lambda device=None: gpu.peak_bytes,
        "max_memory_reserved": lambda device=None: gpu.peak_bytes + GIB,
        "mem_get_info": lambda device=None: (gpu.free_bytes, 80 * GIB),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "get_device_name": lambda device=None: "fake",
        "get_device_properties": lambda device=None: SimpleNamespace(
            uuid="GPU-0", total_memory=80 * GIB
        ),
        "get_device_capability": lambda device=None: (9, 0),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def record(enabled: str | None = "all", *, max_entries: int = 0, stacks: str = "all") -> None:
        if enabled:
            gpu.recorded = (max_entries, stacks)
        else:
            gpu.recorded = None

    def dump(filename: str) -> None:
        Path(filename).write_bytes(
            pickle.dumps({"segments": [], "device_traces": [], "recorded": gpu.recorded})
        )

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    group_tensors = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def group_on_gpu(*args: Any, **kwargs: Any) -> Any:
        # This is C++ code, which takes the tensors for those of a CPU
        return {
            (torch.device("cuda", 0), dtype): tensors
            for (_, dtype), tensors in group_tensors(*args, **kwargs).items()
        }

    monkeypatch.setattr(
        torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(group_on_gpu)
    )
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, device=None: gpu.pin(tensor.clone()))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor, device=None: gpu.is_pinned(tensor))
    with gpu:
        yield gpu


def _host(one: Any) -> Any:
    if isinstance(one, GpuTensor):
        return one.host
    return one

"""Tracer of a script that `ebbflow doctor` examines: it records the state before each optimizer
step.

A record is one line of JSON. It has digests of the batch, the random states, the weights, the
buffers, and all variables that hold an object with state, such as a scheduler or an iterator; and
the numbers among the variables.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypedDict, TypeVar

from ebbflow.core.json_values import JsonObject
from ebbflow.core.process import die_with_parent
from ebbflow.tryout.script_copy import detach, detach_before

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")
_DEPTH = 3  # of members within members, such as `trainer.optimizers['body']`
_MOST_MEMBERS = 64  # of a list or dict whose members are looked at
_SETTLE_SECONDS = 20.0  # for the other ranks, and for a commit of `ebbflow.attach`


class StepRecord(TypedDict):
    """State of a script at the beginning of a step, mostly as digests.

    The record of a run's end has weights only, and no counters.
    """

    batch: str
    rng: dict[str, str]  # digest by generator
    buffers: str
    params: str
    # (kind, digest of the state, and a number that the names of one object share) by variable
    objects: dict[str, tuple[str, str, int]]
    counters: dict[str, int]  # integers by variable


class Tracer:
    """Tracer in the process of one rank, which writes a record at the beginning of each step."""

    def __init__(self, traces: list[Path], rank: int, steps: int, folder: Path) -> None:
        self._trace = open(traces[rank], "w")  # noqa: SIM115
        self._traces = traces
        self._last = steps
        self._folder = f"{folder}{os.sep}"
        self._copy = folder
        self._step = 0
        # The begun step's part of a record, until its optimizer steps
        self._record: JsonObject = {}
        self._optimizer: Optimizer | None = None
        self._model: nn.Module | None = None
        self._saved = -1
        self._loaded = ""
        self._files = set[str]()
        self._process = os.getpid()
        self._tensor = sys.modules["torch"].Tensor

    def install(self) -> None:
        """Register hooks on models and optimizers, and wrap the functions that save and load."""
        import torch
        import torch.distributed as dist
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        torch.save = self._saving(torch.save)
        torch.load = self._loading(torch.load)
        if importlib.util.find_spec("safetensors"):
            safetensors: Any = importlib.import_module("safetensors.torch")
            safetensors.save_file = self._detaching(safetensors.save_file)
        sys.addaudithook(self._on_open)
        if dist.is_available():
            join = dist.init_process_group

            def join_on_cpu(backend: str | None = None, *given: Any, **options: Any) -> None:
                join("gloo" if backend and "nccl" in backend else backend, *given, **options)

            dist.init_process_group = dist.distributed_c10d.init_process_group = join_on_cpu

    def _detaching(self, call: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that links in the path that it writes are first replaced (`detach`).

        The function opens its file, which is its second argument, without an audit event.
        """

        def detached(*given: P.args, **options: P.kwargs) -> R:
            for path in (*given[1:2], options.get("f"), options.get("filename")):
                detach(self._copy, path, emptied=True)
            return call(*given, **options)

        return detached

    def _saving(self, call: Callable[P, R]) -> Callable[P, R]:
        save = self._detaching(call)

        def tell(*given: P.args, **options: P.kwargs) -> R:
            result = save(*given, **options)
            numbers = self._saved_numbers(given[0] if given else options.get("obj"))
            self._write(
                {"saved": self._step, "place": self._place(), "by": "save", "numbers": numbers}
            )
            return result

        return tell

    def _loading(self, call: Callable[P, R]) -> Callable[P, R]:
        def tell(*given: P.args, **options: P.kwargs) -> R:
            result = call(*given, **options)
            self._loaded = self._loaded or self._place()
            return result

        return tell

    def _saved_numbers(self, saved: Any) -> list[tuple[str, str]]:
        """Return the integer variables whose values occur in the saved object, with the places
        there.
        """
        places = dict(_integers("", saved, _DEPTH))
        counters: dict[str, int] = {}
        for frame in self._frames():
            for name, value in self.variables(frame):
                if type(value) is int:
                    counters.setdefault(name, value)
        pairs = []
        for name, value in counters.items():
            pairs += [(name, path) for path, number in places.items() if number == value]
        return pairs

    def _on_open(self, event: str, given: tuple[Any, ...]) -> None:
        """Handle an audit event: detach files that are written, and record a written binary file as
        a save.

        These saves count only if the script makes no other save.
        """
        detach_before(self._copy, event, given)
        if (
            event != "open"
            or "b" not in str(given[1])
            or "r" in str(given[1])
            or os.getpid() != self._process
        ):
            return
        if os.path.abspath(str(given[0])).startswith(self._folder) and self._step:
            self._write({"saved": self._step, "place": self._place(), "by": "open"})

    def _place(self) -> str:
        """Return the current line of the innermost call in the script's folder, with its file."""
        frame = next(self._frames(), None)
        if frame is None:
            return ""
        return f"{self._name_of(frame)}:{frame.f_lineno}"

    def _frames(self) -> Iterator[FrameType]:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._folder):
                yield frame
            frame = frame.f_back

    def _name_of(self, frame: FrameType) -> str:
        return frame.f_code.co_filename.removeprefix(self._folder)

    def _write(self, line: JsonObject) -> None:
        self._trace.write(json.dumps(line) + "\n")
        self._trace.flush()

    def _forward(self, module: nn.Module, inputs: Any) -> None:
        import torch

        if self._record or not module.training or not torch.is_grad_enabled():
            return
        self._model = self._model or module
        rng = {"torch": digest(torch.get_rng_state()), "random": digest(random.getstate())}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            rng["numpy"] = digest(numpy.random.get_state())
        self._record = {
            "batch": digest(inputs),
            "rng": rng,
            "buffers": digest(dict(self._model.named_buffers())),
        }

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._write({**self._record, **self._state(optimizer)})

    def _state(self, optimizer: Optimizer) -> JsonObject:
        trained = _trained(optimizer)
        weights = TrainedWeights(trained, self._model)
        objects: dict[str, tuple[str, str, int]] = {}
        counters: dict[str, int] = {}
        known: dict[int, tuple[str, str, int] | None] = {}
        values = []  # alive, so that no two have one id
        for frame in self._frames():
            self._files.add(self._name_of(frame))
            for name, value in self.variables(frame):
                if type(value) is int:
                    counters.setdefault(name, value)
                    continue
                if id(value) not in known:
                    values.append(value)
                    state = weights.state_of(value)
                    if isinstance(value, Mapping):
                        kind = "dict"
                    else:
                        kind = type(value).__name__
                    if state is None:
                        known[id(value)] = None
                    else:
                        known[id(value)] = (kind, digest(state), len(values))
                entry = known[id(value)]
                if entry is not None:
                    objects.setdefault(name, entry)
        return {"params": digest(trained), "objects": objects, "counters": counters}

    def variables(self, frame: FrameType) -> Iterator[tuple[str, Any]]:
        """Yield the variables of a frame, then their members, then the members of those."""
        level = list(frame.f_locals.items())
        for _ in range(_DEPTH):
            yield from level
            members = []
            for name, value in level:
                members += self._members(name, value)
            level = members

    def _members(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Return an object's parts by name: attributes of the script's classes, or items of a list
        or dict.
        """
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            pairs = list(enumerate(value[:_MOST_MEMBERS]))
        elif type(value) is dict and not name.startswith("__"):
            pairs = list(value.items())[:_MOST_MEMBERS]
        else:
            return self._attributes(name, value)
        members = []
        for key, member in pairs:
            if isinstance(key, str | int) and not isinstance(member, str | float | self._tensor):
                members.append((f"{name}[{key!r}]", member))
        return members

    def _attributes(self, name: str, value: Any) -> list[tuple[str, Any]]:
        path = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
        if not path.startswith(self._folder) or is_stateful(value):
            return []
        attributes = list(getattr(value, "__dict__", {}).items())
        return [(f"{name}.{key}", attribute) for key, attribute in attributes]

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer:
            return
        self._step += 1
        self._record = {}
        job = getattr(sys.modules.get("ebbflow.training.attach.loop"), "current", None)
        if job is not None and job.saved_step != self._saved:
            self._saved = job.saved_step
            self._write({"saved": self._step, "place": "", "by": "attach"})
        if self._step >= self._last:
            end = {
                "params": digest(_trained(optimizer)),
                "counters": {},
                "files": sorted(self._files),
            }
            self._write(end | {"loaded": self._loaded})
            self._wait_for_ranks(job)
            os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_ranks(self, job: Any) -> None:
        """Wait until all ranks have reached their end, and until a commit that has begun is
        durable.

        Otherwise a rank could be killed before the step that another one has taken.
        """
        limit = time.monotonic() + _SETTLE_SECONDS
        own = Path(f"{self._trace.name}.ended")
        while job is not None and job.is_saving and time.monotonic() < limit:
            time.sleep(0.01)
        own.touch()
        while (
            not all(Path(f"{trace}.ended").exists() for trace in self._traces)
            and time.monotonic() < limit
        ):
            time.sleep(0.01)


class TrainedWeights:
    """The weights that the optimizer trains, used to find the other objects that have state."""

    def __init__(self, trained: list[Tensor], model: nn.Module | None) -> None:
        self._torch = sys.modules["torch"]
        self._ids = {id(weight) for weight in trained}
        self._shapes = Counter(tuple(weight.shape) for weight in trained)
        self._names: set[str] = set()
        if model is not None:
            self._names = {name.removeprefix("module.") for name in model.state_dict()}
        gradients = [weight.grad for weight in trained if weight.grad is not None]
        self._storages = {_address(tensor) for tensor in [*trained, *gradients]}

    def state_of(self, value: Any) -> Any:
        """Return the state of an object if a resume must restore it, else None."""
        state = None
        if is_stateful(value):
            if not self._is_trained(value):
                state = self._state_dict(value)
        elif callable(getattr(value, "set_epoch", None)):
            state = getattr(value, "epoch", 0), getattr(value, "seed", 0)
        elif isinstance(value, Mapping | list | tuple):
            if self._has_copies(value):
                state = value
        elif type(value).__name__ == "Generator":
            if hasattr(value, "get_state"):
                state = value.get_state()
            else:
                state = value.bit_generator.state
        return state

    def _is_trained(self, value: Any) -> bool:
        """Return whether an object is a module that has trained parameters, or no parameters at
        all.
        """
        if not isinstance(value, self._torch.nn.Module):
            return False
        parameters = list(value.parameters())
        return not parameters or any(id(parameter) in self._ids for parameter in parameters)

    def _state_dict(self, value: Any) -> Any:
        try:
            state = value.state_dict()
        except Exception:  # such as that of a loader that has not been iterated
            return None
        # Without the learning rate, which scripts set anew in each step
        if isinstance(value, self._torch.optim.Optimizer):
            return state["state"] or state
        return state

    def _has_copies(self, value: Any) -> bool:
        """Return whether a dict or list holds copies of weights, such as their moving averages."""
        parts = list(value.values() if isinstance(value, Mapping) else value)
        if not parts or not all(isinstance(part, self._torch.Tensor) for part in parts):
            return False
        if any(_address(part) in self._storages for part in parts):
            return False
        if isinstance(value, Mapping):
            names = {str(name).removeprefix("module.") for name in value}
            if names <= self._names:
                return True
        shapes = Counter(tuple(part.shape) for part in parts if part.is_floating_point())
        return self._shapes <= shapes


def run_traced(
    script: Path, arguments: list[str], traces: list[Path], steps: int, *, seed: int, output: Path
) -> NoReturn:
    """Run the script in this forked process, and kill the process after its last step.

    Args:
        traces: files of records, one for each rank. This process writes to the file of its rank.
    """
    import torch

    try:
        die_with_parent()
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(target, stream)
        os.chdir(script.parent)
        tracer = Tracer(traces, int(os.environ.get("RANK", "0")), steps, script.parent)
        os.environ |= {
            "EBBFLOW__STORE": f"{os.getcwd()}/runs",
            "EBBFLOW__CHECKPOINT__INTERVAL": "steps",
            "EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "3",
        }
        torch.manual_seed(seed)
        random.seed(seed)
        if importlib.util.find_spec("numpy"):
            importlib.import_module("numpy").random.seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        tracer.install()
        sys.argv = [str(script), *arguments]
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def digest(value: Any) -> str:
    sha1 = hashlib.sha1(usedforsecurity=False)
    for part in _parts(value):
        sha1.update(part)
    return sha1.hexdigest()[:16]


def _integers(path: str, value: Any, depth: int) -> Iterator[tuple[str, int]]:
    """Yield the integers in nested dicts and lists, each with its path, such as `/state/step`."""
    if type(value) is int:
        yield path, value
    elif depth and isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, member in list(pairs)[:_MOST_MEMBERS]:
            yield from _integers(f"{path}/{key}", member, depth - 1)
    elif depth and not callable(value) and type(value).__module__ == "__main__":
        yield from _integers(path, getattr(value, "__dict__", None), depth)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    weights: list[Tensor] = []
    for group in optimizer.param_groups:
        weights += group["params"]
    return weights


def _address(tensor: Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).data_ptr()


def _parts(value: Any) -> Iterator[bytes]:
    import torch

    if isinstance(value, torch.Tensor):
        value = getattr(value, "_local_tensor", value)  # of a sharded tensor, this rank's part
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):  # in any order: a restored optimizer may have another
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield b"["
        for element in value:
            yield from _parts(element)
    elif isinstance(value, str | int | float | bytes | None):
        yield repr(value).encode()
    elif hasattr(value, "tobytes"):
        yield value.tobytes()

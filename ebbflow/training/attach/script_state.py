"""Find the variables of a script that change and that `attach` does not save.

Also find the script's own random generators.

The job looks at the script's module and at the frames whose loop it runs: at the beginning of the
loop and at its first two commits. A variable that changed between two looks, and that can change
what the script trains, makes the promise "not exact". Random generators are saved and restored.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from ebbflow.core.program import PACKAGE_ROOT
from ebbflow.training.attach.influence import Kind, Place, ScriptFile, find_influence

if TYPE_CHECKING:
    import numpy

_DEEPEST = 4  # attributes of the script's own objects
_ENDS = 8  # values looked at from each end of a list
_SAMPLED = 1024  # numbers of a tensor or array
_MOST_VARIABLES = 5_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MACHINES = (nn.Module, Optimizer, LRScheduler, Dataset, Sampler, DataLoader)
_SKIPPED = (types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)


@dataclass(frozen=True, kw_only=True)
class Unsaved:
    """A variable that changes, is not saved, and can change what the script trains or saves."""

    name: str  # such as memory or self.count
    place: str  # file and line, such as train.py:10
    kind: Kind
    is_generator: bool = False
    is_reset: bool = False  # whether the script writes it anew in each epoch
    save_line: int = 0  # line of the script's own save that it decides, if it trains nothing

    def describe(self) -> str:
        """Describe the problem and the fix in one line."""
        if self.is_generator:
            return (
                f"`{self.name}` ({self.place}) draws random numbers that the framework's loop cannot "
                "restore; fix: the generators of torch, numpy and random themselves"
            )
        if "." in self.name:
            fix = "give its object state_dict and load_state_dict, and pass it to attach"
        elif self.kind is Kind.PLAIN:
            fix = f"saved = job.state({self.name}=…), and saved.{self.name} in its place"
        else:
            fix = f"attach(…, {self.name}={self.name})"
        if self.is_reset and self.kind is Kind.PLAIN:
            fix += ", set anew only if job.batch == 0"
        effect = "changes and is not saved"
        if self.save_line:
            effect = f"decides whether line {self.save_line} saves, and no commit has it"
        return f"`{self.name}` ({self.place}) {effect}; fix: {fix}"


class ScriptWatch:
    """Detector of variables in a script that change and are not saved.

    Args:
        saved: returns the objects that commits hold, by their name in `attach`.
        restores_generators: whether the job restores random generators before a batch is drawn. In
            the loop of a framework it cannot.
    """

    def __init__(
        self, saved: Callable[[], Mapping[str, object]], *, restores_generators: bool = True
    ) -> None:
        self._saved = saved
        self._restores_generators = restores_generators
        self._others: dict[str, object] = {}
        self._reasons: list[str] = []
        self._looks = 0
        self._seen: dict[tuple[str, int, str], object] = {}
        self._generators: dict[str, object] = {}
        self._pending: dict[str, object] = {}  # states of generators in the restored commit
        self.unsaved: dict[str, Unsaved] = {}
        # Those that train nothing, and decide whether the script itself saves
        self.deciding: dict[str, Unsaved] = {}
        # What an earlier start of the job found, until this one has looked as often
        self._was_examined = False
        self._found_before: dict[str, Unsaved] = {}

    @property
    def is_examined(self) -> bool:
        """Whether the variables have been compared at two commits.

        Both comparisons were made in this start of the job, or in the start that made the restored
        commit.
        """
        return self._was_examined or self._has_looked

    @property
    def _has_looked(self) -> bool:
        return self._looks > 2

    def to_json(self) -> dict[str, object]:
        """Return the findings so far as JSON, to be saved in a commit."""
        found = {**self._found_before, **self.unsaved}
        return {
            "examined": self.is_examined,
            "unsaved": [asdict(unsaved) for unsaved in found.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the findings that `to_json` saved in a commit."""
        self._was_examined = bool(state.get("examined"))
        saved = self._saved()
        for fields in state.get("unsaved", ()):
            unsaved = Unsaved(
                name=fields["name"],
                place=fields["place"],
                kind=Kind(fields["kind"]),
                is_generator=fields["is_generator"],
                is_reset=fields.get("is_reset", False),
            )
            if unsaved.name not in saved:
                self._found_before[unsaved.name] = unsaved

    def set_generator_states(self, states: Mapping[str, object]) -> None:
        """Restore these states later, at the first look, when the script has created its
        generators.
        """
        self._pending = dict(states)

    def generator_states(self) -> dict[str, object]:
        return {name: _read_generator(generator) for name, generator in self._generators.items()}

    def look(self) -> None:
        """Compare the variables with those at the last call; nothing happens after the third call."""
        if self._has_looked:
            return
        self._looks += 1
        seen: dict[tuple[str, int, str], object] = {}
        saved = self._saved()
        ignored = _identities(saved.values())
        found = chain(_walk_script(saved, ignored), self._walk_others(ignored))
        for variable in islice(found, _MOST_VARIABLES):
            key = (variable.scope.file, variable.scope.first_line, variable.name)
            is_generator = _is_generator(variable.value)
            if is_generator and self._restores_generators:
                self._adopt(variable)
                continue
            if is_generator:
                fingerprint = _fingerprint(_read_generator(variable.value))
            else:
                fingerprint = _fingerprint(variable.value)
            seen[key] = fingerprint
            changed = key in self._seen and self._seen[key] != fingerprint
            if changed and variable.name not in self.unsaved:
                self._judge(variable)
        self._seen = {} if self._has_looked else seen
        if self._has_looked:
            self._found_before = {}

    def add_object(self, name: str, value: object) -> None:
        """Include the attributes of an object of the script that a framework holds."""
        self._others[name] = value

    def add_reason(self, reason: str) -> None:
        """Add a reason, found by other code, why a resume is not exact."""
        if reason not in self._reasons:
            self._reasons.append(reason)

    def describe(self) -> list[str]:
        """Return the reasons why a resume is not exact, one line for each."""
        found = {**self._found_before, **self.unsaved}
        return [*self._reasons, *(unsaved.describe() for unsaved in found.values())]

    def _walk_others(self, ignored: set[int]) -> Iterator[_Variable]:
        seen = set(ignored)
        for name, value in self._others.items():
            file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
            scope = _Scope(file=file, first_line=0, line=0, values={})
            yield from _walk_value(scope, name, value, seen, _DEEPEST)

    def _adopt(self, variable: _Variable) -> None:
        """Save a random generator in all further commits, and restore its state from the restored
        commit.
        """
        name = f"{os.path.basename(variable.scope.file)}:{variable.name}"
        if name not in self._generators:
            self._generators[name] = variable.value
            if name in self._pending:
                _restore_generator(variable.value, self._pending.pop(name))

    def _judge(self, variable: _Variable) -> None:
        if _is_generator(variable.value):
            where = f"{os.path.basename(variable.scope.file)}:{variable.scope.line}"
            self.unsaved[variable.name] = Unsaved(
                name=variable.name, place=where, kind=Kind.STATEFUL, is_generator=True
            )
            return
        source = ScriptFile.of(variable.scope.file)
        if source is None:
            return
        body = source.scope(variable.scope.first_line) if variable.scope.first_line else None
        (_, dot, attribute) = variable.name.rpartition(".")
        name = f".{attribute}" if dot else attribute
        kind = _kind(variable.value)
        values = variable.scope.values
        machines = {known for known, value in values.items() if isinstance(value, _MACHINES)}
        place = Place(
            source=source,
            body=source.tree.body if body is None else body,
            line=variable.scope.line,
            machines=frozenset(machines),
        )
        influence = find_influence(place, name, kind)
        if not influence.trains and not influence.save_line:
            return
        line = source.find_line(place.body, name) or source.find_line_in_functions(name)
        self.deciding.pop(variable.name, None)
        found = self.unsaved if influence.trains else self.deciding
        found[variable.name] = Unsaved(
            name=variable.name,
            place=f"{os.path.basename(variable.scope.file)}:{line or variable.scope.line}",
            kind=kind,
            is_reset=influence.is_reset,
            save_line=influence.save_line,
        )


def find_own_line() -> str:
    """Return the file and line of the innermost caller in the user's code, such as "train.py:10",
    or "".
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_own_file(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _HasState(Protocol):
    def state_dict(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class _Variable:
    """A variable of the script: its name, its value and the scope that contains it."""

    scope: _Scope
    name: str
    value: object


@dataclass(frozen=True, kw_only=True)
class _Scope:
    """A module or a running function of the script."""

    file: str
    first_line: int  # of the function; 0 for a module
    line: int  # that runs now; 0 if it runs no line now
    values: Mapping[str, object] = field(compare=False, hash=False)


def _walk_script(saved: Mapping[str, object], ignored: set[int]) -> Iterator[_Variable]:
    """Yield the variables of the script's module and of the frames that run its loop."""
    scopes = _find_scopes()
    seen = set(ignored)
    for scope in scopes:
        for name, value in list(scope.values.items()):
            if not name.startswith("__"):
                yield from _walk_value(scope, name, value, seen, _DEEPEST)
    for name, value in saved.items():
        if isinstance(value, nn.Module) and scopes:
            yield from _walk_module(scopes[-1], name, value, seen)


def _walk_value(
    scope: _Scope, name: str, value: object, seen: set[int], depth: int
) -> Iterator[_Variable]:
    if isinstance(value, _PLAIN):
        yield _Variable(scope=scope, name=name, value=value)
        return
    if isinstance(value, _SKIPPED) or id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    is_leaf = (
        _is_generator(value)
        or _is_array(value)
        or _has_state(value)
        or isinstance(value, Tensor | Mapping | list | deque | set | tuple | Iterator)
    )
    if is_leaf:
        yield _Variable(scope=scope, name=name, value=value)
    elif _is_own(type(value)):
        own_scope = _class_scope(type(value), scope)
        for attribute, inner in list(getattr(value, "__dict__", {}).items()):
            yield from _walk_value(own_scope, f"{name}.{attribute}", inner, seen, depth - 1)


def _walk_module(
    scope: _Scope, name: str, module: nn.Module, seen: set[int]
) -> Iterator[_Variable]:
    """Yield the attributes of the script's own `nn.Module` classes that are in no state_dict."""
    for prefix, part in module.named_modules():
        if not _is_own(type(part)):
            continue
        own_scope = _class_scope(type(part), scope)
        base = f"{name}.{prefix}" if prefix else name
        for attribute, value in list(vars(part).items()):
            if not attribute.startswith("_") and attribute != "training":
                yield from _walk_value(own_scope, f"{base}.{attribute}", value, seen, 2)


def _find_scopes() -> list[_Scope]:
    """Return the scopes of the script in which the loop runs, innermost first, and then its module."""
    scopes: list[_Scope] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_own_file(code.co_filename):
            is_module = code.co_name == "<module>"
            scopes.append(
                _Scope(
                    file=code.co_filename,
                    first_line=0 if is_module else code.co_firstlineno,
                    line=frame.f_lineno,
                    values=frame.f_locals,
                )
            )
        frame = frame.f_back
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    is_running = any(scope.first_line == 0 and scope.file == file for scope in scopes)
    if file and _is_own_file(file) and not is_running:
        scopes.append(_Scope(file=file, first_line=0, line=0, values=vars(main)))
    return scopes


def _class_scope(kind: type, scope: _Scope) -> _Scope:
    """Return the scope of the file that defines a class, in which the class's attributes are
    analysed.
    """
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or scope.file
    if file == scope.file:
        return scope
    return _Scope(file=file, first_line=0, line=0, values=scope.values)


@cache
def _is_own_file(filename: str) -> bool:
    """Return whether a file is the user's own code, not an installed package's or Ebbflow's."""
    if filename.startswith("<"):
        return False
    path = Path(filename).absolute()
    library = Path(sysconfig.get_path("stdlib"))
    places = {library, Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return False
    return not any(path.is_relative_to(place) for place in {*places, PACKAGE_ROOT})


def _is_own(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return bool(file) and _is_own_file(str(file))


def _identities(saved: Iterable[object]) -> set[int]:
    """Return the ids of saved objects, and of the modules and tensors in them."""
    found: set[int] = set()
    for value in saved:
        found.add(id(value))
        if isinstance(value, nn.Module):
            found |= {id(part) for part in value.modules()}
            found |= {id(tensor) for tensor in [*value.parameters(), *value.buffers()]}
        dataset = getattr(value, "dataset", None)
        if dataset is not None:
            found.add(id(dataset))
    return found


def _kind(value: object) -> Kind:
    if _has_state(value):
        return Kind.STATEFUL
    if isinstance(value, Tensor):
        return Kind.TENSORS if value.numel() > 1 else Kind.PLAIN
    if _is_array(value):
        return Kind.TENSORS if value.size > 1 else Kind.PLAIN
    if isinstance(value, Iterator):
        return Kind.STATEFUL
    if isinstance(value, Mapping):
        parts = list(islice(value.values(), _ENDS))
    elif isinstance(value, list | deque | set | tuple):
        parts = list(islice(value, _ENDS))
    else:
        return Kind.PLAIN
    return Kind.PLAIN if all(_kind(part) is Kind.PLAIN for part in parts) else Kind.TENSORS


def _has_state(value: object) -> TypeGuard[_HasState]:
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def _is_array(value: object) -> TypeGuard[numpy.ndarray]:
    loaded = sys.modules.get("numpy")
    return loaded is not None and isinstance(value, loaded.ndarray)


def _fingerprint(value: object, depth: int = 3) -> object:
    """Return a value that changes when `value` changes. Only samples of large values are compared."""
    if isinstance(value, _PLAIN):
        found: object = repr(value)
    elif isinstance(value, Tensor):
        found = _fingerprint_tensor(value)
    elif _is_array(value):
        found = _fingerprint_array(value)
    elif depth == 0:
        found = type(value).__name__
    elif _has_state(value):
        found = _fingerprint(_state_of(value), depth)
    elif isinstance(value, Iterator):
        found = _fingerprint_iterator(value, depth)
    else:
        found = _fingerprint_container(value, depth)
    return found


def _fingerprint_container(value: object, depth: int) -> object:
    if isinstance(value, Mapping):
        parts = list(islice(value.items(), 4 * _ENDS))
    elif isinstance(value, list | tuple | deque):
        parts = [*islice(value, _ENDS), *islice(reversed(value), _ENDS)]
    elif isinstance(value, set):
        return len(value), tuple(sorted(map(repr, islice(value, _ENDS))))
    else:
        return type(value).__name__
    return len(value), tuple(_fingerprint(part, depth - 1) for part in parts)


def _fingerprint_iterator(value: Iterator[object], depth: int) -> object:
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, _fingerprint(frame.f_locals, depth - 1))
    try:
        return value.__length_hint__()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, TypeError):
        return type(value).__name__


def _fingerprint_array(array: numpy.ndarray) -> object:
    if array.dtype.kind == "O":
        return array.shape
    flat = array.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLED)][:_SAMPLED]
    return array.shape, str(array.dtype), sample.tobytes()


def _fingerprint_tensor(tensor: Tensor) -> object:
    if tensor.is_sparse or tensor.is_quantized or not tensor.numel():
        return tuple(tensor.shape), str(tensor.dtype)
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].cpu()
    numbers = sample.to(torch.float64) if not sample.dtype.is_complex else sample.abs().double()
    return tuple(tensor.shape), str(tensor.dtype), numbers.numpy().tobytes()


def _state_of(value: _HasState) -> object:
    try:
        return value.state_dict()
    except Exception:  # a user's class: what cannot be read is not judged
        return None


def _is_generator(value: object) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return value is not torch.default_generator
    loaded = sys.modules.get("numpy")
    if loaded is None:
        return False
    return isinstance(value, loaded.random.Generator | loaded.random.RandomState)


def _read_generator(generator: Any) -> object:
    """Return the state of a generator as tensors and plain data."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _restore_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
        return
    if isinstance(generator, random.Random):
        (version, numbers, gauss) = state
        generator.setstate((version, tuple(numbers), gauss))
        return
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)

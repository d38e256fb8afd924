"""Import a workload from `package.module:Name`, and attribute errors in it to lines of the user's
code.

Python's search path (PYTHONPATH, installed packages) is searched first, then the project's folder.
The folder of the configuration file is not searched, because other nodes do not have it.
"""

import difflib
import hashlib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.layout import workload_prefix
from ebbflow.core.program import IMPORT_ROOT, PACKAGE_ROOT, PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.training.errors import TrainingError, WorkloadError
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Workload, WorkloadContext

P = ParamSpec("P")
R = TypeVar("R")
# Workloads are plug-ins: the built-in ones are named as those of users are.
DEFAULT_WORKLOAD = "ebbflow.workloads:TextWorkload"
# Exceptions that mean a mistake in the code, which every attempt would repeat. RuntimeError,
# OSError and ValueError are not among them: they may come from memory that ran out, a lost peer or
# an incomplete file.
MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)

REQUIRED = ("model", "units", "next_batch", "loss", "flops", "evaluate")
DEFAULT_WEIGHT_UNIT = "samples"
_NOT_THE_USERS = (
    str(PACKAGE_ROOT / "training"),
    str(IMPORT_ROOT / "ebbflow"),
    os.path.dirname(os.__file__),
)

WorkloadFactory = Callable[[WorkloadContext], Workload]


def wrap_user_workload(workload: Workload, name: str) -> Workload:
    """Wrap a workload so that a mistake in the user's own code raises WorkloadError with its file
    and line.

    A mistake is an exception such as TypeError or KeyError that a line of the user's code raised.
    Other exceptions pass unchanged, because another rank or the machine may have caused them.
    """
    return cast(Workload, _WrappedWorkload(workload, name))


def workload_context(
    config: RunConfig,
    gang: Gang,
    *,
    store: Store,
    prepared: Mapping[str, Json] | None = None,
    alive: Callable[[], object] = lambda: None,
) -> WorkloadContext:
    """Return the `WorkloadContext` of one rank. A user's workload gets its own folder in `store`.

    The ranks of a tensor group, which have the same data, count as one.
    """
    group = config.parallel.tensor_size
    return WorkloadContext(
        config=config,
        store=store if config.workload is None else store.sub(workload_prefix(config.workload)),
        project_root=PROJECT_ROOT,
        prepared=dict(prepared or {}),
        rank=gang.rank // group,
        world_size=max(1, gang.world_size // group),  # a trial has one rank
        device=gang.device,
        gather=gang.gather if group == 1 else lambda row: gang.gather(row)[::group].contiguous(),
        alive=alive,
    )


def find_workload(config: RunConfig) -> WorkloadFactory:
    """Return the class or function that the setting `workload` names. Raises WorkloadError."""
    return _find_factory(config.workload or DEFAULT_WORKLOAD)


def find_default_workload() -> WorkloadFactory:
    """Return the built-in language model, which a configuration without `workload` trains."""
    return _find_factory(DEFAULT_WORKLOAD)


def prepare_data(config: RunConfig, context: WorkloadContext) -> JsonObject:
    """Run the workload's `prepare`, if the workload has one, and return the dict that it returned.

    The keys "fingerprint" and "weight_unit" are added to the dict if missing. Raises WorkloadError
    if `prepare` raises an exception or returns something other than a JSON object.
    """
    door = find_workload(config)
    described: JsonObject = {}
    if has_prepare(door):
        with user_code(f"{config.workload or 'text'}: prepare"):
            described = door.prepare(context)  # type: ignore[attr-defined]
        described = _as_json(described, config)
    content = described or {"workload": config.workload, "options": config.workload_options}
    described.setdefault(
        "fingerprint", hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    )
    described.setdefault("weight_unit", str(getattr(door, "weight_unit", DEFAULT_WEIGHT_UNIT)))
    return described


def has_prepare(door: WorkloadFactory) -> bool:
    """Return whether a workload has a `prepare`.

    Raises WorkloadError if it is an instance method.
    """
    prepare = getattr(door, "prepare", None)
    if prepare is None:
        return False
    bound_later = inspect.isclass(door) and inspect.isfunction(
        inspect.getattr_static(door, "prepare")
    )
    if bound_later or not callable(prepare):
        raise WorkloadError(
            f"{_place(prepare)}prepare is called on the class, before any workload is made; "
            "fix: write @classmethod above it: def prepare(cls, context)"
        )
    return True


def make_workload(config: RunConfig, context: WorkloadContext) -> Workload:
    """Build this rank's workload, and check that it has all required methods.

    Raises WorkloadError.
    """
    door = find_workload(config)
    with user_code(f"{config.workload or 'text'}(context)"):
        workload = door(context)
    missing = [name for name in REQUIRED if not callable(getattr(workload, name, None))]
    if missing:
        raise WorkloadError(
            f"{_place(door)}{type(workload).__name__} has no method {', '.join(missing)}; "
            f"fix: a workload has {', '.join(REQUIRED)} (docs/workloads.md)"
        )
    return workload


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert an exception in this context into a one-line WorkloadError that names the line of the
    user's code.
    """
    try:
        yield
    except (TrainingError, InfraError):  # their messages need no file and line
        raise
    except Exception as error:
        raise _raised(error, what) from error


def describe_mistake(error: BaseException, what: str) -> str:
    """Describe an exception raised by `what` (such as "the dataset"), with the line in the user's
    code.
    """
    return str(_raised(error, what))


class _WrappedWorkload:
    def __init__(self, workload: Workload, name: str) -> None:
        self._workload = workload
        self._name = name

    def __getattr__(self, key: str) -> Any:
        found = getattr(self._workload, key)
        if key in REQUIRED:
            return _named(found, f"{self._name}.{key}")
        return found


def _named(method: Callable[P, R], what: str) -> Callable[P, R]:
    @wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return method(*arguments, **options)
        except MISTAKES as error:
            if _is_foreign(traceback.extract_tb(error.__traceback__)[-1].filename):
                raise
            raise _raised(error, what) from error

    return call


def _find_factory(workload: str) -> WorkloadFactory:
    module_name, _, name = workload.partition(":")
    module = _import(module_name)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise WorkloadError(_no_such_name(module, name))
        found = getattr(found, part)
    if not callable(found):
        raise WorkloadError(
            f"workload {workload} is a {type(found).__name__}, which cannot be called; "
            "fix: name a class, or a function that returns a workload"
        )
    return cast(WorkloadFactory, found)


def _raised(error: BaseException, what: str) -> WorkloadError:
    """Return a WorkloadError with the line of the user's code that raised the error.

    If the traceback has no line of the user's code, the WorkloadError has the innermost line.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    frame = ([frame for frame in frames if not _is_foreign(frame.filename)] or frames)[-1]
    where = f"{frame.filename}:{frame.lineno}"
    text = error
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
        text = error.msg
    return WorkloadError(
        f"{where}: {what} raised {type(error).__name__}: "
        f"{' '.join(str(text).split()) or 'no message'}"
    )


def _import(name: str) -> ModuleType:
    if str(PROJECT_ROOT) not in sys.path:
        sys.path.append(str(PROJECT_ROOT))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _raised(error, f"importing workload module {name}") from error
        searched = os.environ.get("PYTHONPATH") or "not set"
        raise WorkloadError(
            f"workload: there is no module {error.name!r}; looked in {PROJECT_ROOT}, among the "
            f"installed packages, and in PYTHONPATH ({searched}); fix: "
            f"PYTHONPATH=/the/folder/that/holds/{error.name.split('.')[0]}, as an absolute path"
        ) from None
    except (Exception, SystemExit) as error:  # an import may raise anything
        raise _raised(error, f"importing workload module {name}") from error


def _no_such_name(module: ModuleType, name: str) -> str:
    own = {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    # A module that imports on first use says what it offers
    names = list(getattr(module, "__all__", ())) or [
        key for key, value in own.items() if callable(value)
    ]
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"it defines {', '.join(sorted(names)) or 'no class or function'}"
    return f"{module.__file__}: has no {name!r}, which workload names; fix: {hint}"


def _as_json(described: Any, config: RunConfig) -> JsonObject:
    try:
        plain = json.loads(json.dumps(described, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"{config.workload}: what prepare returns must be JSON, since it travels to all "
            f"ranks: {error}; fix: return names, numbers and fingerprints, and put data into "
            "context.store"
        ) from error
    if not isinstance(plain, dict) or not isinstance(plain.get("fingerprint", ""), str):
        raise WorkloadError(
            f"{config.workload}: prepare returned a {type(described).__name__}; fix: return a dict; its "
            '"fingerprint", where it has one, is a text that changes with the data'
        )
    return plain


def _place(code: Callable[..., Any]) -> str:
    """Return "file:line: " for a class or function, or "" if its source is unknown."""
    try:
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}: "
    except (OSError, TypeError):
        return ""


def _is_foreign(file: str) -> bool:
    return file.startswith(("<", *_NOT_THE_USERS)) or "site-packages" in Path(file).parts

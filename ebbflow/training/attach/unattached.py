"""Recognize a script that never calls `ebbflow.attach`, before it starts, and bill it as a whole.

Such a script is watched and billed, but nothing of it is saved.
"""

import ast
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ebbflow.core.errors import Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import OUTCOME, LedgerClass, Origin
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.reporter import Clock

# Packages that never call attach. Others may: a library can contain a Trainer, to which Ebbflow adds
# its callback.
_NEVER_ATTACH = frozenset(
    {"PIL", "matplotlib", "numpy", "pandas", "scipy", "sklearn", "torch", "torchvision", "tqdm"}
)
# Modules that import others by names that are not in the source
_DYNAMIC = frozenset({"importlib", "runpy", "subprocess", "multiprocessing"})
_DYNAMIC_CALLS = frozenset({"__import__", "exec", "eval"})


@contextlib.contextmanager
def bill_unattached(
    spec: WorkerSpec, script: str, has_attached: Callable[[], bool]
) -> Iterator[None]:
    """Record the time and outcome of a script that does not attach, for this rank.

    The context is the script's run. The first rank records the outcome; a failure is recorded by the
    agent. A rank without an agent records nothing.
    """
    if spec.result_path is None:
        yield
        return
    # The log opens at the end, because an attached job opens one of its own
    phases: list[Callable[[EventLog], object]] = []
    clock = Clock(lambda name, **data: phases.append(lambda log: log.emit(name, **data)))
    clock.enter(LedgerClass.SCRIPT)
    completed = False
    try:
        yield
        completed = True
    finally:
        if not has_attached():
            clock.enter(LedgerClass.SHUTDOWN)
            clock.emit_phases()
            _record(spec, phases, describe_unattached(script) if completed else None)


def describe_unattached(script: str) -> str:
    return f"{script} did not call ebbflow.attach: watched and billed, nothing was saved"


def never_attaches(script: Path) -> bool:
    """Return whether the source proves that the script cannot attach a job.

    The source is that of the script and of the modules beside it. False if it is not certain.
    """
    folder = script.resolve().parent
    pending = [script.resolve()]
    read: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in read:
            continue
        read.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return False
        if _calls_dynamically(tree):
            return False
        for package in _imported_packages(tree):
            files = _find_beside(folder, package)
            pending += files
            if not files and not _is_harmless(package):
                return False
    return True


def _record(
    spec: WorkerSpec, phases: Sequence[Callable[[EventLog], object]], message: str | None
) -> None:
    """Write the events in `phases` and, on rank 0 with a `message`, the outcome "completed"."""
    rank = int(os.environ.get("RANK", "0"))
    origin = Origin(
        job=spec.job,
        run=spec.run,
        attempt=spec.attempt,
        generation=spec.generation,
        node=spec.node,
        rank=rank,
    )
    with EventLog(Store.open(spec.store_uri).sub(job_prefix(spec.job)), origin) as log:
        for emit_phase in phases:
            emit_phase(log)
        if message is not None and rank == 0:
            outcome = str(Outcome.COMPLETED)
            log.emit(OUTCOME, step=0, outcome=outcome, weights_sha256=None, message=message)


def _is_harmless(package: str) -> bool:
    if package in _DYNAMIC:
        return False
    return package in sys.stdlib_module_names or package in _NEVER_ATTACH


def _find_beside(folder: Path, package: str) -> list[Path]:
    module = folder / f"{package}.py"
    if module.is_file():
        return [module]
    return sorted((folder / package).rglob("*.py"))


def _imported_packages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _calls_dynamically(tree: ast.AST) -> bool:
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return any(name in _DYNAMIC_CALLS for name in names)

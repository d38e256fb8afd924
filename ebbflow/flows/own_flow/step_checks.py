"""Checks of a step with `@ebbflow` before anything runs, and the files that its tasks need."""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from metaflow.exception import MetaflowException

from ebbflow.core.errors import InfraError
from ebbflow.core.program import IMPORT_ROOT
from ebbflow.core.requirements import FLOW_EXTRA, REQUIREMENTS
from ebbflow.core.store_address import resolve_address
from ebbflow.flows.own_flow.script_arguments import ScriptOptions
from ebbflow.flows.own_flow.step_options import OptionError, StepOptions

if TYPE_CHECKING:
    from metaflow import FlowSpec
    from metaflow.datastore import FlowDataStore
    from metaflow.decorators import StepDecorator
    from metaflow.graph import FlowGraph

REMOTE = ("batch", "kubernetes")  # decorators that send a step to another machine
NO_SHARED_ATTACH = (
    "budget_of_all needs the cost of a trial before it starts, which is unknown for a loop in the "
    "step; fix: move the loop into a script, for current.ebbflow.run, or use budget="
)
# Their `create` adds the decorator to all steps, after ours has checked its step
SCHEDULERS = {"argo-workflows": "kubernetes", "step-functions": "batch"}
STORE_FOLDER = "ebbflow"  # beside the folders of flows in Metaflow's datastore
_PACKED_FOLDER = "ebbflow_flow_files"  # of a flow's configurations, in the code package
_SPIN = "spin"  # datastore of `spin`, which runs a step here, whatever @batch or @kubernetes say
_RELATIVE_PATH = re.compile(r"[\w.-][\w./ -]{0,200}\.\w+")
# Commands after which a missing file matters
_STARTING = frozenset({"run", "resume", "check", "create"})
_SUFFIXES = (".py", ".yaml", ".json", ".csv", ".js", ".css", ".txt")


class OwnFlowError(MetaflowException):
    """Error: a step with `@ebbflow` cannot train. The message names place and fix."""

    headline = "@ebbflow"


class FinalError(OwnFlowError):
    """Error: a training has ended, and a new attempt of the step would end in the same way."""


class BudgetReached(FinalError):
    """Error: a training has reached its budget, or cannot finish within it."""


@dataclass(frozen=True, kw_only=True)
class TrainingCall:
    """A call of `current.ebbflow` in a step's source. Calls of run and train have a literal file
    name.
    """

    kind: str  # run, train or attach
    file: str  # "" for attach
    line: int
    arguments: tuple[str, ...]  # names of the keyword arguments
    # the argument `set` of a training, such as {"training.max_steps": 400}; None if it is computed
    overrides: Mapping[str, object] | None
    # words and options of a script; None if one of them is computed
    words: tuple[object, ...] | None
    values: Mapping[str, object] | None


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """A step with `@ebbflow` whose options are valid."""

    name: str
    place: str  # file:line of the step
    options: StepOptions
    store: str  # address of the store of all jobs
    datastore: str  # type of the flow's datastore, such as local or s3
    flow_folder: Path  # folder of the flow's file
    backend: str | None  # batch or kubernetes if the step runs there, else None
    is_gang: bool  # whether it is called with num_parallel
    is_caught: bool  # whether it has @catch
    nodes: int | None  # number of nodes; None if it is computed
    calls: tuple[TrainingCall, ...]
    files: tuple[Path, ...]  # scripts and configurations that the source names

    def find_file(self, name: str) -> Path | None:
        """Return a file by its path, which is relative to the flow's file or to the current folder."""
        return _find_file(name, self.flow_folder)


def check_step(
    attributes: Mapping[str, object],
    flow: FlowSpec,
    graph: FlowGraph,
    step_name: str,
    decorators: Sequence[StepDecorator],
    datastore: FlowDataStore,
) -> CheckedStep:
    """Check a step's options, store, files and arguments. Raises OwnFlowError."""
    node = graph[step_name]
    file = Path(inspect.getfile(type(flow)))
    place = f"{file.name}:{node.func_lineno}"
    where = f"{place}: @ebbflow of step {step_name}"
    _check_packages(where)
    options = _parse_options(attributes, where)
    folder = file.resolve().parent
    calls = tuple(_find_calls(getattr(type(flow), step_name)))
    backend = None if datastore.TYPE == _SPIN else _find_backend(decorators)
    is_remote = backend is not None
    store = _choose_store(options, datastore, folder, where)
    if is_remote and "://" not in store:
        raise OwnFlowError(
            f"{where}: the store {store} is a folder, which the container does not keep; fix: "
            "store='s3://bucket/prefix'"
        )
    _check_names(graph, step_name, options, where)
    _check_shared_budget(graph, step_name, options, calls, where)
    add_requirements(decorators, where)
    files = tuple(
        _check_call(call, folder, f"{file.name}:{call.line}", is_remote=is_remote)
        for call in calls
        if call.kind != "attach"
    )
    if options.config is not None:
        config = _find_file(options.config, folder)
        if config is None:
            raise OwnFlowError(
                f"{where}: config={options.config!r} is no file in {folder}; fix: its path, "
                "relative to the flow's file"
            )
        files = (*files, config)
    return CheckedStep(
        name=step_name,
        place=place,
        options=options,
        store=store,
        datastore=datastore.TYPE,
        flow_folder=folder,
        backend=backend,
        is_gang=node.parallel_step,
        is_caught=any(decorator.name == "catch" for decorator in decorators),
        nodes=_find_nodes(graph, step_name),
        calls=calls,
        files=files,
    )


def add_requirements(decorators: Sequence[StepDecorator], where: str) -> None:
    """Add the packages that Ebbflow needs to the step's `@pypi`, unless the user names their
    versions.

    Raises OwnFlowError for a `@conda` that lacks them, because conda channels use other names.
    """
    needed = [requirement for requirement in REQUIREMENTS if requirement.name != "metaflow"]
    for decorator in decorators:
        if decorator.name not in ("pypi", "conda") or decorator.attributes.get("disabled"):
            continue
        given = decorator.attributes.get("packages") or {}
        known = {_normal_name(name) for name in given}
        if "pytorch" in known:
            known.add("torch")
        lacking = [
            requirement for requirement in needed if _normal_name(requirement.name) not in known
        ]
        if decorator.name == "pypi":
            versions = {
                requirement.name: str(requirement).removeprefix(requirement.name)
                for requirement in lacking
            }
            decorator.attributes["packages"] = {**given, **versions}
        elif lacking and decorator.statically_defined:
            names = ", ".join(requirement.name for requirement in lacking)
            raise OwnFlowError(
                f"{where}: @conda lacks packages of Ebbflow: {names}; fix: add them under the names "
                "of your channel, or use @pypi, to which they are added"
            )


def list_package_files(step: CheckedStep) -> list[tuple[str, str]]:
    """Return (path, name in the code package) of Ebbflow's own files, and of the configurations
    that a step names.

    Metaflow packs Python files beside the flow by itself.
    """
    packed: list[tuple[str, str]] = []
    for parent, folders, names in os.walk(IMPORT_ROOT / "ebbflow"):
        folders[:] = sorted(folder for folder in folders if folder != "__pycache__")
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix in _SUFFIXES or name == "py.typed":
                packed.append((str(path), str(path.relative_to(IMPORT_ROOT))))
    for path in step.files:
        if path.suffix != ".py" and path.is_relative_to(step.flow_folder):
            relative = path.relative_to(step.flow_folder)
            packed.append((str(path), str(Path(_PACKED_FOLDER, relative))))
    return packed


def print_unpacked_files(step: CheckedStep) -> None:
    """Print the files beside the flow that a script names and that no other machine will have.

    To stderr, since a compiled workflow may be on stdout.
    """
    suffixes = _list_package_suffixes()
    if step.backend is None or not suffixes or not _STARTING.intersection(sys.argv[1:]):
        return
    flow = Path(sys.argv[0]).name
    for script in step.files:
        if script.suffix != ".py":
            continue
        unpacked = [
            name
            for name in _find_named_files(script, step.flow_folder)
            if not name.lower().endswith(suffixes) and step.flow_folder / name not in step.files
        ]
        if unpacked:
            added = {Path(name).suffix.lower() for name in unpacked}
            given = added.union(suffixes).difference(_packed_by_default())
            print(
                f"@ebbflow: {step.place}: {script.name} names {', '.join(unpacked)}, which the code "
                f"package leaves out; fix, if it reads them: python {flow} "
                f"--package-suffixes={','.join(sorted(given))} …",
                file=sys.stderr,
                flush=True,
            )


def find_scheduler(arguments: Sequence[str]) -> str | None:
    """Return the production scheduler to which a command line deploys the flow, or None."""
    if "create" not in arguments:
        return None
    return next((name for name in SCHEDULERS if name in arguments), None)


def _find_backend(decorators: Sequence[StepDecorator]) -> str | None:
    """Return the backend to which a step is sent: batch, kubernetes, or None for this machine."""
    scheduler = find_scheduler(sys.argv)
    if scheduler is not None:
        return SCHEDULERS[scheduler]
    names = {decorator.name for decorator in decorators}
    return next((name for name in REMOTE if name in names), None)


def _check_packages(where: str) -> None:
    missing = [
        requirement.name
        for requirement in REQUIREMENTS
        if requirement.extra == FLOW_EXTRA and find_spec(requirement.module) is None
    ]
    if missing:
        raise OwnFlowError(
            f"{where}: not installed: {', '.join(missing)}; fix: pip install 'ebbflow[flow]'"
        )


def _parse_options(attributes: Mapping[str, object], where: str) -> StepOptions:
    given = attributes.get("options") or {}
    values = attributes.get("values") or []
    assert isinstance(values, list)
    if values:
        raise OwnFlowError(
            f"{where}: {values[0]!r} has no name; fix: write each option by name, such as "
            "@ebbflow(budget=25)"
        )
    assert isinstance(given, Mapping)
    try:
        return StepOptions.parse(given)
    except OptionError as error:
        raise OwnFlowError(f"{where}: {error}") from error


def _choose_store(options: StepOptions, datastore: FlowDataStore, folder: Path, where: str) -> str:
    """Return the address of the store: the option or, by default, a folder beside the flow's
    datastore.
    """
    if options.store is not None:
        try:
            address = resolve_address(options.store)
        except InfraError as error:
            raise OwnFlowError(f"{where}: {error}") from error
        if "://" in address:
            return address
        return str((folder / Path(address).expanduser()).resolve())
    root = str(datastore.datastore_root)
    if datastore.TYPE in ("local", _SPIN):
        return str(Path(root).resolve() / STORE_FOLDER)
    if datastore.TYPE == "s3":
        return f"{root.rstrip('/')}/{STORE_FOLDER}"
    raise OwnFlowError(
        f"{where}: the flow's datastore is {datastore.TYPE} ({root}), and commits are kept in a "
        "folder or in S3; fix: store='s3://bucket/prefix'"
    )


def _check_names(graph: FlowGraph, step_name: str, options: StepOptions, where: str) -> None:
    """Raise OwnFlowError if another step's jobs have the same name, because one would continue the
    other.
    """
    label = options.name or step_name
    for node in graph:
        if node.name == step_name:
            continue
        for decorator in node.decorators:
            if decorator.name != "ebbflow_task":
                continue
            other = (decorator.attributes.get("options") or {}).get("name") or node.name
            if other == label:
                raise OwnFlowError(
                    f"{where}: step {node.name} (line {node.func_lineno}) has the job name "
                    f"{label!r} too, so that one would continue the other; fix: another name="
                )


def _check_shared_budget(
    graph: FlowGraph,
    step_name: str,
    options: StepOptions,
    calls: Sequence[TrainingCall],
    where: str,
) -> None:
    if options.budget_of_all is None:
        return
    parents = [graph[name] for name in graph[step_name].split_parents]
    if not any(parent.type == "foreach" and not parent.parallel_foreach for parent in parents):
        raise OwnFlowError(
            f"{where}: budget_of_all is for the trials of a foreach, and the step is in none; fix: "
            f"budget={options.budget_of_all:g}"
        )
    if any(call.kind == "attach" for call in calls):
        raise OwnFlowError(f"{where}: {NO_SHARED_ATTACH}")


def _check_call(call: TrainingCall, folder: Path, where: str, *, is_remote: bool) -> Path:
    """Check a call's file and arguments, and return the file. Raises OwnFlowError."""
    path = _find_file(call.file, folder)
    if path is None:
        raise OwnFlowError(
            f"{where}: {call.kind}({call.file!r}): no such file in {folder}; fix: its path, "
            "relative to the flow's file"
        )
    if is_remote and not path.is_relative_to(folder):
        raise OwnFlowError(
            f"{where}: {path} is outside {folder}, whose files Metaflow copies to other machines; "
            "fix: move it beside the flow"
        )
    if call.kind == "train":
        unknown_names = set(call.arguments) - {"set"}
        if unknown_names:
            raise OwnFlowError(
                f"{where}: train has no argument {min(unknown_names)}; fix: set={{KEY: VALUE}}"
            )
    if call.kind == "run":
        options = ScriptOptions.read(path)
        unknown = options.find_unknown(dict.fromkeys(call.arguments))
        if unknown is not None:
            known = ", ".join(option for option in options.actions if option.startswith("--"))
            raise OwnFlowError(
                f"{where}: {call.file} has no option for {unknown}=; fix: one of {known}"
            )
    return path


def _normal_name(package: str) -> str:
    """Return a package's name in the normalized form of PEP 503."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _list_package_suffixes() -> tuple[str, ...]:
    """Return the endings of the files that Metaflow packs, in lower case; empty outside its command
    line.
    """
    from metaflow._vendor import click

    context = click.get_current_context(silent=True)
    given: Sequence[str] = getattr(context and context.obj, "package_suffixes", ())
    if not given:
        return ()
    return tuple({suffix.lower() for suffix in given} | _packed_by_default())


def _packed_by_default() -> set[str]:
    """Return the endings that Metaflow packs whatever `--package-suffixes` is."""
    from metaflow.metaflow_config import DEFAULT_PACKAGE_SUFFIXES

    return set(str(DEFAULT_PACKAGE_SUFFIXES).lower().split(","))


def _find_named_files(script: Path, folder: Path) -> list[str]:
    """Return the files in a folder, or below it, whose relative path is a text of a script."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return []
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    paths = [text for text in texts if _RELATIVE_PATH.fullmatch(text) and ".." not in text]
    return sorted(path for path in paths if os.path.isfile(folder / path))


def _find_file(name: str, folder: Path) -> Path | None:
    for base in (folder, Path.cwd(), IMPORT_ROOT / _PACKED_FOLDER):
        path = (base / Path(name).expanduser()).resolve()
        if path.is_file():
            return path
    return None


def _find_calls(function: object) -> Iterator[TrainingCall]:
    """Yield the calls of `current.ebbflow` in a step's source."""
    try:
        lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        before, found, kind = ast.unparse(node.func).rpartition("ebbflow.")
        if not found or not before.endswith("current."):
            continue  # a function of the user's
        if kind == "attach":
            yield TrainingCall(
                kind=kind,
                file="",
                line=first + node.lineno - 1,
                arguments=(),
                overrides=None,
                words=None,
                values=None,
            )
        if not node.args:
            continue
        file = node.args[0]
        if kind in ("run", "train") and isinstance(file, ast.Constant):
            names = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
            words, values = _read_arguments(node)
            yield TrainingCall(
                kind=kind,
                file=str(file.value),
                line=first + node.lineno - 1,
                arguments=names,
                overrides=_read_overrides(node),
                words=words,
                values=values,
            )


def _read_arguments(
    call: ast.Call,
) -> tuple[tuple[object, ...] | None, Mapping[str, object] | None]:
    """Return a call's positional arguments after the file, and its keyword arguments.

    Each of the two is None if the source computes one of its values.
    """
    words = None
    values = None
    with contextlib.suppress(ValueError):
        words = tuple(ast.literal_eval(word) for word in call.args[1:])
    with contextlib.suppress(ValueError):
        if all(keyword.arg is not None for keyword in call.keywords):
            values = {str(key.arg): ast.literal_eval(key.value) for key in call.keywords}
    return words, values


def _read_overrides(call: ast.Call) -> Mapping[str, object] | None:
    for keyword in call.keywords:
        if keyword.arg == "set":
            try:
                value = ast.literal_eval(keyword.value)
            except ValueError:
                return None
            if isinstance(value, dict):
                return value
            return None
    return {}


def _find_nodes(graph: FlowGraph, step_name: str) -> int | None:
    """Return the number of nodes of a step; None if the source computes it."""
    numbers: list[int | None] = [
        node.num_parallel for node in graph if node.parallel_foreach and step_name in node.out_funcs
    ]
    return numbers[0] if numbers else 1

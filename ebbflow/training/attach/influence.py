"""Judge from a script's source whether a variable can change what the script trains.

A variable that changes from step to step and is not saved makes a resumed run inexact only if it is
carried from one step to the next, and if its value reaches something that trains: a backward pass,
an optimizer's settings, an update in place, a random draw, or the end of the loop. A running mean
that is printed is carried, but reaches nothing.

A best loss that decides whether the script saves its best model trains nothing either. Such a
variable is told apart, since the script's own file would be another one after a resume.

The analysis follows assignments, conditions and calls of functions in the same file. It knows no
types: it errs towards "reaches" for the operations above, and towards "does not reach" for calls of
libraries.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import cache

_DEEPEST_CALL = 4
_PASSES = 5
_BACKWARD = {"backward", "manual_backward"}
_SETTERS = {"load_state_dict", "manual_seed", "manual_seed_all", "seed", "set_epoch", "set_state"}
_STEPS = {"step", "zero_grad", *_BACKWARD}
_DRAWS = frozenset(
    {"rand", "randn", "randint", "random", "choice", "choices", "shuffle", "sample", "randperm"}
    | {"normal", "uniform", "permutation", "bernoulli", "multinomial", "standard_normal"}
    | {"integers", "rand_like", "randn_like"}
)
_MUTATORS = {"append", "appendleft", "extend", "update", "add", "insert", "push", "put", "heappush"}
# Of torch, safetensors, transformers, accelerate, Lightning and shutil
_SAVES = frozenset(
    {"save", "save_state", "save_checkpoint", "copyfile"}
    | {"save_file", "save_model", "save_pretrained"}
)
_SETTINGS = {"lr", "momentum", "weight_decay", "betas", "initial_lr"}
# Attributes of parameters, and those by which callbacks end a framework's loop
_STORED = {"data", "grad", "lr", "should_training_stop", "should_stop", "should_epoch_stop"}
_SHOWN = {"print", "len", "str", "format", "repr", "float", "int", "round", "item", "tolist"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Kind(StrEnum):
    """What a variable holds."""

    PLAIN = auto()  # a number, text, or a container of them
    TENSORS = auto()  # a tensor, an array, or a container of them
    STATEFUL = auto()  # an object with a state_dict, such as a module or a scheduler


@dataclass
class ScriptFile:
    """A parsed file of a user, with its functions by name."""

    tree: ast.Module
    functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = field(default_factory=dict)

    @classmethod
    def of(cls, filename: str) -> ScriptFile | None:
        """Return the parsed file, or None if its source is not available."""
        return _parse(filename)

    def scope(self, first_line: int) -> list[ast.stmt]:
        """Return the body of the function that begins at `first_line`, or of the module if none
        does.
        """
        for definitions in self.functions.values():
            for function in definitions:
                lines = [function.lineno, *(node.lineno for node in function.decorator_list)]
                if first_line in lines:
                    return function.body
        return self.tree.body

    def find_line(self, body: Sequence[ast.stmt], name: str) -> int:
        """Return the line that first assigns a name or attribute, or 0."""
        for node in _walk(body):
            if isinstance(node, ast.expr) and _is_target(node, name) and _stores(node):
                return node.lineno
        return 0

    def find_line_in_functions(self, name: str) -> int:
        """Return the first line, in any of the functions, that assigns `name`; 0 if none does."""
        lines: list[int] = []
        for definitions in self.functions.values():
            lines += [self.find_line(function.body, name) for function in definitions]
        return min(filter(None, lines), default=0)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a variable is used: the statements of its scope and the line that runs now."""

    source: ScriptFile
    body: Sequence[ast.stmt]
    line: int
    machines: frozenset[str] = frozenset()  # names of modules, optimizers, loaders and samplers


@dataclass(frozen=True, kw_only=True)
class Influence:
    """What a variable's value in one step can change later."""

    trains: bool = False  # what steps train, or what the script makes of it after the loop
    save_line: int = 0  # line of a save by the script that it decides; 0 if none, or if it trains
    is_reset: bool = False  # whether an outer loop, such as that over the epochs, writes it anew


def find_influence(place: Place, name: str, kind: Kind) -> Influence:
    """Return what a variable's value in one step can change later.

    Args:
        name: a variable, or an attribute as ".count".
    """
    loops = [
        node
        for node in _walk(place.body)
        if isinstance(node, _LOOPS) and node.lineno <= place.line <= (node.end_lineno or 0)
    ]
    # The target of a loop is written before its body runs
    bodies = [loop.body for loop in loops if not _is_loop_target(loop, name)]
    is_local = len(bodies) < len(loops)
    is_attribute = name.startswith(".")
    shared = _functions_with(place.source, name)
    if is_attribute or not loops:
        bodies += [function.body for function in shared]
    if is_local or not bodies:
        return Influence()
    accesses = {_first_access(body, name, place.machines) for body in bodies}
    if _Access.READ not in accesses:
        return Influence()
    is_reset = _is_reset_by_epochs(loops, name, place.machines)
    region = [*bodies[:1], *(function.body for function in shared)]
    flow = _Flow(place.source, place.machines)
    if any(flow.reaches(body, {name}) for body in region):
        return Influence(trains=True, is_reset=is_reset)
    if kind is not Kind.PLAIN and loops:
        after = [node for node in place.body if node.lineno > (loops[0].end_lineno or 0)]
        if _is_used(after, name):
            return Influence(trains=True, is_reset=is_reset)
    return Influence(save_line=min(flow.decided_saves, default=0), is_reset=is_reset)


def _is_reset_by_epochs(
    loops: Sequence[ast.For | ast.AsyncFor | ast.While], name: str, machines: frozenset[str]
) -> bool:
    """Return whether the job's loop over its epochs writes a variable first that a loop in it reads
    first.

    Args:
        loops: loops, each in the one before.
    """
    for number, loop in enumerate(loops):
        if not isinstance(loop, ast.For) or not _find_calls([ast.Expr(loop.iter)], {"epochs"}):
            continue
        inner = [_first_access(within.body, name, machines) for within in loops[number + 1 :]]
        return _first_access(loop.body, name, machines) is _Access.WRITE and _Access.READ in inner
    return False


def find_random_draws(*objects: object) -> str:
    """Return where the code of the given objects first draws a random number, such as
    "train.py:18".

    The code is that of their classes and functions. Return "" if it draws none.
    """
    for value in objects:
        code = value if inspect.isroutine(value) else type(value)
        try:
            lines, first = inspect.getsourcelines(code)  # pyright: ignore[reportArgumentType]
            tree = ast.parse(textwrap.dedent("".join(lines)))
            path = inspect.getsourcefile(code) or ""  # pyright: ignore[reportArgumentType]
        except (OSError, TypeError, SyntaxError, ValueError):
            continue  # a built-in, or without source
        if "site-packages" in path:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _call_name(node) in _DRAWS:
                return f"{os.path.basename(path)}:{first + node.lineno - 1}"
    return ""


class _Access(Enum):
    READ = auto()
    WRITE = auto()


def _is_used(statements: Sequence[ast.stmt], name: str) -> bool:
    """Return whether the variable is returned or passed to a call, other than one that only shows
    it.
    """
    for node in _walk(statements):
        if isinstance(node, ast.Call) and _call_name(node) not in _SHOWN:
            used = any(_mentions(argument, {name}) for argument in _arguments(node))
        else:
            used = isinstance(node, ast.Return) and _mentions(node, {name})
        if used:
            return True
    return False


class _Flow:
    """Analysis that follows a variable's value through statements.

    Attributes:
        decided_saves: lines of the script's own saves that depend on the value.
    """

    def __init__(self, source: ScriptFile, machines: frozenset[str]) -> None:
        self._source = source
        self._machines = machines
        self.decided_saves: set[int] = set()

    def reaches(self, statements: Sequence[ast.stmt], names: set[str], depth: int = 0) -> bool:
        """Return whether a value of the variables `names` reaches an operation that trains."""
        tainted = set(names)
        for _ in range(_PASSES):
            before = len(tainted)
            tainted |= self._find_functions(tainted)
            if any(self._visit(statement, tainted, False, depth) for statement in statements):
                return True
            if len(tainted) == before:
                return False
        return False

    def _find_functions(self, tainted: set[str]) -> set[str]:
        """Return the functions, as "name()", that return a tainted attribute or module variable."""
        found = set()
        for name, definitions in self._source.functions.items():
            for function in definitions:
                parameters = _parameters(function)
                if any(
                    isinstance(node, ast.Return) and _mentions(node, tainted - parameters)
                    for node in _walk(function.body)
                ):
                    found.add(f"{name}()")
        return found

    def _visit(self, node: ast.stmt, tainted: set[str], controlled: bool, depth: int) -> bool:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            return False
        if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.Raise) and controlled:
            return True
        is_assignment = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        if is_assignment and self._assigns(node, tainted, controlled):
            return True
        inner = controlled or any(_mentions(part, tainted) for part in _conditions(node))
        if isinstance(node, ast.For | ast.AsyncFor) and _mentions(node.iter, tainted):
            self._taint(node.target, tainted)
        for call in _own_calls(node):
            if self._calls(call, tainted, inner, depth):
                return True
        return any(self._visit(child, tainted, inner, depth) for child in _children(node))

    def _assigns(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, tainted: set[str], controlled: bool
    ) -> bool:
        if not controlled and (node.value is None or not _mentions(node.value, tainted)):
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(self._taint(target, tainted) for target in targets)

    def _taint(self, target: ast.expr, tainted: set[str]) -> bool:
        """Taint the target of an assignment, and return whether a change of this target affects
        training.
        """
        trains = any(getattr(node, "attr", "") == "param_groups" for node in ast.walk(target))
        match target:
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    trains = self._taint(part, tainted) or trains
            case ast.Starred():
                trains = self._taint(target.value, tainted)
            case ast.Attribute():
                tainted.add(f".{target.attr}")
                trains = trains or target.attr in _STORED
            case ast.Subscript(slice=ast.Constant(value=key)) if key in _SETTINGS:
                trains = True
            case ast.Subscript():
                trains = self._taint(target.value, tainted) or trains
            case ast.Name():
                tainted.add(target.id)
        return trains

    def _calls(self, call: ast.Call, tainted: set[str], controlled: bool, depth: int) -> bool:
        name = _call_name(call)
        target = call.func.value if isinstance(call.func, ast.Attribute) else None
        given = any(_mentions(argument, tainted) for argument in _arguments(call))
        on_it = target is not None and _mentions(target, tainted)
        if controlled and name in _SAVES:
            self.decided_saves.add(call.lineno)
        if name in _STEPS:
            return given or controlled or on_it
        if name in _SETTERS:
            return given or controlled
        if name in _DRAWS and controlled:
            return True
        if _is_in_place(name) and (given or controlled) and not (on_it and not given):
            return not on_it or given
        if given and target is not None and _root(target) in self._machines:
            return True
        if given and name in _MUTATORS and target is not None:
            self._taint(target, tainted)
        return self._calls_function(call, name, tainted, controlled, depth)

    def _calls_function(
        self, call: ast.Call, name: str, tainted: set[str], controlled: bool, depth: int
    ) -> bool:
        """Follow a call into functions of the same file, and return whether it affects training
        there.
        """
        if depth >= _DEEPEST_CALL:
            return False
        for function in self._source.functions.get(name, ()):
            inside = {shared for shared in tainted if shared.startswith(".")}
            inside |= _tainted_parameters(function, call, tainted)
            if controlled and _has_effect(function.body):
                return True
            if controlled and _find_calls(function.body, _SAVES):
                self.decided_saves.add(call.lineno)
            if inside and self.reaches(function.body, inside, depth + 1):
                return True
        return False


@cache
def _parse(filename: str) -> ScriptFile | None:
    text = "".join(linecache.getlines(filename))
    if not text:
        return None
    try:
        source = ScriptFile(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(source.tree):
        if isinstance(node, _FUNCTIONS):
            source.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):  # a call of the class calls its __init__
            for method in node.body:
                if isinstance(method, _FUNCTIONS) and method.name in ("__init__", "__call__"):
                    source.functions.setdefault(node.name, []).append(method)
    return source


def _first_access(  # noqa: PLR0911 (one return for each kind of statement)
    statements: Iterable[ast.stmt], name: str, machines: frozenset[str]
) -> _Access | None:
    """Return whether the statements first read or first write the variable; None if neither is
    certain.

    machines: names of loaders, among others.
    """
    for node in statements:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, ast.AugAssign) and _is_target(node.target, name):
            return _Access.READ
        if any(_reads(part, name) for part in _expressions(node)):
            return _Access.READ
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_is_target(target, name) for target in targets):
                return _Access.WRITE
        if isinstance(node, ast.For | ast.AsyncFor) and _is_target(node.target, name):
            return _Access.WRITE
        branches = [_first_access(body, name, machines) for body in _blocks(node)]
        if _Access.READ in branches:
            return _Access.READ
        if isinstance(node, ast.For | ast.AsyncFor) and _writes_for_each_batch(
            node, name, machines
        ):
            return _Access.WRITE
        certain = isinstance(node, ast.With | ast.AsyncWith | ast.Try) or (
            isinstance(node, ast.If) and bool(node.orelse)
        )
        if certain and branches and set(branches) == {_Access.WRITE}:
            return _Access.WRITE
    return None


def _writes_for_each_batch(
    loop: ast.For | ast.AsyncFor, name: str, machines: frozenset[str]
) -> bool:
    """Return whether a loop over a loader, which is not empty, writes the variable in each pass
    before it reads it.
    """
    calls = [part for part in ast.walk(loop.iter) if isinstance(part, ast.Call)]
    is_over_batches = _mentions(loop.iter, set(machines)) or any(
        _call_name(call) == "batches" for call in calls
    )
    if not is_over_batches:
        return False
    for node in loop.body:
        access = _first_access([node], name, machines)
        if access is not None:
            return access is _Access.WRITE
        if any(isinstance(part, ast.Continue | ast.Break) for part in ast.walk(node)):
            return False
    return False


def _find_calls(statements: Sequence[ast.stmt], names: Collection[str]) -> list[ast.Call]:
    return [
        node
        for node in _walk(statements)
        if isinstance(node, ast.Call) and _call_name(node) in names
    ]


def _has_effect(statements: Sequence[ast.stmt]) -> bool:
    """Return whether the statements train or draw random numbers, whatever values they use."""
    return any(
        isinstance(node, ast.Call)
        and (_call_name(node) in _STEPS | _DRAWS | _SETTERS or _is_in_place(_call_name(node)))
        for node in _walk(statements)
    )


def _functions_with(source: ScriptFile, name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions that use a given attribute or module variable."""
    found = []
    for definitions in source.functions.values():
        for function in definitions:
            uses = (
                name not in _parameters(function)
                and _mentions(function, {name})
                and function not in found
            )
            if uses and (name.startswith(".") or not _assigns_locally(function, name)):
                found.append(function)
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}


def _assigns_locally(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Global | ast.Nonlocal) and name in node.names for node in nodes):
        return False
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in nodes
    )


def _tainted_parameters(
    function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call, tainted: set[str]
) -> set[str]:
    names = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    if names[:1] == ["self"]:
        names = names[1:]
    found = set()
    for name, argument in zip(names, call.args, strict=False):
        if _mentions(argument, tainted):
            found.add(name)
    for keyword in call.keywords:
        if keyword.arg is not None and _mentions(keyword.value, tainted):
            found.add(keyword.arg)
    return found


def _walk(statements: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """Yield all nodes in breadth-first order, without the nodes of nested functions and classes."""
    for statement in statements:
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            continue
        waiting: list[ast.AST] = [statement]
        while waiting:
            node = waiting.pop(0)
            yield node
            waiting += [
                child
                for child in ast.iter_child_nodes(node)
                if not isinstance(child, (*_FUNCTIONS, ast.ClassDef))
            ]


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of statements in a compound statement."""
    found = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(node, "handlers", [])]
    return [block for block in found if block and isinstance(block[0], ast.stmt)]


def _children(node: ast.stmt) -> list[ast.stmt]:
    children: list[ast.stmt] = []
    for block in _blocks(node):
        children += block
    return children


def _expressions(node: ast.stmt) -> list[ast.expr]:
    """Return the expressions of a compound statement's header, without those in its blocks."""
    found = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    for context in getattr(node, "items", []):
        found.append(context.context_expr)
    return found


def _conditions(node: ast.stmt) -> list[ast.expr]:
    """Return the expressions that decide whether and how often the blocks of a statement run."""
    return [
        part
        for part in (getattr(node, "test", None), getattr(node, "iter", None))
        if part is not None
    ]


def _own_calls(node: ast.stmt) -> list[ast.Call]:
    calls: list[ast.Call] = []
    for expression in _expressions(node):
        calls += [part for part in ast.walk(expression) if isinstance(part, ast.Call)]
    return calls


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _call_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    if isinstance(call.func, ast.Name):
        return call.func.id
    return ""


def _is_in_place(name: str) -> bool:
    """Return whether a tensor method works in place, which a final "_" in its name shows."""
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__")


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _mentions(node: ast.AST, names: set[str]) -> bool:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in names:
            return True
        if isinstance(part, ast.Attribute) and f".{part.attr}" in names:
            return True
        if isinstance(part, ast.Call) and f"{_call_name(part)}()" in names:
            return True
    return False


def _reads(node: ast.expr, name: str) -> bool:
    """Return whether an expression reads a variable, or stores into an item or attribute of it."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Name | ast.Attribute):
            continue
        found = part.id if isinstance(part, ast.Name) else f".{part.attr}"
        if found == name and isinstance(part.ctx, ast.Load):
            return True
    return False


def _is_loop_target(loop: ast.stmt, name: str) -> bool:
    return isinstance(loop, ast.For | ast.AsyncFor) and _is_target(loop.target, name)


def _stores(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _is_target(target: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return any(_is_target(part, name) for part in target.elts)
    if isinstance(target, ast.Attribute):
        return f".{target.attr}" == name
    return isinstance(target, ast.Name) and target.id == name

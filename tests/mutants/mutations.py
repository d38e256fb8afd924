"""One-line changes of decisive code: what a mutant is, where they are made, and how some are drawn."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Files whose lines decide about money, checkpoints, survival, data order, configuration and
# diagnoses.
DECISION_MODULES = (
    "ebbflow/cost/capacity/*.py",
    "ebbflow/cost/ledger/*.py",
    "ebbflow/cost/plan/guarantee.py",
    "ebbflow/cost/prices/*.py",
    "ebbflow/cost/finance/bill_matching.py",
    "ebbflow/cost/finance/reconcile.py",
    "ebbflow/flows/attempts/placement.py",
    "ebbflow/flows/attempts/settlement.py",
    "ebbflow/flows/supervising/*.py",
    "ebbflow/core/config/name_rules.py",
    "ebbflow/core/config/rule_base.py",
    "ebbflow/core/config/shape_rules.py",
    "ebbflow/diagnose/judging.py",
    "ebbflow/infra/notices.py",
    "ebbflow/core/reliability.py",
    "ebbflow/core/store/*.py",
    "ebbflow/core/terms.py",
    "ebbflow/training/checkpoint/commit.py",
    "ebbflow/training/checkpoint/lineage.py",
    "ebbflow/training/checkpoint/reader.py",
    "ebbflow/training/checkpoint/restore.py",
    "ebbflow/training/checkpoint/retention.py",
    "ebbflow/training/checkpoint/signing.py",
    "ebbflow/training/data/stream.py",
    "ebbflow/training/data/tokens.py",
    "ebbflow/training/engine/guards/*.py",
    "ebbflow/training/launch/blame.py",
    "ebbflow/training/launch/continuation.py",
    "ebbflow/training/launch/evidence_collector.py",
    "ebbflow/training/launch/membership.py",
    "ebbflow/training/launch/preemption.py",
    "ebbflow/training/launch/replacements.py",
    "ebbflow/training/launch/roster.py",
    "ebbflow/training/launch/watch.py",
    "ebbflow/training/limits.py",
    "ebbflow/training/engine/optimizer.py",
    "ebbflow/training/step_sync.py",
)
_LONGEST_SHOWN = 300  # characters of the changed source
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
_TYPES = {
    "Callable",
    "Future",
    "Iterable",
    "Iterator",
    "Literal",
    "Mapping",
    "Sequence",
    "deque",
    "dict",
    "frozenset",
    "list",
    "tuple",
}
_CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "ceil": "floor",
    "floor": "ceil",
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: The file, relative to the root of the project.
        line: The line of the changed expression or statement, from 1.
        at_import: Whether the changed code runs when the module is imported, and not in a function.
        before: The source of the changed node.
        after: The source that replaces it.
        start: First byte of the node in the file.
        end: The byte after the node.
    """

    path: str
    line: int
    at_import: bool
    before: str
    after: str
    start: int
    end: int

    @property
    def change(self) -> str:
        """The change on one line."""
        before = " ".join(self.before.split())
        if len(before) > _LONGEST_SHOWN:
            before = before[:_LONGEST_SHOWN] + " …"
        after = " ".join(self.after.split())
        return f"{before} → {after}"

    def apply(self, source: bytes) -> bytes:
        """Return the source of the file with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def decision_files(root: Path) -> list[str]:
    """Return the decision modules below `root`, as relative paths in their order."""
    files = []
    for pattern in DECISION_MODULES:
        for path in sorted(root.glob(pattern)):
            files.append(str(path.relative_to(root)))
    return files


def draw_mutants(
    root: Path, seed: int, count: int, files: list[str] | None = None, *, empty: bool = False
) -> list[Mutant]:
    """Draw `count` different mutants of the decision modules, or of `files`; each mutant is equally
    likely.

    Args:
        empty: Draw functions without their body instead: a test of such a function that passes
            cannot fail.

    Returns:
        The mutants in the order of their files and lines; all of them if there are fewer than
        `count`.
    """
    if empty:
        list_candidates = list_empty_functions
    else:
        list_candidates = list_mutants
    candidates: list[Mutant] = []
    for file in files or decision_files(root):
        candidates += list_candidates(root, file)
    random.Random(seed).shuffle(candidates)
    drawn: list[Mutant] = []
    for mutant in candidates:
        if len(drawn) == count:
            break
        if _is_change(root, mutant):
            drawn.append(mutant)
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.line, mutant.change))


def list_mutants(root: Path, path: str) -> list[Mutant]:
    """Return every mutant of a file; a few of them do not parse, or say the same in other words."""
    source = (root / path).read_bytes()
    offsets = _line_offsets(source)
    mutants: dict[tuple[int, int, str], Mutant] = {}
    for node, at_import in _decisive_nodes(ast.parse(source)):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        for after in _replacements(node):
            mutants[start, end, after] = Mutant(
                path=path,
                line=node.lineno,
                at_import=at_import,
                before=source[start:end].decode(),
                after=after,
                start=start,
                end=end,
            )
    return list(mutants.values())


def list_empty_functions(root: Path, path: str) -> list[Mutant]:
    """Return each function of a file without what it does: it returns None at once."""
    source = (root / path).read_bytes()
    offsets = _line_offsets(source)
    mutants: list[Mutant] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is None:
            body = node.body
        else:
            body = node.body[1:]
        if not body:
            continue
        first = body[0]
        last = body[-1]
        start = offsets[first.lineno - 1] + first.col_offset
        end = offsets[(last.end_lineno or last.lineno) - 1] + (last.end_col_offset or 0)
        mutants.append(
            Mutant(
                path=path,
                line=first.lineno,
                at_import=False,
                before=source[start:end].decode(),
                after="return None",
                start=start,
                end=end,
            )
        )
    return mutants


def _is_change(root: Path, mutant: Mutant) -> bool:
    source = (root / mutant.path).read_bytes()
    try:
        changed = ast.parse(mutant.apply(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def _line_offsets(source: bytes) -> list[int]:
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _decisive_nodes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, bool]]:
    """Yield the nodes that are changed, and whether they run at import.

    Left out: annotations, imports, f-strings and the arguments of `raise`. Texts are no decisions,
    and in Python 3.11 the parts of an f-string have no position of their own.
    """
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, at_import = pending.pop()
        if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.JoinedStr):
            yield node, at_import
        if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(
            node.test, ast.Name | ast.Attribute | ast.Call
        ):
            # The test as a whole is negated. Comparisons and conditions are changed by their own
            # rules.
            yield ast.copy_location(ast.UnaryOp(ast.UAdd(), node.test), node.test), at_import
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "bases", "type_comment"):
                continue
            if isinstance(value, list):
                children = value
            else:
                children = [value]
            inside = field == "body" and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            for child in children:
                left_out = ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom | ast.Assert
                if isinstance(child, ast.Raise) and not at_import:
                    yield child, at_import  # it may be deleted; its message is not changed
                if (
                    isinstance(child, ast.AST)
                    and not isinstance(child, left_out)
                    and not _is_for_types(child)
                ):
                    pending.append((child, at_import and not inside))


def _is_for_types(node: ast.AST) -> bool:
    """Return whether only type checkers read a node: `if TYPE_CHECKING:`, or a type such as
    `Callable[[int], str]`.
    """
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) in _TYPES


# One case for each kind of node.
def _replacements(node: ast.expr | ast.stmt) -> Iterator[str]:  # noqa: C901, PLR0912
    """Yield the sources that may stand in place of a node."""
    match node:
        case ast.Compare():
            yield from _changed_comparisons(node)
        case ast.BoolOp():
            yield from _changed_conditions(node)
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(node.operand)})"
        case ast.UnaryOp(op=ast.UAdd()):
            yield f"(not {ast.unparse(node.operand)})"
        case ast.BinOp():
            yield from _changed_terms(node)
        case ast.Constant():
            yield from _changed_constants(node)
        case ast.Call():
            yield from _changed_calls(node)
        case ast.Set() | ast.Tuple() | ast.List():
            yield from _without_each_element(node)
        case ast.IfExp():
            yield f"({ast.unparse(node.body)})"
            yield f"({ast.unparse(node.orelse)})"
        case ast.AugAssign():
            yield from _changed_updates(node)
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete():
            yield "pass"
        case ast.Break():
            yield "continue"
        case ast.Continue():
            yield "break"
        case _:
            pass


def _changed_comparisons(node: ast.Compare) -> Iterator[str]:
    for index, operator in enumerate(node.ops):
        changed = copy.deepcopy(node)
        changed.ops[index] = _COMPARISONS[type(operator)]()
        yield f"({ast.unparse(changed)})"


def _changed_conditions(node: ast.BoolOp) -> Iterator[str]:
    changed = copy.deepcopy(node)
    if isinstance(node.op, ast.And):
        changed.op = ast.Or()
    else:
        changed.op = ast.And()
    yield f"({ast.unparse(changed)})"
    for index in range(len(node.values)):
        rest = node.values[:index] + node.values[index + 1 :]
        if len(rest) == 1:
            kept: ast.expr = rest[0]
        else:
            kept = ast.BoolOp(node.op, rest)
        yield f"({ast.unparse(kept)})"


def _changed_terms(node: ast.BinOp) -> Iterator[str]:
    if isinstance(node.left, ast.JoinedStr | ast.Constant) and not _is_number(node.left):
        return  # a text
    replacement = _OPERATORS.get(type(node.op))
    if replacement is not None:
        changed = copy.deepcopy(node)
        changed.op = replacement()
        yield f"({ast.unparse(changed)})"
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        yield f"({ast.unparse(node.left)})"
    if isinstance(node.op, ast.Add | ast.Mult):
        yield f"({ast.unparse(node.right)})"


def _is_number(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    )


def _changed_constants(node: ast.Constant) -> Iterator[str]:
    value = node.value
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield str(value + 1)
        if value > 0:
            yield str(value - 1)
    elif isinstance(value, float):
        yield repr(value * 2 if value else 1.0)
        if value:
            yield repr(value / 2)


def _changed_calls(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    module, _, function = name.rpartition(".")
    if function in _CALLS and module in ("", "math"):
        changed = copy.deepcopy(node)
        changed.func = ast.parse(
            f"{module}.{_CALLS[function]}" if module else _CALLS[function], mode="eval"
        ).body
        if function == "sorted":
            changed.keywords = []
        yield ast.unparse(changed)
    if function in ("min", "max") and len(node.args) > 1 and not node.keywords:
        for index in range(len(node.args)):
            rest = node.args[:index] + node.args[index + 1 :]
            if not any(isinstance(argument, ast.Starred) for argument in rest):
                kept = copy.deepcopy(node)
                kept.args = rest
                yield f"({ast.unparse(rest[0])})" if len(rest) == 1 else ast.unparse(kept)
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            changed = copy.deepcopy(node)
            del changed.keywords[index]
            yield ast.unparse(changed)


def _without_each_element(node: ast.Set | ast.Tuple | ast.List) -> Iterator[str]:
    is_value = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    is_index = any(isinstance(element, ast.Slice) for element in node.elts)
    if not is_value or is_index or len(node.elts) < 2:
        return
    for index in range(len(node.elts)):
        changed = copy.deepcopy(node)
        del changed.elts[index]
        text = ast.unparse(changed)
        yield text if text.startswith(("(", "[", "{")) else f"({text})"


def _changed_updates(node: ast.AugAssign) -> Iterator[str]:
    replacement = _OPERATORS.get(type(node.op))
    if replacement is not None:
        changed = copy.deepcopy(node)
        changed.op = replacement()
        yield ast.unparse(changed)
    yield "pass"

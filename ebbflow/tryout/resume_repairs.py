"""Repairs of a script whose resume loses state: edits of its source, which the doctor tries in a
copy.

Only a repair with which the script resumed exactly is shown as one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ebbflow.tryout.resume_findings import AVERAGES, LostState
from ebbflow.tryout.resume_patches import LOSSES, Places, find_patch

# A wrong number that the script restores itself can cause these
_BY_WRONG_COUNT = frozenset({"counter", "data", "drawn data", "index", "unknown"})
_MOST_SHIFTS = 8
_ATTACH = "attach"


@dataclass(frozen=True)
class Insertion:
    """Text to insert into a file, at a line (from 1) and before a column (from 0, in bytes)."""

    file: str
    line: int
    column: int
    text: str


@dataclass(frozen=True)
class Repair:
    """Edits that together restore one state, and the lines that describe them to the user."""

    insertions: tuple[Insertion, ...]
    lines: tuple[str, ...]


def propose_repairs(
    sources: Mapping[str, str], findings: Sequence[LostState], places: Places
) -> list[list[Repair]]:
    """Return sets of repairs to try, the likeliest first.

    Each set repairs all findings together.
    """
    restored: list[Repair] = []
    complete = True
    for finding in findings:
        repair = _restore(sources, finding, places)
        if repair is not None:
            restored.append(repair)
        elif finding.kind not in _BY_WRONG_COUNT:
            complete = False
    if not complete:
        return []
    trials = [restored] if restored else []
    if any(finding.kind in _BY_WRONG_COUNT for finding in findings):
        others = [repair for repair in restored if not _is_of_counter(repair, findings)]
        trials += [[*others, shift] for shift in _shift_counts(sources, places)]
    return trials


def apply_repairs(sources: Mapping[str, str], repairs: Iterable[Repair]) -> dict[str, str]:
    """Apply all edits of the repairs, and return the changed sources."""
    insertions: list[Insertion] = []
    for repair in repairs:
        insertions += repair.insertions
    texts = dict(sources)
    # From the end, so that places before an edit stay the same
    for insertion in sorted(insertions, key=lambda edit: (edit.line, edit.column), reverse=True):
        lines = texts[insertion.file].splitlines(keepends=True)
        line = lines[insertion.line - 1].encode()
        before = line[: insertion.column].decode()
        after = line[insertion.column :].decode()
        lines[insertion.line - 1] = f"{before}{insertion.text}{after}"
        texts[insertion.file] = "".join(lines)
    return texts


def _restore(sources: Mapping[str, str], finding: LostState, places: Places) -> Repair | None:
    """Return a repair that saves and loads the lost variable, or None if no repair can be tried."""
    if places.attached:
        return _give_to_attach(sources, finding)
    found_load = _find_load(sources, places.load)
    if found_load is None:
        return None
    file, loaded, last = found_load
    patch = find_patch(finding, checkpoint=loaded)
    if patch is None or _reads_key(sources, loaded, patch.key):
        return None  # none to write, or the script restores it already
    load = Insertion(
        file,
        last.end_lineno or last.lineno,
        last.end_col_offset or 0,
        f"\n{' ' * last.col_offset}{patch.loaded}",
    )
    shown_load = f"after {_line(file, last.end_lineno or 0, places)}: {patch.loaded}"
    if _saves_key(sources, patch.key):
        return Repair((load,), (shown_load,))
    save = _extend_save(sources, places.save, patch.key, patch.value)
    if save is None:
        return None
    shown_save = (
        f"{_line(save[0].file, save[0].line, places)} also saves {patch.key!r}: {patch.value}"
    )
    return Repair((*save, load), (shown_save, shown_load))


def _give_to_attach(sources: Mapping[str, str], finding: LostState) -> Repair | None:
    is_object = finding.kind in AVERAGES or finding.kind not in LOSSES
    if not is_object or not finding.variable:
        return None
    keyword = re.sub(r"\W+", "_", finding.variable.rpartition(".")[2]).strip("_")
    for file, call in _calls(sources, _ATTACH):
        text = f", {keyword}={finding.variable}"
        if not call.args and not call.keywords:
            text = text.removeprefix(", ")
        end = Insertion(file, call.end_lineno or 0, (call.end_col_offset or 1) - 1, text)
        shown = f"line {end.line}: attach(…, {keyword}={finding.variable})"
        return Repair((end,), (shown,))
    return None


def _is_of_counter(repair: Repair, findings: Sequence[LostState]) -> bool:
    names = [finding.variable for finding in findings if finding.kind == "counter"]
    shown = "\n".join(repair.lines)
    return any(f" {name} = " in shown for name in names)


def _shift_counts(sources: Mapping[str, str], places: Places) -> list[Repair]:
    """Return repairs that change a restored number by 1, because it may be off by one.

    The first ones cancel an addition or subtraction of 1 in the script. The others add or subtract
    1.
    """
    found_load = _find_load(sources, places.load)
    if found_load is None:
        return []
    _, loaded, _ = found_load
    taken_back: list[Repair] = []
    shifted: list[Repair] = []
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Assign):
                continue
            where = f"{_line(file, node.lineno, places)}: {ast.unparse(node.targets[0])} = "
            value = node.value
            if isinstance(value, ast.BinOp) and _reads_from(value.left, loaded):
                opposite = _opposite_of(value)
                if opposite:
                    shown = f"{where}{ast.unparse(value.left)}"
                    taken_back.append(_append(file, value, opposite, shown))
            elif _reads_from(value, loaded):
                for shift in (" + 1", " - 1"):
                    shown = f"{where}{ast.unparse(value)}{shift}"
                    shifted.append(_append(file, value, shift, shown))
    return [*taken_back, *shifted][:_MOST_SHIFTS]


def _append(file: str, value: ast.expr, text: str, shown: str) -> Repair:
    return Repair(
        (Insertion(file, value.end_lineno or 0, value.end_col_offset or 0, text),), (shown,)
    )


def _reads_from(value: ast.expr, loaded: str) -> bool:
    return isinstance(value, ast.Subscript) and ast.unparse(value.value) == loaded


def _opposite_of(operation: ast.BinOp) -> str:
    """Return the text that cancels `… + 1` or `… - 1`, or "" for any other operation."""
    if not (isinstance(operation.right, ast.Constant) and operation.right.value == 1):
        return ""
    if isinstance(operation.op, ast.Add):
        return " - 1"
    return " + 1" if isinstance(operation.op, ast.Sub) else ""


def _find_load(sources: Mapping[str, str], place: str) -> tuple[str, str, ast.stmt] | None:
    """Return the file that loads, the variable that is assigned, and the last statement of the
    block.

    Return None if the script's call that loads is unknown.
    """
    file, _, number = place.rpartition(":")
    if file not in sources or not number.isdecimal():
        return None
    for block in _blocks(ast.parse(sources[file])):
        for statement in block:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                continue
            covers = statement.lineno <= int(number) <= (statement.end_lineno or 0)
            if covers and isinstance(statement.targets[0], ast.Name):
                return file, statement.targets[0].id, block[-1]
    return None


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _extend_save(
    sources: Mapping[str, str], place: str, key: str, value: str
) -> tuple[Insertion, ...] | None:
    """Return edits that make the script's saving call also save `value` under `key`."""
    file, _, number = place.rpartition(":")
    if file not in sources or not number.isdecimal():
        return None
    for name in ("save", "dump"):
        for _, call in _calls({file: sources[file]}, name):
            if not call.args or not call.lineno <= int(number) <= (call.end_lineno or 0):
                continue
            saved = call.args[0]
            begin = (file, saved.lineno, saved.col_offset)
            end = (file, saved.end_lineno or 0, saved.end_col_offset or 0)
            return Insertion(*begin, "dict("), Insertion(*end, f", {key}={value})")
    return None


def _reads_key(sources: Mapping[str, str], loaded: str, key: str) -> bool:
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and ast.unparse(node.value) == loaded
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == key
        for node in _walk(sources)
    )


def _saves_key(sources: Mapping[str, str], key: str) -> bool:
    """Return whether the script has a dict with this key."""
    names: list[ast.expr | None] = []
    for node in _walk(sources):
        if isinstance(node, ast.Dict):
            names += node.keys
    return any(isinstance(name, ast.Constant) and name.value == key for name in names)


def _calls(sources: Mapping[str, str], name: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield all calls of functions and methods with this name, each with its file."""
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                yield file, node


def _walk(sources: Mapping[str, str]) -> Iterator[ast.AST]:
    for source in sources.values():
        yield from ast.walk(ast.parse(source))


def _line(file: str, number: int, places: Places) -> str:
    """Format a line's place: "line 53" in the script itself, "line other.py:53" in another file."""
    return f"line {f'{file}:{number}'.removeprefix(f'{places.script}:')}"

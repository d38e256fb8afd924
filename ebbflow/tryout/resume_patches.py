"""The smallest patch that lets a script restore a state which its resume loses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ebbflow.tryout.resume_findings import AVERAGES, LostState, last_name

_RESTORED_TOO_EARLY = (
    "restore it at the loop's first step, because something draws from it before, such as "
    "iter(loader)"
)


@dataclass(frozen=True)
class Places:
    """The script, and file and line of its calls that save and load, such as `train.py:53`; "" for
    a call that was not seen.
    """

    script: str
    save: str
    load: str


def explain(
    sources: dict[str, str], finding: LostState, places: Places, *, only: str = ""
) -> list[str]:
    """Return lines of text: the lost state, the line that assigns it, and the smallest patch.

    Args:
        sources: text of each file of the script, by name.
        only: ranks that lose the state if rank 0 keeps it, such as " on rank 1".
    """
    kind, variable = finding
    save = places.save or _find_call(sources, "save") or f"{places.script}:?"
    load = places.load or _find_call(sources, "load") or f"{places.script}:?"
    assigned = ""
    if variable and kind != "random":
        assigned = find_assignment(sources, variable)
    first = f"  {assigned or save}: {_describe(finding)}{only}".replace("  ", " ")
    lines = [f"  {first.strip()}"]
    restored = ""
    if kind == "random" and not only:
        generator = _GENERATORS[variable]
        restored = _find_call(sources, generator.put_name, of=generator.module, loaded=True)
    patch = _find_patch(finding, only=bool(only))
    if restored:
        lines.append(f"      fix: {_line(restored, places)}: {_RESTORED_TOO_EARLY}")
    elif patch is None:
        lines.append(f"      fix: {_line(save, places)}: {_LOSSES[kind].fix}")
    else:
        lines.append(f"      fix: {_line(save, places)} saves:  {patch.saved}")
        lines.append(f"           {_line(load, places)} loads:  {patch.loaded}")
    lines.append("           or let ebbflow.attach save it (docs/attach.md)")
    return lines


def find_assignment(sources: dict[str, str], variable: str) -> str:
    """Return file and line of the first assignment to a variable or attribute; "" if there is none."""
    name = last_name(variable)
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            assigned = node.id if isinstance(node, ast.Name) else node.attr
            if assigned == name and isinstance(node.ctx, ast.Store):
                return f"{file}:{node.lineno}"
    return ""


class _Loss(NamedTuple):
    what: str
    fix: str


_LOSSES = {
    "start": _Loss(
        "nothing is resumed: the second start begins at step 1",
        "load what you save, before the loop",
    ),
    "weights": _Loss(
        "weights are not restored: they are those of no saved step",
        "save and load model.state_dict()",
    ),
    "buffers": _Loss(
        "buffers of the model, such as BatchNorm's statistics, are lost",
        "save model.state_dict() as a whole",
    ),
    "data": _Loss(
        "other samples are read after a resume",
        "skip the batches that were read, with the order of that epoch",
    ),
    "drawn data": _Loss(
        "other samples are read after a resume",
        "restore the random state, by which they may be drawn",
    ),
    "random": _Loss("the random state is lost", ""),
    "counter": _Loss("the count starts anew", ""),
    "index": _Loss(
        "counts from 0 after a resume",
        "begin at the batch to resume from: enumerate(loader, start)",
    ),
    "unknown": _Loss(
        "weights differ, and no state that was seen explains it",
        "compare the first steps after a resume",
    ),
}


class _Generator(NamedTuple):
    get: str
    put: str  # {} stands for the saved state
    module: str
    put_name: str


_GENERATORS = {
    "torch": _Generator(
        "torch.get_rng_state()", "torch.set_rng_state({})", "torch", "set_rng_state"
    ),
    "random": _Generator("random.getstate()", "random.setstate({})", "random", "setstate"),
    "numpy": _Generator(
        "np.random.get_state()", "np.random.set_state({})", "np.random", "set_state"
    ),
}


class _Patch(NamedTuple):
    saved: str  # the entry of the saved dict
    loaded: str  # the statement that restores it


def _line(place: str, places: Places) -> str:
    """Return "line 53" for a place in the script itself, else "line other.py:53"."""
    return f"line {place.removeprefix(f'{places.script}:')}"


def _describe(finding: LostState) -> str:
    kind, variable = finding
    if kind in AVERAGES:
        return f"{variable} ({kind} of tensors): it is not restored"
    if kind not in _LOSSES:  # an object with a state
        return f"{variable} ({kind}): its state is not restored"
    if variable:
        return f"{variable}: {_LOSSES[kind].what}"
    return _LOSSES[kind].what


def _find_patch(finding: LostState, *, only: bool) -> _Patch | None:
    kind, variable = finding
    key = re.sub(r"\W+", "_", variable.rpartition(".")[2]).strip("_") or "state"
    if kind == "random":
        key = f"{variable}_rng"
        generator = _GENERATORS[variable]
        if only:
            restore = generator.put.format(f"checkpoint[{key!r}][rank]")
            return _Patch(f"{key!r}: that of each rank", restore)
        return _Patch(f"{key!r}: {generator.get}", generator.put.format(f"checkpoint[{key!r}]"))
    if kind in AVERAGES or kind == "counter":
        return _Patch(f"{key!r}: {variable}", f"{variable} = checkpoint[{key!r}]")
    if kind not in _LOSSES:
        restore = f"{variable}.load_state_dict(checkpoint[{key!r}])"
        return _Patch(f"{key!r}: {variable}.state_dict()", restore)
    return None


def _find_call(
    sources: dict[str, str], name: str, *, of: str = "torch", loaded: bool = False
) -> str:
    """Return file and line of the first call of a function of a module, else of a method of that
    name; else "".

    Args:
        loaded: only calls whose argument is a part of something, such as `checkpoint["rng"]`.
    """
    method = ""
    for file, call in _calls(sources):
        if not isinstance(call.func, ast.Attribute) or call.func.attr != name:
            continue
        if loaded and not _has_subscript(call.args):
            continue
        place = f"{file}:{call.lineno}"
        if ast.unparse(call.func.value) == of:
            return place
        method = method or place
    return method


def _calls(sources: dict[str, str]) -> Iterator[tuple[str, ast.Call]]:
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                yield file, node


def _has_subscript(expressions: list[ast.expr]) -> bool:
    for expression in expressions:
        if any(isinstance(part, ast.Subscript) for part in ast.walk(expression)):
            return True
    return False

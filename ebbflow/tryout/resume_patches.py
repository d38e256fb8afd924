"""Descriptions of the state that a script loses, and code that would save and restore it."""

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
    """The script's name, and the lines of its calls that save and load, such as `train.py:53`.

    A line is "" if no such call was seen.
    """

    script: str
    save: str
    load: str
    attached: bool = False  # whether `ebbflow.attach` saves


class Patch(NamedTuple):
    """Code that saves and restores one state: key and value to save, and the statement that
    restores it.
    """

    key: str
    value: str
    loaded: str


def find_patch(finding: LostState, *, checkpoint: str) -> Patch | None:
    """Return code that saves and restores the lost state, or None if no variable holds it.

    Args:
        checkpoint: the variable of the script that holds the loaded object.
    """
    kind, variable = finding
    key = re.sub(r"\W+", "_", variable.rpartition(".")[2]).strip("_") or "state"
    if kind == "random":
        key = f"{variable}_rng"
        generator = _GENERATORS[variable]
        return Patch(key, generator.get, generator.put.format(f"{checkpoint}[{key!r}]"))
    read = f"{checkpoint}[{key!r}]"
    if kind == "Generator":
        return Patch(key, f"{variable}.get_state()", f"{variable}.set_state({read})")
    if kind in AVERAGES or kind == "counter":
        return Patch(key, variable, f"{variable} = {read}")
    if kind not in LOSSES:
        return Patch(key, f"{variable}.state_dict()", f"{variable}.load_state_dict({read})")
    return None


def explain(
    sources: dict[str, str],
    finding: LostState,
    places: Places,
    *,
    only: str = "",
    is_repaired: bool = False,
) -> list[str]:
    """Describe the lost state and the line that assigns it, with advice unless a repair was found.

    Args:
        sources: text of each file of the script, by name.
        only: ranks that lose the state if rank 0 keeps it, such as " on rank 1".
        is_repaired: whether the doctor has found a repair of the script.
    """
    kind, variable = finding
    save = places.save or _find_call(sources, "save") or places.script
    assigned = ""
    if variable and kind != "random":
        assigned = find_assignment(sources, variable)
    first = f"  {assigned or save}: {_describe(finding)}{only}".replace("  ", " ")
    lines = [f"  {first.strip()}"]
    advice = _advise(sources, finding, only=only, attached=places.attached)
    if not is_repaired and advice:
        lines.append(f"      advice (not tried): {advice}")
    return lines


def find_assignment(sources: dict[str, str], variable: str) -> str:
    """Return file and line of the first assignment to a variable or attribute, or ""."""
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


LOSSES = {
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
    "counter": _Loss("the count starts anew", "save it, and load it before the loop"),
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


def _describe(finding: LostState) -> str:
    kind, variable = finding
    if kind in AVERAGES:
        return f"{variable} ({kind} of tensors): it is not restored"
    if kind not in LOSSES:  # an object with a state
        return f"{variable} ({kind}): its state is not restored"
    if variable:
        return f"{variable}: {LOSSES[kind].what}"
    return LOSSES[kind].what


def _find_call(
    sources: dict[str, str], name: str, *, of: str = "torch", loaded: bool = False
) -> str:
    """Return file and line of the first call of `of.name`, such as torch.save.

    Without one, return the first call of any method with that name, or "".

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


def _advise(sources: dict[str, str], finding: LostState, *, only: str, attached: bool) -> str:
    kind, variable = finding
    if kind == "random":
        return _advise_on_generator(sources, _GENERATORS[variable], only=only)
    if attached and kind == "counter":
        name = last_name(variable)
        return f"saved = job.state({name}=…), and saved.{name} in its place"
    if attached and kind not in LOSSES:
        return f"attach(…, {last_name(variable)}={variable})"
    if kind in LOSSES:
        return LOSSES[kind].fix
    return "save its state, and load it"


def _advise_on_generator(sources: dict[str, str], generator: _Generator, *, only: str) -> str:
    if only:
        return "save the state of each rank, and restore that of the rank"
    restored = _find_call(sources, generator.put_name, of=generator.module, loaded=True)
    if restored:
        return f"{restored}: {_RESTORED_TOO_EARLY}"
    return f"save {generator.get}, and restore it by {generator.put.format('…')}"

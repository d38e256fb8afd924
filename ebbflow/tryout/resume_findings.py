"""Analysis of the state that a resumed script has lost, from records of its steps and its
source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebbflow.tryout.script_tracer import StepRecord

# Kinds of variables that the tracer takes for a copy of the weights
AVERAGES = ("dict", "list", "tuple")
_COMPARED = {"batch": "the batch", "params": "the weights", "rng": "the random states"}
_SCHEDULE = re.compile(r"\blr\b|learning_rate|param_groups|requires_grad|weight_decay")
_SAVES = re.compile(r"save|dump|checkpoint|state", re.IGNORECASE)
# The tracer sees only what torch.save is given
_OTHER_FILES = re.compile(r"\b(json|pickle|yaml)\.dump$")
_EXITS = ("exit", "quit", "sys.exit")


class LostState(NamedTuple):
    """A kind of lost state, and the variable that holds it ("" if unknown)."""

    kind: str
    variable: str


UNEXPLAINED = LostState("unknown", "")


def why_not_repeatable(whole: list[StepRecord], killed: list[StepRecord]) -> str:
    """Describe the first difference between two runs that started equally; "" if there is none."""
    for step, (record, other) in enumerate(zip(whole, killed, strict=False), start=1):
        for key, name in _COMPARED.items():
            if key in other and record.get(key) != other[key]:
                return f"{name} of step {step}"
    return ""


def find_unlike(whole: list[StepRecord], killed: list[StepRecord]) -> frozenset[str]:
    """Return the names of counters that differ between two runs that started equally.

    An example is a time in microseconds.
    """
    unlike: set[str] = set()
    for record, other in zip(whole, killed, strict=False):
        counters = record["counters"]
        others = other["counters"]
        for name in counters.keys() & others.keys():
            if counters[name] != others[name]:
                unlike.add(name)
    return frozenset(unlike)


def compare(
    whole: list[StepRecord],
    resumed: list[StepRecord],
    kill: int,
    *,
    passing: frozenset[str] = frozenset(),
    deciding: frozenset[str] = frozenset(),
    unlike: frozenset[str] = frozenset(),
) -> tuple[int, list[LostState]]:
    """Compare a resumed run with the whole run; return the step where it continued, and its lost
    state.

    `whole` has the records of the uninterrupted run, `resumed` those of the resumed run, both of
    one rank. A run has one record of the beginning of each step, and one of the run's end.
    `passing`, `deciding` and `unlike` are names from the functions `find_...`. A lost count that
    decides nothing is "unused" if no weight differs.
    """
    if not resumed:
        return 0, [LostState("start", "")]
    first = resumed[0]
    same = [
        step for step, record in enumerate(whole[: kill + 1]) if record["params"] == first["params"]
    ]
    if not same:
        return 0, [LostState("weights", "")]
    at = same[-1]
    if at == 0:
        kind = "weights" if _some_count_went_on(whole, first, unlike) else "start"
        return 0, [LostState(kind, "")]
    before = whole[at]
    lost_counters = [name for name in _lost_counters(whole, at, first) if name not in unlike]
    findings = _lost_objects(whole, at, first)
    findings += _lost_counts(whole, lost_counters, passing=passing, deciding=deciding)
    if before.get("buffers") != first.get("buffers"):
        findings.append(LostState("buffers", ""))
    pairs = list(zip(whole[at:], resumed, strict=False))
    if all(record["params"] == other["params"] for record, other in pairs):
        return at, [_mark_unused(finding, deciding) for finding in findings]
    drawn = _lost_generators(whole, before, first)
    findings += drawn
    if any(record.get("batch") != other.get("batch") for record, other in pairs[:-1]):
        findings.append(LostState("drawn data" if drawn else "data", ""))
    if not findings:
        # Such as that of enumerate, for accumulated gradients
        findings = [LostState("index", name) for name in lost_counters]
    return at, findings or [UNEXPLAINED]


def find_passing(sources: Iterable[str]) -> frozenset[str]:
    """Return the names of numbers that start again in each epoch.

    These are indices of `enumerate`, and sums that are set in a loop.
    """
    nodes = _walk_all(map(ast.parse, sources))
    loops = [node for node in nodes if isinstance(node, ast.For | ast.While)]
    inside: list[ast.AST] = []
    for loop in loops:
        inside += _walk_all(loop.body)
    called = {
        ast.unparse(node.func).removeprefix("self.")
        for node in inside
        if isinstance(node, ast.Call)
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name in called:
            inside += _walk_all(node.body)
    targets: list[ast.expr] = []
    for node in inside:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                targets += _targets(target)
    for loop in loops:
        if isinstance(loop, ast.For) and "enumerate(" in ast.unparse(loop.iter):
            targets += _targets(loop.target)[:1]
    return frozenset(last_name(ast.unparse(target)) for target in targets)


def find_deciding(
    sources: Iterable[str], in_file: set[tuple[str, str]] | None = None
) -> frozenset[str]:
    """Return the names of counts that a resume must restore, as far as the source shows it.

    The weights of the first steps need not depend on them. They count a loop, are in the condition
    of a loop or of its end, set a learning rate, or are saved.

    Args:
        in_file: variables whose value each saved file has in one place, and this place; None if no
            save was seen. Because small numbers can be equal by chance, the place must have the
            variable's name, or the script must put the variable into a dict, list or tuple, or hand
            it to a function that saves.
    """
    deciding: set[str] = set()
    put: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            deciding |= _read_all(_deciding_expressions(node))
            put |= _read_all(_saved_expressions(node))
    if in_file is None:
        return frozenset(deciding | put)
    for variable, place in in_file:
        name = last_name(variable)
        if name == place.rpartition("/")[2] or name in put:
            deciding.add(name)
    return frozenset(deciding)


def last_name(variable: str) -> str:
    """Return the name that is assigned: "b" for `a.b`, and "a" for `a['b']`."""
    return variable.partition("[")[0].rpartition(".")[2]


def _some_count_went_on(whole: list[StepRecord], first: StepRecord, unlike: frozenset[str]) -> bool:
    """Return whether any counter starts higher in the resumed run than in the whole run."""
    begun = whole[0]["counters"]
    return any(
        name in begun and name not in unlike and value > begun[name]
        for name, value in first["counters"].items()
    )


def _mark_unused(finding: LostState, deciding: frozenset[str]) -> LostState:
    if finding.kind == "counter" and last_name(finding.variable) not in deciding:
        return LostState("unused", finding.variable)
    return finding


def _histories(whole: list[StepRecord]) -> dict[str, list[int]]:
    """Map each counter of the first step to its values in all steps."""
    histories: dict[str, list[int]] = {}
    for name in whole[0]["counters"]:
        histories[name] = [
            record["counters"][name] for record in whole if name in record["counters"]
        ]
    return histories


def _lost_counters(whole: list[StepRecord], at: int, first: StepRecord) -> list[str]:
    known = whole[at]["counters"]
    histories = _histories(whole)
    changed = [name for name, values in histories.items() if len(set(values)) > 2 and name in known]
    return [name for name in changed if first["counters"].get(name) != known[name]]


def _lost_counts(
    whole: list[StepRecord], lost: list[str], *, passing: frozenset[str], deciding: frozenset[str]
) -> list[LostState]:
    """Return the lost counters without repetitions; counters that decide about training come first.

    A number that repeats another one, such as the steps since the start, needs no saving.
    """
    histories = _histories(whole)
    kept = {tuple(values) for name, values in histories.items() if name not in lost}
    findings = []
    for name in sorted(histories, key=lambda name: last_name(name) not in deciding):
        values = histories[name]
        counts = values == sorted(values) and tuple(values) not in kept
        if name in lost and counts and last_name(name) not in passing:
            kept.add(tuple(values))
            findings.append(LostState("counter", name))
    return findings


def _lost_objects(whole: list[StepRecord], at: int, first: StepRecord) -> list[LostState]:
    """Return the objects whose state was lost, each once.

    A copy of the weights counts if it has changed since step 1. Other copies, such as one for a
    save, are not there at the first step.
    """
    findings: dict[str | int, LostState] = {}
    for name, (kind, state, *identity) in whole[at]["objects"].items():
        now = first["objects"].get(name, [])
        if list(now[:2]) == [kind, state]:
            continue
        begun = whole[0]["objects"].get(name) or whole[1]["objects"].get(name)
        if kind not in AVERAGES or (begun is not None and begun[1] != state):
            key = identity[0] if identity else name
            findings.setdefault(key, LostState(kind, name))
    return list(findings.values())


def _lost_generators(
    whole: list[StepRecord], before: StepRecord, first: StepRecord
) -> list[LostState]:
    """Return the random generators that the whole run uses and whose state was lost."""
    if before.get("rng") == first.get("rng"):
        return []
    findings = []
    for name, state in before["rng"].items():
        states = {record["rng"].get(name) for record in whole[:-1]}
        if len(states) > 1 and first["rng"].get(name) != state:
            findings.append(LostState("random", name))
    return findings


def _deciding_expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions in a node that decide how long or how the script trains."""
    match node:
        case ast.While():
            yield node.test
            yield from _ending_conditions(node)
        case ast.For():
            # Unlike the target of `range(total - done)`, which counts the steps of this start
            subtracts = any(isinstance(part, ast.Sub) for part in ast.walk(node.iter))
            if not subtracts and isinstance(node.target, ast.Name | ast.Attribute):
                yield node.target
            yield from _ending_conditions(node)
        case ast.If() | ast.IfExp() if _SCHEDULE.search(ast.unparse(node)):
            yield node.test
        case ast.Assign() if _sets_schedule(node):
            yield node.value
        case ast.Call() if _OTHER_FILES.search(ast.unparse(node.func)):
            yield from node.args[:1]


def _sets_schedule(assignment: ast.Assign) -> bool:
    return any(_SCHEDULE.search(ast.unparse(target)) for target in assignment.targets)


def _ending_conditions(loop: ast.For | ast.While) -> Iterator[ast.AST]:
    for node in _walk_all(loop.body):
        if isinstance(node, ast.If) and _ends_loop(node):
            yield node.test


def _saved_expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that a node puts into a dict, list or tuple, or passes to a saving
    function.
    """
    match node:
        case ast.Dict():
            yield from node.values
        case ast.List() | ast.Tuple():
            yield from node.elts
        case ast.Call() if _SAVES.search(ast.unparse(node.func)):
            yield from node.args
            for keyword in node.keywords:
                yield keyword.value


def _ends_loop(node: ast.If) -> bool:
    for part in _walk_all(node.body):
        if isinstance(part, ast.Break | ast.Return):
            return True
        if isinstance(part, ast.Call) and ast.unparse(part.func) in _EXITS:
            return True
    return False


def _walk_all(nodes: Iterable[ast.AST]) -> list[ast.AST]:
    walked: list[ast.AST] = []
    for node in nodes:
        walked.extend(ast.walk(node))
    return walked


def _read_all(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of variables and attributes that expressions read, except in f-strings.

    For `a.b`, these are "a" and "b".
    """
    names = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        if isinstance(node, ast.Name):
            names.add(node.id)
        if not isinstance(node, ast.JoinedStr):
            waiting += ast.iter_child_nodes(node)
    return names


def _targets(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return target.elts
    return [target]

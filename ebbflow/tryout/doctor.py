"""`ebbflow doctor SCRIPT.py [-- ARGUMENTS]`: kill a script, let it resume, and name what its resume
loses.

The script runs on the CPU in copies of its folder: once uninterrupted, and once for each kill, with
a second start that resumes by the script's own means. `script_tracer` records what each step begins
with. The resumed run is compared with the uninterrupted one, rank by rank, from the step whose
weights it has restored. A difference is harmless if it changes no weight and is in none of the
variables that hold a state.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ebbflow.tryout.script_copy import copy_folder
from ebbflow.tryout.script_tracer import Record, run_traced

_RUN_SECONDS = 180.0
_LAST_SECONDS = 10.0  # for the other ranks after one has ended
_OUTPUT_LINES = 5
_TORCHRUN = re.compile(r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|init_process_group|process group")
_CUDA = re.compile(r"CUDA|NVIDIA|NCCL", re.IGNORECASE)
# Kinds of variables that the tracer takes for a copy of the weights
_AVERAGES = ("dict", "list", "tuple")
_SCHEDULE = re.compile(r"\blr\b|learning_rate|param_groups|requires_grad|weight_decay")
_SAVES = re.compile(r"save|dump|checkpoint|state", re.IGNORECASE)
# The tracer sees only what torch.save is given
_OTHER_FILES = re.compile(r"\b(json|pickle|yaml)\.dump$")
Found = tuple[str, str]  # kind of a lost state, and the variable that holds it


def main(words: list[str]) -> int:
    """Examine a script.

    Return 0 if the script resumes exactly, 1 if it does not, 2 if it cannot be examined.
    """
    if "--" in words:
        own, arguments = (words[: words.index("--")], words[words.index("--") + 1 :])
    else:
        own, arguments = (words, [])
    parser = argparse.ArgumentParser(
        prog="ebbflow doctor", description="Find what a script's resume loses."
    )
    parser.add_argument("script", type=Path, help="the script; its arguments follow after --")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run (24)")
    parser.add_argument(
        "--kills", type=int, default=2, help="number of kills, each at a random step (2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps to kill at (0)")
    parser.add_argument(
        "--ranks",
        type=int,
        help="start as many ranks as torchrun does (2 if the script needs torchrun, else no rank)",
    )
    given = parser.parse_args(own)
    if not given.script.is_file():
        print(
            f"ebbflow: {given.script}: no such script; fix: give the path of a Python file",
            file=sys.stderr,
        )
        return 2
    # Read when torch is loaded, before the forks
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    importlib.import_module("torch.optim.optimizer")
    with tempfile.TemporaryDirectory(prefix="ebbflow-doctor-") as folder:
        return _Examination(
            given.script.resolve(), arguments, Path(folder), given.ranks or 0
        ).examine(given)


class _Run:
    """What the ranks of one run have left: records of each, the steps and places of saves, and the
    last output.
    """

    def __init__(self, traces: list[Path], outputs: list[Path]) -> None:
        lines = [[json.loads(line) for line in trace.read_text().splitlines()] for trace in traces]
        self.records: list[list[Record]] = [
            [line for line in one if "params" in line] for one in lines
        ]
        self.steps = min(map(len, self.records)) - 1
        every = [line for one in lines for line in one]
        saved = [line for line in every if "saved" in line]
        saved = [line for line in saved if line["by"] != "open"] or saved
        self.saves = sorted(line["saved"] for line in saved)
        # Variables whose value is in all files that one line saves, in one place of each; None if
        # no save was seen.
        pairs: dict[str, list[set[tuple[str, str]]]] = {}
        for line in saved:
            if "numbers" in line:
                pairs.setdefault(line["place"], []).append(
                    {(name, path) for name, path in line["numbers"]}
                )
        if pairs:
            self.in_file = {pair for one in pairs.values() for pair in set.intersection(*one)}
        else:
            self.in_file = None
        self.save_place = next((line["place"] for line in saved if line["place"]), "")
        self.load_place = next((line["loaded"] for line in every if line.get("loaded")), "")
        self.files = sorted({file for line in every for file in line.get("files", [])})
        texts = [one.read_text(errors="replace") for one in outputs]
        self.output = next((text for text in texts if "Traceback" in text), texts[0])

    @property
    def end(self) -> str:
        return "\n".join(self.output.splitlines()[-_OUTPUT_LINES:])


class _Examination:
    """Runs of one script in copies of its folder."""

    def __init__(self, script: Path, arguments: list[str], folder: Path, ranks: int) -> None:
        self._script = script
        self._arguments = arguments
        self._folder = folder
        self._ranks = ranks

    def examine(self, given: argparse.Namespace) -> int:
        name = self._script.name
        whole = self._run("whole", "whole", given.steps)
        if whole.steps < 4 and not self._ranks and _TORCHRUN.search(whole.output):
            self._ranks = 2
            whole = self._run("whole-2", "whole", given.steps)
        if whole.steps < 4:
            steps = max(whole.steps, 0)
            print(
                f"ebbflow: {name}: {steps} steps of a torch optimizer were seen, at least 4 are "
                "needed; its end:"
            )
            print(whole.end)
            if _CUDA.search(whole.end):
                print(
                    "fix: let the script use the CPU if torch.cuda.is_available() is false: no "
                    "GPU is visible here"
                )
            return 2
        saves = [step for step in whole.saves if step < whole.steps - 1]
        if not saves:
            seen = whole.steps - 1
            print(
                f"{name} does not resume: it saved nothing in its first {seen} steps; fix: save "
                "more often, or --steps"
            )
            return 1
        sources = {
            file: (self._script.parent / file).read_text()
            for file in dict.fromkeys([name, *whole.files])
        }
        passing = find_passing(sources.values())
        deciding = find_deciding(sources.values(), whole.in_file)
        remarks: dict[str, None] = {}
        choose = random.Random(given.seed)
        found = dict[Found, set[int]]()
        points = []
        places = [whole.save_place, ""]
        for number in range(given.kills):
            kill = choose.randrange(saves[0] + 1, whole.steps)
            killed = self._run(str(number), "killed", whole.steps, kill=kill)
            pairs = zip(whole.records, killed.records, strict=True)
            if why := next(
                (why for one, other in pairs if (why := _why_not_repeatable(one, other))), ""
            ):
                print(
                    f"{name} is not repeatable: two equal starts differ at {why}; fix: seed that "
                    "generator"
                )
                return 1
            resumed = self._run(str(number), "resumed", whole.steps, seed=1)
            places[1] = places[1] or resumed.load_place
            compared = [
                compare(
                    one,
                    other,
                    kill,
                    passing=passing,
                    deciding=deciding,
                    unlike=find_unlike(one, first),
                )
                for one, first, other in zip(
                    whole.records, killed.records, resumed.records, strict=True
                )
            ]
            points.append(f"killed after step {kill}, went on from step {compared[0][0]}")
            for rank, (_, lost) in enumerate(compared):
                for kind, variable in lost:
                    if kind == "unused":
                        remarks[variable] = None
                    else:
                        found.setdefault((kind, variable), set()).add(rank)
            if not all(resumed.records):
                print(resumed.end)
        if found:
            verdict = "does not resume exactly"
        else:
            verdict = f"resumes exactly, bit for bit up to step {whole.steps}"
        if self._ranks > 1:
            ranks = f" on {self._ranks} ranks"
        else:
            ranks = ""
        print(f"{name} {verdict}{ranks} ({'; '.join(points)})")
        # Of several ranks, one may have lost what makes the weights of all differ
        if len(found) > 1:
            found.pop(("unknown", ""), None)
        for (kind, variable), where in found.items():
            if 0 in where or kind == "start":
                only = ""
            else:
                only = f" on rank {', '.join(map(str, sorted(where)))}"
            print("\n".join(explain(name, sources, kind, variable, *places, only=only)))
        for variable in remarks:
            if ("counter", variable) not in found:
                place = _find_assignment(sources, _last_name(variable)) or name
                print(
                    "  remark: not restored, and no weight depends on it in these steps: "
                    f"{variable} at {place}"
                )
        return int(bool(found))

    def _run(self, folder: str, name: str, steps: int, *, kill: int = 0, seed: int = 0) -> _Run:
        """Run all ranks in one copy of the script's folder for `steps` steps, or kill them after
        the step `kill`.
        """
        copy = self._folder / folder
        if not copy.exists():
            copy_folder(self._script.parent, copy)
        sys.stdout.flush()
        if self._ranks:
            environments = _torchrun_environments(self._ranks)
        else:
            environments = [{}]
        traces = [
            self._folder / f"{folder}-{name}-{rank}.jsonl" for rank in range(len(environments))
        ]
        outputs = [trace.with_suffix(".output") for trace in traces]
        running = set()
        for environment, output in zip(environments, outputs, strict=True):
            pid = os.fork()
            if pid == 0:
                os.environ |= environment
                script = copy / self._script.name
                run_traced(script, self._arguments, traces, kill or steps, seed=seed, output=output)
            running.add(pid)
        limit = time.monotonic() + _RUN_SECONDS
        while running:
            time.sleep(0.02)
            if ended := {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}:
                running -= ended
                limit = min(limit, time.monotonic() + _LAST_SECONDS)
            if time.monotonic() > limit:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
        return _Run(traces, outputs)


def _torchrun_environments(ranks: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets, for each rank of a node."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_PORT": port,
    }
    common |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _why_not_repeatable(whole: list[Record], killed: list[Record]) -> str:
    for step, (one, other) in enumerate(zip(whole, killed, strict=False), start=1):
        for kind, what in (
            ("batch", "the batch"),
            ("params", "the weights"),
            ("rng", "the random states"),
        ):
            if kind in other and one.get(kind) != other[kind]:
                return f"{what} of step {step}"
    return ""


def find_unlike(whole: list[Record], killed: list[Record]) -> frozenset[str]:
    """Return the counters that differ between two equal starts, such as a time in microseconds."""
    pairs = [
        (one["counters"], other["counters"]) for one, other in zip(whole, killed, strict=False)
    ]
    return frozenset(
        name
        for one, other in pairs
        for name in one.keys() & other.keys()
        if one[name] != other[name]
    )


def compare(
    whole: list[Record],
    resumed: list[Record],
    kill: int,
    *,
    passing: frozenset[str] = frozenset(),
    deciding: frozenset[str] = frozenset(),
    unlike: frozenset[str] = frozenset(),
) -> tuple[int, list[Found]]:
    """Return the step from which a resumed run continued, and the state that it had lost, as pairs
    (kind, variable).

    `whole` has the records of the uninterrupted run, `resumed` those of the resumed run, both of
    one rank. A run has one record of the beginning of each step, and one of the run's end.
    `passing`, `deciding` and `unlike` are names from the functions `find_...`. A lost count that
    decides nothing is "unused" if no weight differs.
    """
    if not resumed:
        return 0, [("start", "")]
    same = [
        step for step, one in enumerate(whole[: kill + 1]) if one["params"] == resumed[0]["params"]
    ]
    if not same:
        return 0, [("weights", "")]
    at = same[-1]
    if not at:
        numbers = resumed[0]["counters"].items()
        goes_on = any(
            name in _histories(whole) and name not in unlike and value > whole[0]["counters"][name]
            for name, value in numbers
        )
        return 0, [("weights" if goes_on else "start", "")]
    before = whole[at]
    first = resumed[0]
    lost = [name for name in _lost_counters(whole, at, first) if name not in unlike]
    found = _lost_objects(whole, at, first)
    # A number that repeats another one, such as the steps since the start, needs no saving.
    kept = {tuple(values) for name, values in _histories(whole).items() if name not in lost}
    for name, values in sorted(
        _histories(whole).items(), key=lambda item: _last_name(item[0]) not in deciding
    ):
        counts = name in lost and values == sorted(values) and tuple(values) not in kept
        if counts and _last_name(name) not in passing:
            kept.add(tuple(values))
            found.append(("counter", name))
    if before.get("buffers") != first.get("buffers"):
        found += [("buffers", "")]
    pairs = list(zip(whole[at:], resumed, strict=False))
    if all(one["params"] == other["params"] for one, other in pairs):
        unused = {
            name for kind, name in found if kind == "counter" and _last_name(name) not in deciding
        }
        return at, [("unused", name) if name in unused else (kind, name) for kind, name in found]
    drawn = []
    if before.get("rng") != first.get("rng"):
        used = [
            name
            for name in before["rng"]
            if len({record["rng"].get(name) for record in whole[:-1]}) > 1
        ]
        drawn = [("random", name) for name in used if first["rng"].get(name) != before["rng"][name]]
    found += drawn
    if any(one.get("batch") != other.get("batch") for one, other in pairs[:-1]):
        found.append(("drawn data" if drawn else "data", ""))
    # Such as that of enumerate, for accumulated gradients
    found = found or [("index", name) for name in lost]
    return at, found or [("unknown", "")]


def _histories(whole: list[Record]) -> dict[str, list[int]]:
    """Return the values of each number that the first step knows, by name."""
    return {
        name: [record["counters"][name] for record in whole if name in record["counters"]]
        for name in whole[0]["counters"]
    }


def _lost_counters(whole: list[Record], at: int, first: Record) -> list[str]:
    known = whole[at]["counters"]
    histories = _histories(whole)
    changed = [name for name, values in histories.items() if len(set(values)) > 2 and name in known]
    return [name for name in changed if first["counters"].get(name) != known[name]]


def _lost_objects(whole: list[Record], at: int, first: Record) -> list[Found]:
    """Return the objects whose state differs, each once.

    A copy of the weights counts if it has changed since step 1.

    A script makes other copies too, such as for a save. These are not there at the first step.
    """
    found: dict[Any, Found] = {}
    for name, (kind, state, *identity) in whole[at]["objects"].items():
        if first["objects"].get(name, [])[:2] == [kind, state]:
            continue
        begun = whole[0]["objects"].get(name) or whole[1]["objects"].get(name)
        if kind not in _AVERAGES or (begun is not None and begun[1] != state):
            found.setdefault(identity[0] if identity else name, (kind, name))
    return list(found.values())


def find_passing(sources: Iterable[str]) -> frozenset[str]:
    """Return the names of numbers that begin anew in each epoch: indices of `enumerate`, and sums
    set in a loop.
    """
    names: set[str] = set()
    trees = [ast.parse(source) for source in sources]
    loops = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)
    ]
    within = [node for loop in loops for part in loop.body for node in ast.walk(part)]
    called = {
        ast.unparse(node.func).removeprefix("self.")
        for node in within
        if isinstance(node, ast.Call)
    }
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in called:
                within += [inner for part in node.body for inner in ast.walk(part)]
    for node in within:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names |= {
                _last_name(ast.unparse(one)) for target in node.targets for one in _targets(target)
            }
    for loop in loops:
        if isinstance(loop, ast.For) and "enumerate(" in ast.unparse(loop.iter):
            names |= {_last_name(ast.unparse(one)) for one in _targets(loop.target)[:1]}
    return frozenset(names)


def find_deciding(
    sources: Iterable[str], in_file: set[tuple[str, str]] | None = None
) -> frozenset[str]:
    """Return the names of counts that a resume must restore even if the weights of the first steps
    do not show it.

    These count a loop, are in the condition of a loop or of its end, set a learning rate, or are
    saved.

    Args:
        in_file: variables whose value each saved file has in one place, and this place; None if no
            save was seen. Because small numbers can be equal by chance, the place must have the
            variable's name, or the script must put the variable into a dict, list or tuple, or hand
            it to a function that saves.
    """
    names = set[str]()
    put = set[str]()
    for node in [node for source in sources for node in ast.walk(ast.parse(source))]:
        if isinstance(node, ast.While):
            names |= _read(node.test)
        if isinstance(node, ast.For) and not any(
            isinstance(one, ast.Sub) for one in ast.walk(node.iter)
        ):
            # Unlike the target of `range(total - done)`, which counts the steps of this start.
            if isinstance(node.target, ast.Name | ast.Attribute):
                names |= _read(node.target)
            else:
                names |= set()
        if isinstance(node, ast.For | ast.While):
            within = [
                inner for part in node.body for inner in ast.walk(part) if isinstance(inner, ast.If)
            ]
            names |= {name for one in within if _ends_loop(one) for name in _read(one.test)}
        if isinstance(node, ast.If | ast.IfExp) and _SCHEDULE.search(ast.unparse(node)):
            names |= _read(node.test)
        if isinstance(node, ast.Assign) and any(
            _SCHEDULE.search(ast.unparse(target)) for target in node.targets
        ):
            names |= _read(node.value)
        if isinstance(node, ast.Dict | ast.List | ast.Tuple):
            if isinstance(node, ast.Dict):
                parts = node.values
            else:
                parts = node.elts
            put |= {name for part in parts for name in _read(part)}
        if isinstance(node, ast.Call) and _OTHER_FILES.search(ast.unparse(node.func)):
            names |= {name for part in node.args[:1] for name in _read(part)}
        if isinstance(node, ast.Call) and _SAVES.search(ast.unparse(node.func)):
            put |= {
                name
                for part in [*node.args, *(keyword.value for keyword in node.keywords)]
                for name in _read(part)
            }
    if in_file is None:
        return frozenset(names | put)
    saved = {(_last_name(name), place.rpartition("/")[2]) for name, place in in_file}
    return frozenset(names | {name for name, key in saved if name == key or name in put})


def _ends_loop(node: ast.If) -> bool:
    ends = []
    for part in node.body:
        ends.extend(ast.walk(part))
    calls = {ast.unparse(end.func) for end in ends if isinstance(end, ast.Call)}
    return bool(calls & {"exit", "quit", "sys.exit"}) or any(
        isinstance(end, ast.Break | ast.Return) for end in ends
    )


def _read(node: ast.AST) -> set[str]:
    """Return the last names of the variables and attributes that an expression reads, without those
    of its texts.
    """
    found = [node]
    for one in found:
        if not isinstance(one, ast.JoinedStr):
            found += ast.iter_child_nodes(one)
    attributes = {one.attr for one in found if isinstance(one, ast.Attribute)}
    return attributes | {one.id for one in found if isinstance(one, ast.Name)}


def _targets(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return target.elts
    return [target]


def _last_name(variable: str) -> str:
    """Return the name by which a variable is assigned: that of `a.b` is "b", and that of `a['b']`
    is "a".
    """
    return variable.partition("[")[0].rpartition(".")[2]


_LOST = {
    "start": (
        "nothing is resumed: the second start begins at step 1",
        "load what you save, before the loop",
    ),
    "weights": (
        "weights are not restored: they are those of no saved step",
        "save and load model.state_dict()",
    ),
    "buffers": (
        "buffers of the model, such as BatchNorm's statistics, are lost",
        "save model.state_dict() as a whole",
    ),
    "data": (
        "other samples are read after a resume",
        "skip the batches that were read, with the order of that epoch",
    ),
    "drawn data": (
        "other samples are read after a resume",
        "restore the random state, by which they may be drawn",
    ),
    "random": ("the random state is lost", ""),
    "counter": ("the count starts anew", ""),
    "index": (
        "counts from 0 after a resume",
        "begin at the batch to resume from: enumerate(loader, start)",
    ),
    "unknown": (
        "weights differ, and no state that was seen explains it",
        "compare the first steps after a resume",
    ),
}
_GENERATORS = {
    "torch": ("torch.get_rng_state()", "torch.set_rng_state({})"),
    "random": ("random.getstate()", "random.setstate({})"),
    "numpy": ("np.random.get_state()", "np.random.set_state({})"),
}


def explain(
    script: str,
    sources: dict[str, str],
    kind: str,
    variable: str,
    saves: str,
    loads: str,
    *,
    only: str = "",
) -> list[str]:
    """Return lines of text: the lost state, the line that assigns it, and the smallest patch.

    Args:
        sources: text of each file of the script, by name.
        saves: file and line of the call that saves, such as `train.py:53`; "" if it was not seen.
            `loads` likewise.
        only: ranks that lose the state if rank 0 keeps it, such as " on rank 1".
    """
    saves = saves or _find_call(sources, "save") or f"{script}:?"
    loads = loads or _find_call(sources, "load") or f"{script}:?"
    save, load = (f"line {place.removeprefix(f'{script}:')}" for place in (saves, loads))
    place = (
        _find_assignment(sources, _last_name(variable)) if variable and kind != "random" else ""
    ) or saves
    key = re.sub(r"\W+", "_", variable.rpartition(".")[2]).strip("_") or "state"
    patch = None
    what, fix = _LOST.get(kind, (f"({kind}): its state is not restored", ""))
    if kind == "random":
        get, put = _GENERATORS[variable]
        key = f"{variable}_rng"
        called = put.partition("(")[0]
        patch = (f"{key!r}: {get}", put.format(f"checkpoint[{key!r}]"))
        if only:
            patch = (f"{key!r}: that of each rank", put.format(f"checkpoint[{key!r}][rank]"))
        elif restored := _find_call(
            sources, _last_name(called), of=called.rpartition(".")[0], loaded=True
        ):
            save = f"line {restored.removeprefix(f'{script}:')}"
            patch = None
            fix = (
                "restore it at the loop's first step, because something draws from it before, "
                "such as iter(loader)"
            )
    elif kind in _AVERAGES or kind == "counter":
        if kind != "counter":
            what = f"({kind} of tensors): it is not restored"
        patch = (f"{key!r}: {variable}", f"{variable} = checkpoint[{key!r}]")
    elif kind not in _LOST:  # an object with a state
        patch = (
            f"{key!r}: {variable}.state_dict()",
            f"{variable}.load_state_dict(checkpoint[{key!r}])",
        )
    if patch is None:
        lines = [f"{save}: {fix}"]
    else:
        lines = [f"{save} saves:  {patch[0]}", f"{load} loads:  {patch[1]}"]
    lines.append("or let ebbflow.attach save it (docs/attach.md)")
    if what.startswith("("):
        name = variable
    elif variable:
        name = f"{variable}:"
    else:
        name = ""
    first = f"  {place}: {name} {what}{only}".replace("  ", " ")
    return [
        f"  {first.strip()}",
        f"      fix: {lines[0]}",
        *(f"           {line}" for line in lines[1:]),
    ]


def _find_call(
    sources: dict[str, str], name: str, *, of: str = "torch", loaded: bool = False
) -> str:
    """Return file and line of the first call of a function of a module, else of a method of that
    name; else "".

    Args:
        loaded: only calls whose argument is a part of something, such as `checkpoint["rng"]`.
    """
    found = []
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == name
            ):
                parts = [part for one in node.args for part in ast.walk(one)]
                if not loaded or any(isinstance(part, ast.Subscript) for part in parts):
                    found.append((ast.unparse(node.func.value) != of, f"{file}:{node.lineno}"))
    if found:
        return min(found, key=lambda one: one[0])[1]
    return ""


def _find_assignment(sources: dict[str, str], name: str) -> str:
    """Return file and line of the first assignment to a variable or attribute; "" if there is none."""
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):  # noqa: SIM102
                if name == (node.id if isinstance(node, ast.Name) else node.attr):
                    return f"{file}:{node.lineno}"
    return ""

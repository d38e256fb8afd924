"""`ebbflow doctor SCRIPT.py [-- ARGUMENTS]`: kill a script, let it resume, and name what its resume loses.

The script runs on the CPU in copies of its folder: once uninterrupted, and once for each kill, with a second start that
resumes by the script's own means. A tracer records what each step begins with: batch, random states, weights, buffers,
optimizer, counters and all variables that hold an object with state, such as a scheduler or an iterator. The resumed
run is compared with the uninterrupted one, from the step whose weights it has restored. A difference is harmless if it
changes no weight and is in none of these variables.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ebbflow.infra.process import die_with_parent

_RUN_SECONDS = 180.0
Record = dict[str, Any]


def main(words: list[str]) -> int:
    """Examine a script. Return 0 if the script resumes exactly, 1 if it does not, 2 if it cannot be examined."""
    own, arguments = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(prog="ebbflow doctor", description="Find what a script's resume loses.")
    parser.add_argument("script", type=Path, help="the script; its arguments follow after --")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run (24)")
    parser.add_argument("--kills", type=int, default=2, help="number of kills, each at a random step (2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps to kill at (0)")
    given = parser.parse_args(own)
    if not given.script.is_file():
        print(f"ebbflow: {given.script}: no such script; fix: give the path of a Python file", file=sys.stderr)
        return 2
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # read when torch is loaded, before the forks
    importlib.import_module("torch.optim.optimizer")
    with tempfile.TemporaryDirectory(prefix="ebbflow-doctor-") as folder:
        return _examine(given, arguments, Path(folder))


def _examine(given: argparse.Namespace, arguments: list[str], folder: Path) -> int:
    script, name = given.script.resolve(), given.script.name
    whole = _run(script, arguments, folder / "whole", "whole", given.steps)
    steps = len(whole["records"]) - 1
    if steps < 4:
        print(f"ebbflow: {name}: {max(steps, 0)} steps of a torch optimizer were seen, at least 4 are needed; its end:")
        print(whole["output"])
        return 2
    saves = [step for step in whole["saves"] if step < steps - 1]
    if not saves:
        print(
            f"{name} does not resume: it saved nothing in its first {steps - 1} steps; fix: save more often, or --steps"
        )
        return 1
    choose, found, points = random.Random(given.seed), {}, []
    for number in range(given.kills):
        kill = choose.randrange(saves[0] + 1, steps)
        killed = _run(script, arguments, folder / str(number), "killed", steps, kill=kill)
        if why := _why_not_repeatable(whole["records"], killed["records"]):
            print(f"{name} is not repeatable: two equal starts differ at {why}; fix: seed that generator")
            return 1
        resumed = _run(script, arguments, folder / str(number), "resumed", steps, seed=1)
        at, lost = compare(whole["records"], resumed["records"], kill)
        points.append(f"killed after step {kill}, went on from step {at}")
        found |= dict.fromkeys(lost)
        if not resumed["records"]:
            print(resumed["output"])
    verdict = "does not resume exactly" if found else f"resumes exactly, bit for bit up to step {steps}"
    print(f"{name} {verdict} ({'; '.join(points)})")
    source = script.read_text()
    for kind, variable in found:
        print("\n".join(_explain(name, source, kind, variable)))
    return int(bool(found))


def _run(
    script: Path, arguments: list[str], folder: Path, name: str, steps: int, *, kill: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Run the script in a copy of its folder for `steps` steps. If `kill` is not 0, kill it at that step.

    Return its records, saves and last output.
    """
    if not folder.exists():
        shutil.copytree(script.parent, folder, ignore=shutil.ignore_patterns(".git", "runs"), symlinks=True)
    trace, output = folder.parent / f"{folder.name}-{name}.jsonl", folder.parent / "output"
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        tracer = _Tracer(str(trace), kill or steps, folder)
        _run_traced(tracer, str(folder / script.name), arguments, seed=seed, output=output)
    limit = time.monotonic() + _RUN_SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.02)
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    saves, last = [line["saved"] for line in lines if "saved" in line], output.read_text(errors="replace").splitlines()
    return {"records": [line for line in lines if "params" in line], "saves": saves, "output": "\n".join(last[-5:])}


def _why_not_repeatable(whole: list[Record], killed: list[Record]) -> str:
    for step, (one, other) in enumerate(zip(whole, killed, strict=False), start=1):
        for kind, what in (("batch", "the batch"), ("params", "the weights"), ("rng", "the random states")):
            if kind in other and one.get(kind) != other[kind]:
                return f"{what} of step {step}"
    return ""


def compare(whole: list[Record], resumed: list[Record], kill: int) -> tuple[int, list[tuple[str, str]]]:
    """Return the step from which a resumed run continued, and the state that it had lost, as pairs (kind, variable).

    `whole` has the records of the uninterrupted run, `resumed` those of the resumed run. A run has one record of the
    beginning of each step, and one of the run's end.
    """
    if not resumed:
        return 0, [("start", "")]
    same = [step for step, one in enumerate(whole[: kill + 1]) if one["params"] == resumed[0]["params"]]
    if not same:
        return 0, [("weights", "")]
    if not (at := same[-1]):
        return 0, [("start", "")]
    before, first = whole[at], resumed[0]
    found = [
        (kind, name) for name, (kind, state) in before["objects"].items() if first["objects"].get(name) != [kind, state]
    ]
    seen = {name: [one["counters"][name] for one in whole if name in one["counters"]] for name in before["counters"]}
    lost = [name for name, value in before["counters"].items() if first["counters"].get(name) != value]
    lost = [name for name in lost if len(set(seen[name])) > 2]
    found += [("counter", name) for name in lost if seen[name] == sorted(seen[name])]
    found += [("buffers", "")] if before.get("buffers") != first.get("buffers") else []
    pairs = list(zip(whole[at:], resumed, strict=False))
    if all(one["params"] == other["params"] for one, other in pairs):
        return at, found
    if any(one.get("batch") != other.get("batch") for one, other in pairs[:-1]):
        found.append(("data", ""))
    if before.get("rng") != first.get("rng"):
        used = [name for name in before["rng"] if len({one["rng"].get(name) for one in whole[:-1]}) > 1]
        found += [("random", name) for name in used if first["rng"].get(name) != before["rng"][name]]
    found = found or [("index", name) for name in lost]  # such as that of enumerate, for accumulated gradients
    return at, found or [("unknown", "")]


_LOST = {
    "start": ("nothing is resumed: the second start begins at step 1", "load what you save, before the loop"),
    "weights": ("the weights after a resume are those of no earlier step", "save and load model.state_dict()"),
    "buffers": ("buffers of the model, such as BatchNorm's statistics, are lost", "save model.state_dict() as a whole"),
    "data": ("other samples are read after a resume", "skip the batches that were read, with the order of that epoch"),
    "random": (
        "the random state is lost",
        "save and restore it: torch.get_rng_state, random.getstate, np.random.get_state",
    ),
    "counter": ("the count starts anew", "save the number, and begin with it"),
    "index": ("counts from 0 after a resume", "begin at the batch to resume from: enumerate(loader, start)"),
    "unknown": ("weights differ, and no state that was seen explains it", "compare the first steps after a resume"),
}


def _explain(name: str, source: str, kind: str, variable: str) -> list[str]:
    """Return lines of text: the lost state, the script's line that assigns it, and the smallest patch."""
    nodes = list(ast.walk(ast.parse(source)))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    calls = [(one.attr, one.lineno) for one in called if isinstance(one, ast.Attribute)]
    save, load = (next((line for name, line in calls if name == wanted), "?") for wanted in ("save", "load"))
    stored = (node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store))
    last = variable.rpartition(".")[2]
    line = next((one.lineno for one in stored if last == (one.id if isinstance(one, ast.Name) else one.attr)), save)
    if kind not in _LOST:  # an object with a state
        what = f"{variable} ({kind}): its state is not restored"
        patch = [f"line {save} saves:  {last!r}: {variable}.state_dict()"]
        patch.append(f"line {load} loads:  {variable}.load_state_dict(checkpoint[{last!r}])")
    else:
        text, fix = _LOST[kind]
        what, patch = f"{variable}: {text}" if variable else text, [f"line {save}: {fix}"]
    patch.append("or let ebbflow.attach save it (docs/attach.md)")
    return [f"  {name}:{line}: {what}", f"      fix: {patch[0]}", *(f"           {one}" for one in patch[1:])]


def _run_traced(tracer: _Tracer, script: str, arguments: list[str], *, seed: int, output: Path) -> NoReturn:
    """Run the script in this forked process, which the tracer kills after its last step."""
    import torch

    try:
        die_with_parent()
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(target, stream)
        os.chdir(Path(script).parent)
        os.environ |= {"EBBFLOW__STORE": f"{os.getcwd()}/runs", "EBBFLOW__CHECKPOINT__INTERVAL": "steps"}
        os.environ["EBBFLOW__CHECKPOINT__INTERVAL_STEPS"] = "3"
        torch.manual_seed(seed)
        random.seed(seed)
        if importlib.util.find_spec("numpy"):
            importlib.import_module("numpy").random.seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        tracer.install()
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


class _Tracer:
    """Writer of a record of each step's beginning, in the script's process."""

    def __init__(self, trace: str, steps: int, folder: Path) -> None:
        self._trace, self._last, self._folder = open(trace, "w"), steps, str(folder)  # noqa: SIM115
        self._step, self._record = 0, {}
        self._optimizer: Any = None
        self._model: Any = None
        self._saved = -1

    def install(self) -> None:
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        save = torch.save

        def traced(*arguments: Any, **options: Any) -> Any:
            save(*arguments, **options)
            self._write({"saved": self._step})

        torch.save = traced

    def _write(self, line: Mapping[str, Any]) -> None:
        self._trace.write(json.dumps(line) + "\n")
        self._trace.flush()

    def _forward(self, module: Any, inputs: Any) -> None:
        import torch

        if self._record or not module.training or not torch.is_grad_enabled():
            return
        self._model = self._model or module
        rng = {"torch": _digest(torch.get_rng_state()), "random": _digest(random.getstate())}
        if (numpy := sys.modules.get("numpy")) is not None:
            rng["numpy"] = _digest(numpy.random.get_state())
        self._record = {"batch": _digest(inputs), "rng": rng}
        self._record["buffers"] = _digest(dict(self._model.named_buffers()))

    def _before(self, optimizer: Any, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._write(self._record | self._state())

    def _state(self) -> Record:
        groups = self._optimizer.param_groups
        objects: dict[str, tuple[str, str]] = {}
        counters: dict[str, int] = {}
        seen: set[int] = set()
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._folder):
                for name, value in self._variables(frame):
                    if type(value) is int:
                        counters.setdefault(name, value)
                    elif id(value) not in seen and not isinstance(value, type) and not self._is_trained(value):
                        seen.add(id(value))
                        if (state := _state_of(value)) is not None:
                            objects.setdefault(name, (type(value).__name__, _digest(state)))
            frame = frame.f_back
        return {"params": _digest([group["params"] for group in groups]), "objects": objects, "counters": counters}

    def _variables(self, frame: FrameType) -> Iterator[tuple[str, Any]]:
        """Yield the variables of a frame, and the attributes of those that are objects of the script's own classes."""
        for name, value in list(frame.f_locals.items()):
            yield name, value
            path = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
            if path.startswith(self._folder) and not hasattr(value, "state_dict"):
                yield from ((f"{name}.{one}", inner) for one, inner in list(getattr(value, "__dict__", {}).items()))

    def _is_trained(self, value: Any) -> bool:
        """Return whether a value is a module that the optimizer trains, or a module without parameters."""
        if not isinstance(value, sys.modules["torch"].nn.Module):
            return False
        trained = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        own = [id(one) for one in value.parameters()]
        return not own or any(one in trained for one in own)

    def _after(self, optimizer: Any, *_: Any) -> None:
        if optimizer is not self._optimizer:
            return
        self._step, self._record = self._step + 1, {}
        job = getattr(sys.modules.get("ebbflow.training.attached_job"), "current", None)
        if job is not None and job._saved_step != self._saved:
            self._saved = job._saved_step
            self._write({"saved": self._step})
        if self._step >= self._last:
            self._write({"params": _digest([group["params"] for group in optimizer.param_groups]), "counters": {}})
            os.kill(os.getpid(), signal.SIGKILL)


def _state_of(value: Any) -> Any:
    """Return the state of an object that a resume must restore, or None if it has none."""
    if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
        try:
            return value.state_dict()
        except Exception:  # such as that of a loader that has not been iterated
            return None
    if callable(getattr(value, "set_epoch", None)):
        return getattr(value, "epoch", 0), getattr(value, "seed", 0)
    if type(value).__name__ != "Generator":
        return None
    return value.get_state() if hasattr(value, "get_state") else value.bit_generator.state


def _digest(value: Any) -> str:
    found = hashlib.sha1(usedforsecurity=False)
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()[:16]


def _parts(value: Any) -> Iterator[bytes]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):  # in any order: a restored optimizer may have another
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield b"["
        for item in value:
            yield from _parts(item)
    elif isinstance(value, str | int | float | bytes | None):
        yield repr(value).encode()
    elif hasattr(value, "tobytes"):
        yield value.tobytes()

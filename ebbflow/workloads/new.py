"""`ebbflow new NAME --like KIND`: write a new workload in one file, with test and configuration."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from pathlib import Path

_TEMPLATES = Path(__file__).with_name("templates")
_KINDS = {
    "text": "training: {batch_size: 16, max_steps: 200, learning_rate: 3e-3}\n",
    "image": "training: {batch_size: 32, max_steps: 100, learning_rate: 3e-3}\n",
    "points": "training: {batch_size: 32, max_steps: 200, learning_rate: 3e-3}\n",
    "rl": """\
workload_options:
  # path: prompts.jsonl           # {"prompt": …, "answer": …}; default: additions of two-digit numbers
  prompt_max_len: 6
  generate_max_len: 4
  reward: NAME:reward
model: {hidden_size: 32, num_layers: 2, num_heads: 2, sequence_length: 10}
training: {batch_size: 8, max_steps: 100, learning_rate: 3e-3}
""",
}
_CONFIG = """\
# {title}: PYTHONPATH=$PWD ebbflow run --config {name}.yaml
store: runs
workload: {name}:{title}
{settings}cluster: {{nodes: 1, plan_for: kubernetes}}
"""
_TEST = '''\
"""The rules of a workload: losses are sums, samples are functions of their index, the model is on the meta device."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from ebbflow.core.config.load import load_config
from ebbflow.core.store import Store
from ebbflow.training.gang import Gang
from ebbflow.training.weights.load import initialise, materialise
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import make_workload, prepare_data, workload_context
from ebbflow.tryout.trial import try_workload

HERE = Path(__file__).resolve().parent


@pytest.fixture
def context(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    config = load_config(HERE / "{name}.yaml", [f"store={{tmp_path}}"], project_root=HERE).config
    found = workload_context(config, Gang(), store=Store.open(config.store))
    return dataclasses.replace(found, prepared=prepare_data(config, found))


def test_it_passes_the_examination(context):
    """As `ebbflow examine`: meta device, units, equal samples twice, sums, gradients and an evaluation."""
    assert not try_workload(context.config, context).notes


def test_samples_are_functions_of_their_index(context):
    """The losses of two halves of a step add up to the loss of the whole step, as on two ranks."""
    workload = make_workload(context.config, context)
    model, blank = workload.model(), workload.model()
    materialise(model, "cpu")
    initialise(model, blank, seed=1)
    model.eval()
    count = context.config.training.batch_size
    with torch.no_grad():
        whole, *halves = (
            workload.loss(model, workload.next_batch(model, cursor))
            for cursor in (Cursor(0, count), Cursor(0, count // 2), Cursor(count // 2, count - count // 2))
        )
    assert sum(half.weight for half in halves) == whole.weight
    assert float(sum(half.sum for half in halves)) == pytest.approx(float(whole.sum), rel=1e-4, abs=1e-4)
'''


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ebbflow new",
        description="Write a workload of one file, with its test and its configuration.",
    )
    parser.add_argument("name", help="name of the Python module, such as my_model")
    parser.add_argument(
        "--like", choices=_KINDS, default="text", help="what it is like (default: text)"
    )
    parser.add_argument("--folder", default=".", help="where to write it (default: here)")
    given = parser.parse_args(arguments[1:])
    name = given.name
    folder = Path(given.folder)
    if not name.isidentifier() or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        print(
            f"ebbflow new: {name!r} cannot be a module's name; fix: letters, digits and _",
            file=sys.stderr,
        )
        return 2
    title = "".join(part.capitalize() for part in name.split("_"))
    template = (_TEMPLATES / f"{given.like}.py").read_text(encoding="utf-8")
    code = template.replace("class Example", f"class {title}")
    settings = _KINDS[given.like].replace("NAME", name)
    files = {
        f"{name}.py": code,
        f"test_{name}.py": _TEST.format(name=name),
        f"{name}.yaml": _CONFIG.format(name=name, title=title, settings=settings),
    }
    if taken := [file for file in files if (folder / file).exists()]:
        print(
            f"ebbflow new: {folder / taken[0]} exists; fix: another name, or --folder",
            file=sys.stderr,
        )
        return 2
    if (
        not title.isidentifier()
        or re.search(rf"\b{title}\b", template)
        or importlib.util.find_spec(name) is not None
    ):
        if title.isidentifier():
            why = f"the class {title!r} is in the template"
        else:
            why = f"{title!r} is no class"
        if importlib.util.find_spec(name) is not None:
            why = "a module of that name is installed"
        print(
            f"ebbflow new: {name!r} cannot be used: {why}; fix: another name, such as "
            f"my_{given.like}",
            file=sys.stderr,
        )
        return 2
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(content, encoding="utf-8")
    except OSError as error:
        print(f"ebbflow new: {error.filename}: {error.strerror}; fix: --folder", file=sys.stderr)
        return 2
    print(f"wrote {', '.join(str(folder / file) for file in files)}")
    print(f"try it:    python -m pytest {folder / f'test_{name}.py'}")
    print(
        f"train it:  PYTHONPATH={folder.resolve()} ebbflow run --config {folder / f'{name}.yaml'}"
    )
    return 0

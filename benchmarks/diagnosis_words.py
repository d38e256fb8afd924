"""`python -m benchmarks.diagnosis_words SOURCES …`: fit the words by which `ebbflow diagnose`
guesses families.

SOURCES is a YAML file: family → folders or files of source code whose error messages belong to it.
The messages of `raise`, `assert` and error logs in Python are read, and those of NCCL's, C++'s and
Go's error calls. The model is a logistic regression with an L1 penalty; its weights are rounded to
halves. A tenth of the messages is left out and measured, and used for the final fit.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ebbflow.diagnose.vocabulary import MARGIN, is_severe, split_terms

_CALL = re.compile(
    r"(?:WARN|NCCL_OFI_WARN|TORCH_CHECK\w*|C10_THROW_ERROR|Errorf?|Errorw|Fatalf?|errors\.New|Criticalf?|error!|bail!|"
    r'fatal|error)\s*\([^"\n;]{0,80}?"((?:[^"\\]|\\.){18,})"'
)
_PLACE = re.compile(r"%[-0-9.]*l*[a-zA-Z]|\{[^}]*\}")
_MOST_OF_ONE = 900  # messages of one folder
_EXCERPT_WEIGHT = 5.0
_PENALTY = 2.5e-5
_STEPS = 150
_RATE = 0.1

Document = tuple[str, set[str], float]  # family, terms, weight


def read_messages(path: Path) -> Iterator[str]:
    """Yield the error messages in one source file; values that are put into them are left out."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".py":
        yield from (_PLACE.sub("", match[1]) for match in _CALL.finditer(text))
        return
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            message = _text(node.exc.args[0])
        elif isinstance(node, ast.Assert) and node.msg is not None:
            name = "AssertionError"
            message = _text(node.msg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            name = "ERROR"
            if node.func.attr in ("error", "critical"):
                message = _text(node.args[0])
            else:
                message = ""
        else:
            continue
        if len(message) > 15:
            yield f"{name}: {' '.join(message.split())}"


def _text(node: ast.expr) -> str:
    """Return the fixed text of an expression."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return node.value
        return ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _PLACE.sub("", _text(node.left)) + (
            _text(node.right) if isinstance(node.op, ast.Add) else ""
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _PLACE.sub("", _text(node.func.value))
    return ""


def read_sources(sources: dict[str, list[str]], root: Path) -> list[Document]:
    documents: list[Document] = []
    for family, places in sources.items():
        for place in (root / place for place in places):
            if place.is_file():
                files = [place]
            else:
                files = sorted(place.rglob("*.*"))
            wanted = [
                file
                for file in files
                if "test" not in file.name
                and file.suffix in {".py", ".cc", ".c", ".cpp", ".h", ".go", ".rs"}
            ]
            found = sorted({message for file in wanted for message in read_messages(file)})
            random.Random(2).shuffle(found)
            documents += [(family, split_terms(message), 1.0) for message in found[:_MOST_OF_ONE]]
    return documents


def read_excerpts(entries: Sequence[dict[str, Any]]) -> list[Document]:
    """Return the severe lines of labelled excerpts; those of sound ones get the family "none"."""
    documents: list[Document] = []
    for entry in entries:
        if entry["family"] in (None, "sound"):
            family = "none"
        else:
            family = entry["family"]
        if lines := [line for line in dict.fromkeys(entry["text"].splitlines()) if is_severe(line)][
            :16
        ]:
            documents.append((family, set().union(*map(split_terms, lines)), _EXCERPT_WEIGHT))
            documents.append((family, split_terms(lines[-1]), _EXCERPT_WEIGHT))
    return documents


def fit(documents: Sequence[Document]) -> dict[str, dict[str, float]]:
    """Return the weight of each term for each family that is not 0; the term "*" is the family's
    constant.
    """
    seen = Counter(term for _, terms, _ in documents for term in terms)
    terms = sorted(term for term, count in seen.items() if count >= (3 if "-" in term else 2))
    number = {term: at for at, term in enumerate(terms)}
    families = sorted({family for family, _, _ in documents})
    total: Counter[str] = Counter()
    for family, _, weight in documents:
        total[family] += weight  # type: ignore[assignment]
    pairs = [
        (row, number[term])
        for row, (_, own, _) in enumerate(documents)
        for term in own
        if term in number
    ]
    at = torch.tensor(pairs).T
    matrix = torch.sparse_coo_tensor(
        at, torch.ones(len(pairs)), (len(documents), len(terms))
    ).coalesce()
    turned = matrix.t().coalesce()
    labels = torch.tensor([families.index(family) for family, _, _ in documents])
    shares = torch.tensor(
        [weight * (1500 / max(total[family], 150)) ** 0.5 for family, _, weight in documents]
    )
    shares /= shares.sum()
    weights = torch.zeros(len(terms), len(families))
    constants = torch.zeros(len(families))
    mean = torch.zeros_like(weights)
    square = torch.zeros_like(weights)
    for step in range(1, _STEPS + 1):  # Adam with a proximal step for the penalty
        error = (torch.sparse.mm(matrix, weights) + constants).softmax(1)
        error[torch.arange(len(labels)), labels] -= 1
        error *= shares[:, None]
        slope = torch.sparse.mm(turned, error)
        pull = error.sum(0)
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope * slope
        scale = (square / (1 - 0.99**step)).sqrt() + 1e-7
        weights = weights - _RATE * mean / (1 - 0.9**step) / scale
        weights = weights.sign() * (weights.abs() - _RATE * _PENALTY / scale).clamp(min=0)
        constants = constants - 0.3 * _RATE * pull / (pull.abs().max() + 1e-3)
    rounded = (weights * 2).round() / 2
    return {
        family: {"*": round(float(constants[column]), 1)}
        | {
            terms[row]: float(rounded[row, column])
            for row in torch.nonzero(rounded[:, column]).flatten().tolist()
        }
        for column, family in enumerate(families)
    }


def measure(
    table: dict[str, dict[str, float]], documents: Sequence[Document]
) -> tuple[float, float, float]:
    """Return the share of documents named with the required lead, the share of these that is right,
    and that of all.
    """
    named = right = right_of_all = 0
    for family, terms, _ in documents:
        scores = sorted(
            (sum(own.get(term, 0.0) for term in {"*", *terms}), name) for name, own in table.items()
        )
        (second, _), (first, best) = scores[-2:]
        named = named + (first - second >= MARGIN)
        right_of_all = right_of_all + (best == family)
        right += best == family and first - second >= MARGIN
    return named / len(documents), right / max(named, 1), right_of_all / len(documents)


def render(table: dict[str, dict[str, float]]) -> str:
    lines = ["# family, weight, terms: made from messages of public sources; see vocabulary.py"]
    for family, own in sorted(table.items()):
        for value in sorted(set(own.values())):
            head = line = f"{family} {value:g}"
            for term in sorted(term for term, weight in own.items() if weight == value):
                if len(line) + len(term) >= 118:
                    lines.append(line)
                    line = head
                line += f" {term}"
            lines.append(line)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnosis_words", description=__doc__
    )
    parser.add_argument("sources", type=Path, help="YAML: family → folders or files")
    parser.add_argument("excerpts", nargs="*", type=Path, help="files of labelled excerpts")
    parser.add_argument(
        "--root", type=Path, default=Path(), help="the folder that the sources are relative to"
    )
    parser.add_argument("--write", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    messages = read_sources(
        yaml.safe_load(options.sources.read_text(encoding="utf-8")), options.root
    )
    excerpts = read_excerpts(
        [entry for path in options.excerpts for entry in yaml.safe_load(path.read_text())]
    )
    random.Random(0).shuffle(messages)
    left_out = messages[: len(messages) // 10]
    kept = messages[len(messages) // 10 :]
    named, right, right_of_all = measure(fit([*kept, *excerpts]), left_out)
    print(
        f"{len(messages)} messages; of a tenth that was left out, {named:.1%} are named, "
        f"{right:.1%} of them rightly; without the required lead, {right_of_all:.1%} are right"
    )
    if options.write:
        options.write.write_text(render(fit([*messages, *excerpts])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

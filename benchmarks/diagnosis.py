"""`ebbflow bench diagnose [FILE …]`: how well `ebbflow diagnose` names the family of labelled
public excerpts.

Precision, recall and F1 count the root finding of each failing excerpt. An excerpt without a root
finding is an abstention: it lowers recall, not precision. Sound excerpts count false alarms.

With `--exact`, the exact symptoms of excerpts are judged that a second reader has labelled, and how
often a root of each class of evidence is right. With `--texts FOLDER`, the exact symptoms of labelled threads are judged. Their texts are not kept
with the labels: FOLDER has one file NAME.log per thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ebbflow.core.program import PROJECT_ROOT
from ebbflow.diagnose.judging import diagnose_files, evidence_class
from ebbflow.diagnose.rules import VALUES, load_rules

_COLLECTED = PROJECT_ROOT / "tests/support/diagnosis"
_THREADS = PROJECT_ROOT / "tests/support/threads.yaml"
_READING = PROJECT_ROOT / "tests/support/second_reading.yaml"


@dataclass(frozen=True)
class Thread:
    """The label of a public thread, and the hash of the excerpt that was labelled."""

    name: str
    url: str
    family: str
    symptom: str | None  # None: a sound log
    sha256: str
    also: tuple[str, ...] = ()  # other symptoms that a careful reader may name
    second: str | None = None  # label of a second reading, if it differs
    known: bool = False  # whether the thread is in an earlier set
    late: bool = False  # labelled after the rules were changed, before they were tried on it

    def accepts(self, symptom: str | None) -> bool:
        """Return whether a symptom is the label or one of its alternatives."""
        return symptom == self.symptom or symptom in self.also


@dataclass(frozen=True)
class Excerpt:
    """An excerpt of a public thread that two readers have labelled."""

    text: str
    first_family: (
        str | None
    )  # the first reader's label; None: nothing has failed, or it is too thin
    symptom: str | None  # the second reader's label
    also: tuple[str, ...]
    is_even: bool  # half of the set, by its hash, to which the class "vague" was fitted

    def accepts(self, symptom: str | None) -> bool:
        """Return whether a symptom is the label or one of its alternatives."""
        return symptom == self.symptom or symptom in self.also


@dataclass(frozen=True)
class JudgedExcerpt:
    """An excerpt, the symptom of its root, and the class of the root's evidence."""

    excerpt: Excerpt
    root: str | None = None
    evidence: str | None = None


@dataclass(frozen=True)
class Score:
    """Counts of the roots named for a set of threads."""

    failing: int
    named: int
    strict: int  # roots with exactly the label
    lenient: int  # roots with the label or an alternative
    family: int  # roots of the label's family
    sound: int
    false_alarms: int

    def f1(self, right: int) -> float:
        """Return the F1 of the roots of failing threads, `right` of which are right."""
        return 2 * right / (self.failing + self.named) if self.failing else 0.0

    def render(self) -> str:
        return (
            f"{self.failing} failing threads, {self.named} named: F1 of the symptom "
            f"{self.f1(self.strict):.3f} strict, {self.f1(self.lenient):.3f} lenient; of the family "
            f"{self.f1(self.family):.3f}; {self.false_alarms} false alarms on {self.sound} sound logs"
        )


def evaluate(corpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Diagnose each excerpt (`text`, `family`) and compare the root's family with the label.

    Labels: the name of a family, None (too thin to name a cause) or "sound".
    """
    confusion: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        for excerpt in corpus:
            log.write_text(excerpt["text"], encoding="utf-8")
            root = "none"
            for finding in diagnose_files([log]).findings:
                if finding.role == "root":
                    root = finding.rule.family
                    break
            confusion[str(excerpt["family"] or "none"), root] += 1
    families = sorted({label for label, _ in confusion} - {"none", "sound"})
    rows = {}
    for family in families:
        right = confusion[family, family]
        labelled = sum(count for (label, _), count in confusion.items() if label == family)
        named = sum(
            count
            for (label, root), count in confusion.items()
            if root == family and label != "sound"
        )
        precision = right / named if named else 0.0
        recall = right / labelled
        f1 = 2 * right / (named + labelled)
        rows[family] = {"items": labelled, "precision": precision, "recall": recall, "f1": f1}
    failing = [excerpt for excerpt in corpus if excerpt["family"] not in (None, "sound")]
    right = sum(confusion[family, family] for family in families)
    named = sum(
        count for (label, root), count in confusion.items() if label in families and root != "none"
    )
    sound = sum(count for (label, _), count in confusion.items() if label == "sound")
    return {
        "items": len(failing),
        "families": rows,
        "macro_f1": sum(row["f1"] for row in rows.values()) / len(rows),
        "micro_precision": right / named if named else 0.0,
        "micro_recall": right / len(failing),
        "abstained": 1 - named / len(failing),
        "sound": sound,
        "false_alarms": sound - confusion["sound", "none"],
        "confusion": {
            f"{label} -> {root}": count for (label, root), count in sorted(confusion.items())
        },
    }


def load_threads(path: Path = _THREADS) -> list[Thread]:
    """Load the labels of the threads."""
    threads = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        threads.append(Thread(**{**entry, "also": tuple(entry.get("also", ()))}))
    return threads


def load_excerpts() -> list[Excerpt]:
    """Load the excerpts of the second reading, with their texts."""
    collected: dict[str, dict[str, Any]] = {}
    for path in sorted(_COLLECTED.glob("collected*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            collected[hashlib.sha256(entry["text"].encode()).hexdigest()[:16]] = entry
    excerpts = []
    for label in yaml.safe_load(_READING.read_text(encoding="utf-8")):
        entry = collected[label["sha256"]]
        family = entry["family"]
        if family == "sound":
            family = None
        is_even = int(label["sha256"], 16) % 2 == 0
        also = tuple(label.get("also", ()))
        excerpts.append(Excerpt(entry["text"], family, label["symptom"], also, is_even))
    return excerpts


def judge_excerpts(excerpts: Sequence[Excerpt]) -> list[JudgedExcerpt]:
    """Diagnose each excerpt."""
    judged = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        for excerpt in excerpts:
            log.write_text(excerpt.text, encoding="utf-8")
            answer = JudgedExcerpt(excerpt)
            for finding in diagnose_files([log]).findings:
                if finding.role == "root":
                    answer = JudgedExcerpt(excerpt, finding.rule.id, evidence_class(finding))
            judged.append(answer)
    return judged


def count_accepted(judged: Sequence[JudgedExcerpt]) -> dict[str, list[bool]]:
    """Return, by class of evidence, whether each root is one that the second reader accepts. Of the
    class "vague", only the half counts to which its probability was not fitted.
    """
    classes: dict[str, list[bool]] = {}
    for answer in judged:
        is_fitted = answer.evidence == "vague" and answer.excerpt.is_even
        if answer.evidence is not None and not is_fitted:
            accepted = answer.excerpt.accepts(answer.root)
            classes.setdefault(answer.evidence, []).append(accepted)
    return classes


def score_threads(threads: Sequence[Thread], roots: Sequence[str | None]) -> Score:
    """Compare the named roots with the labels."""
    pairs = list(zip(threads, roots, strict=True))
    named = [(thread, root) for thread, root in pairs if thread.symptom and root]
    return Score(
        failing=sum(thread.symptom is not None for thread in threads),
        named=len(named),
        strict=sum(root == thread.symptom for thread, root in named),
        lenient=sum(thread.accepts(root) for thread, root in named),
        family=sum(_family_of(root) == thread.family for thread, root in named),
        sound=sum(thread.symptom is None for thread in threads),
        false_alarms=sum(thread.symptom is None and root is not None for thread, root in pairs),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ebbflow bench diagnose", description=__doc__)
    collected = sorted(_COLLECTED.glob("collected*.yaml"))
    parser.add_argument("corpus", nargs="*", type=Path, default=collected, help="files of excerpts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--texts", metavar="FOLDER", type=Path, help="judge threads with their texts"
    )
    parser.add_argument("--exact", action="store_true", help="judge exact symptoms of excerpts")
    options = parser.parse_args(arguments)
    if options.texts is not None:
        return _judge_threads(options.texts)
    if options.exact:
        return _judge_exact()
    excerpts: list[dict[str, Any]] = []
    for path in options.corpus:
        excerpts += yaml.safe_load(path.read_text(encoding="utf-8"))
    result = evaluate(excerpts)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{'family':<16}{'items':>6}{'precision':>11}{'recall':>8}{'F1':>7}")
    for family, row in result["families"].items():
        shares = f"{row['precision']:>11.2f}{row['recall']:>8.2f}{row['f1']:>7.2f}"
        print(f"{family:<16}{row['items']:>6}{shares}")
    print(
        f"\n{result['items']} failing excerpts: F1 {result['macro_f1']:.3f} (mean over "
        f"families), precision {result['micro_precision']:.3f}, recall "
        f"{result['micro_recall']:.3f}, abstained {result['abstained']:.1%}; "
        f"{result['false_alarms']} false alarms on {result['sound']} sound ones"
    )
    print(
        "confusions: "
        + ", ".join(
            f"{pair} {count}" for pair, count in result["confusion"].items() if _wrong(pair)
        )
    )
    return 0


def _judge_exact() -> int:
    """Print how far both readers agree, the F1 of the exact symptoms, and the calibration."""
    judged = judge_excerpts(load_excerpts())
    threads = []
    agreed = 0
    for answer in judged:
        excerpt = answer.excerpt
        family = _family_of(excerpt.symptom)
        agreed += family == excerpt.first_family
        threads.append(Thread("", "", family or "", excerpt.symptom, "", excerpt.also))
        if not excerpt.accepts(answer.root):
            print(f"{excerpt.symptom} -> {answer.root}: {excerpt.text[-90:]!r}")
    print(f"both readers name the same family of {agreed} in {len(judged)}")
    print(score_threads(threads, [answer.root for answer in judged]).render())
    for kind, right in sorted(count_accepted(judged).items()):
        stated = VALUES["calibration"][kind]
        print(f"{kind}: stated {stated:.2f}, accepted {sum(right)} of {len(right)}")
    return 0


def _judge_threads(folder: Path) -> int:
    """Print the F1 of the threads, and each thread whose root differs from its label."""
    threads = load_threads()
    roots: list[str | None] = []
    outcomes: dict[tuple[bool, str], list[bool]] = {}  # by whether it is late, and class
    for thread in threads:
        path = folder / f"{thread.name}.log"
        if not path.is_file():
            print(f"{path}: no such file; {thread.url} has the text", file=sys.stderr)
            return 2
        if hashlib.sha256(path.read_bytes()).hexdigest() != thread.sha256:
            print(f"{path}: another text than the labelled one", file=sys.stderr)
            return 2
        findings = diagnose_files([path]).findings
        named = [finding for finding in findings if finding.role == "root"]
        roots.append(named[0].rule.id if named else None)
        if named:
            key = (thread.late, evidence_class(named[0]))
            outcomes.setdefault(key, []).append(roots[-1] == thread.symptom)
        if roots[-1] != thread.symptom:
            also = f" (or {', '.join(thread.also)})" if thread.also else ""
            sure = f" {named[0].probability:.2f}" if named else ""
            print(f"{thread.name}: {thread.symptom}{also} -> {roots[-1]}{sure}")
    print(f"all: {score_threads(threads, roots).render()}")
    judged = list(zip(threads, roots, strict=True))
    parts = {
        "labelled before the rules were changed": [pair for pair in judged if not pair[0].late],
        "of these, in no earlier set": [
            pair for pair in judged if not pair[0].late and not pair[0].known
        ],
        "labelled late": [pair for pair in judged if pair[0].late],
        "of these, in no earlier set ": [
            pair for pair in judged if pair[0].late and not pair[0].known
        ],
    }
    for name, pairs in parts.items():
        score = score_threads([thread for thread, _ in pairs], [root for _, root in pairs])
        print(f"{name.strip()}: {score.render()}")
    for (late, kind), right in sorted(outcomes.items()):
        # A prior of 6 threads of which 3.6 are right, because new logs are harder than old ones
        fitted = (sum(right) + 3.6) / (len(right) + 6)
        when = "late (not used to fit)" if late else f"early, fitted {fitted:.2f}"
        stated = VALUES["calibration"][kind]
        print(f"{kind}, {when}: stated {stated:.2f}, right {sum(right)} of {len(right)}")
    return 0


def _family_of(symptom: str | None) -> str | None:
    rule = load_rules().find(symptom or "")
    return rule.family if rule else None


def _wrong(pair: str) -> bool:
    label, found = pair.split(" -> ")
    return label != found and (label, found) != ("sound", "none")

"""`ebbflow bench diagnose [FILE …]`: how well `ebbflow diagnose` names the family of labelled
public excerpts.

Precision, recall and F1 count the root finding of each failing excerpt. An excerpt without a root
finding is an abstention: it lowers recall, not precision. Sound excerpts count false alarms.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ebbflow.core.program import PROJECT_ROOT
from ebbflow.diagnose.judging import Diagnosis, diagnose_files, judge
from ebbflow.diagnose.matching import Seen, load_matcher
from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.series import Series

_COLLECTED = PROJECT_ROOT / "tests/support/diagnosis"


def diagnose_lines(lines: Iterable[LogText]) -> Diagnosis:
    """Diagnose the lines of an excerpt."""
    seen: dict[str, Seen] = {}
    series = Series()
    load_matcher().collect(series.watch(lines), seen)
    return judge(seen, series, [])


def evaluate(corpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Diagnose each excerpt (`text`, `family`) and compare the root's family with the label.

    Labels: the name of a family, None (too thin to name a cause) or "sound".
    """
    confusion: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for item in corpus:
            log = Path(folder, "log.txt")
            log.write_text(item["text"], encoding="utf-8")
            findings = diagnose_files([log]).findings
            root = next((each.rule.family for each in findings if each.role == "root"), None)
            confusion[str(item["family"] or "none"), root or "none"] += 1
    families = sorted({label for label, _ in confusion} - {"none", "sound"})
    rows = {}
    for family in families:
        right = confusion[family, family]
        labelled = sum(count for (label, _), count in confusion.items() if label == family)
        named = sum(
            count
            for (label, found), count in confusion.items()
            if found == family and label != "sound"
        )
        if named:
            precision = right / named
        else:
            precision = 0.0
        recall = right / labelled
        if right:
            f1 = 2 * precision * recall / (precision + recall)
        else:
            f1 = 0.0
        rows[family] = {"items": labelled, "precision": precision, "recall": recall, "f1": f1}
    failing = [item for item in corpus if item["family"] not in (None, "sound")]
    right = sum(confusion[family, family] for family in families)
    named = sum(
        count
        for (label, found), count in confusion.items()
        if label in families and found != "none"
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
            f"{label} -> {found}": count for (label, found), count in sorted(confusion.items())
        },
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ebbflow bench diagnose", description=__doc__)
    default = sorted(_COLLECTED.glob("collected*.yaml"))
    parser.add_argument(
        "corpus",
        nargs="*",
        type=Path,
        default=default,
        help="files of excerpts (the collected ones)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    result = evaluate(
        [
            item
            for path in options.corpus
            for item in yaml.safe_load(path.read_text(encoding="utf-8"))
        ]
    )
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"{'family':<16}{'items':>6}{'precision':>11}{'recall':>8}{'F1':>7}")
    for family, row in result["families"].items():
        print(
            f"{family:<16}{row['items']:>6}{row['precision']:>11.2f}{row['recall']:>8.2f}{row['f1']:>7.2f}"
        )
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


def _wrong(pair: str) -> bool:
    label, found = pair.split(" -> ")
    return label != found and (label, found) != ("sound", "none")

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
from pathlib import Path
from typing import Any

import yaml

from ebbflow.core.program import PROJECT_ROOT
from ebbflow.diagnose.judging import diagnose_files

_COLLECTED = PROJECT_ROOT / "tests/support/diagnosis"


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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="ebbflow bench diagnose", description=__doc__)
    collected = sorted(_COLLECTED.glob("collected*.yaml"))
    parser.add_argument("corpus", nargs="*", type=Path, default=collected, help="files of excerpts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
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


def _wrong(pair: str) -> bool:
    label, found = pair.split(" -> ")
    return label != found and (label, found) != ("sound", "none")

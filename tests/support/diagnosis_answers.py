"""Answers of the diagnosis to the kept excerpts, as JSON: `python -m tests.support.diagnosis_answers`.

With `> tests/golden/diagnosis.json`, they become the golden answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from ebbflow.diagnose.reading import LogText, rank_of, time_of
from tests.support.diagnosing import diagnose_lines

_FOLDER = Path(__file__).parent / "diagnosis"
_FILES = ("composed.yaml", "development/first.yaml", "development/second.yaml")


def find_answers() -> list[str]:
    """Return the findings of each excerpt: symptom, role and confidence."""
    answers = []
    for name in _FILES:
        excerpts = yaml.safe_load((_FOLDER / name).read_text(encoding="utf-8"))
        for number, excerpt in enumerate(excerpts):
            lines = [
                LogText("log", at, line, rank_of(line), time_of(line))
                for at, line in enumerate(excerpt["text"].splitlines(), 1)
                if line
            ]
            findings = [
                f"{finding.rule.id} {finding.role} {finding.confidence:.3f}"
                for finding in diagnose_lines(lines).findings
            ]
            answers.append(f"{name} {number}: {', '.join(findings)}")
    return answers


if __name__ == "__main__":
    print(json.dumps(find_answers(), indent=0))

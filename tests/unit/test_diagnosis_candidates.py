"""Candidates of a diagnosis: calibrated probabilities, and the tests that tell them apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.diagnosis import count_accepted, judge_excerpts, load_excerpts
from ebbflow.diagnose.judging import Diagnosis, diagnose_files, evidence_class
from ebbflow.diagnose.rules import VALUES, load_rules
from ebbflow.infra.__main__ import main

KILLED = "failed (exitcode: -9) local_rank: 3 (pid: 904) of binary: /usr/bin/python3"
FULL = "OSError: [Errno 28] No space left on device: '/scratch/a.pt'"
VAGUE = "RuntimeError: the run failed for a reason that has no name"


def diagnose(folder: Path, text: str) -> Diagnosis:
    (folder / "log").write_text(text)
    return diagnose_files([folder / "log"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (FULL, "clear"),
        (KILLED, "contested"),
        (f"{FULL}\nModuleNotFoundError: No module named 'a'", "contested"),
        (VAGUE, "vague"),
    ],
)
def test_the_probability_of_a_root_depends_on_its_evidence(
    text: str, kind: str, tmp_path: Path
) -> None:
    diagnosis = diagnose(tmp_path, text)
    root = diagnosis.findings[0]
    assert evidence_class(root) == kind
    assert root.probability == VALUES["calibration"][kind]
    assert diagnosis.to_json()["findings"][0]["confidence"] == root.probability


def test_three_candidates_at_most_share_the_probability_and_have_a_test(tmp_path: Path) -> None:
    for text in (FULL, KILLED, VAGUE, f"{FULL}\nModuleNotFoundError: No module named 'a'"):
        first, *others = diagnose(tmp_path, text).candidates
        assert first.separate == "" and len(others) <= 2
        assert sum(each.probability for each in (first, *others)) <= 1
        for candidate in others:
            assert candidate.separate and candidate.probability < first.probability
        assert len({candidate.rule.id for candidate in (first, *others)}) == 1 + len(others)


def test_a_kill_without_a_message_could_be_the_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(KILLED)
    assert main(["diagnose", str(tmp_path / "log")]) == 0
    shown = capsys.readouterr().out
    assert "it could also be" in shown and "[C11, " in shown and "dmesg -T | grep -i oom" in shown
    assert main(["diagnose", "--json", str(tmp_path / "log")]) == 0
    first, second, _ = json.loads(capsys.readouterr().out)["candidates"]
    assert (first["symptom"], second["symptom"]) == ("B10", "C11")


def test_a_cause_that_the_log_shows_too_comes_before_one_that_it_does_not(tmp_path: Path) -> None:
    diagnosis = diagnose(tmp_path, f"{FULL}\n\nModuleNotFoundError: No module named 'a'\n")
    assert diagnosis.candidates[1].rule.id == "A01"
    assert diagnosis.candidates[1].separate.endswith("log:3")


def test_a_log_without_a_root_has_no_candidates(tmp_path: Path) -> None:
    assert diagnose(tmp_path, "step 1 loss 2.3\n").candidates == ()


def test_what_a_rule_is_confused_with_exists() -> None:
    ids = {rule.id for rule in load_rules().rules}
    for rule in load_rules().rules:
        assert rule.confused.keys() <= ids - {rule.id}, rule.id
        assert all(rule.confused.values()), rule.id


def test_better_evidence_has_a_higher_probability() -> None:
    calibration = VALUES["calibration"]
    assert 1 > calibration["clear"] > calibration["contested"] > calibration["vague"] > 0


@pytest.mark.slow
def test_a_stated_probability_is_within_ten_points_of_what_was_measured() -> None:
    """On excerpts to which it was not fitted: a second reader accepts so many of the roots."""
    classes = count_accepted(judge_excerpts(load_excerpts()))
    assert set(classes) == set(VALUES["calibration"])
    for kind, right in classes.items():
        assert len(right) >= 30
        assert sum(right) / len(right) == pytest.approx(VALUES["calibration"][kind], abs=0.1), kind

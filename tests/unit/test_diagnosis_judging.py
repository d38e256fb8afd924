"""The choice of the root among symptoms: levels, order, survival, words, accused ranks and
confidence.
"""

from __future__ import annotations

import dataclasses
import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.judging import Diagnosis, diagnose_files, judge, shorten
from ebbflow.diagnose.matching import Seen
from ebbflow.diagnose.reading import FileScan, LogText
from ebbflow.diagnose.rules import SymptomRule
from ebbflow.diagnose.series import Series
from ebbflow.diagnose.vocabulary import confidence_of, guess_family

STORAGE = "/env/torch/serialization.py"
DATA = "/env/torch/utils/data/dataloader.py"
MONITORING = "/env/wandb/sdk.py"

# Lines of which the words are as much in favour of storage as the numbers say.
LEADS = {
    2.5: "error: fqn",
    2.9: "error: validation shards",
    3.0: "error: kubernetes whence",
    3.1: "error: shards fqns",
}
STRONG_LEADS = {
    5.9: "error: async grain",
    6.0: "error: orig grain",
    6.1: "error: excluded acquire sharded",
}
PROGRAM_LEAD = "error: lora"

OTHERS = "the lines above come from a rank that waits, and not from the one at fault"
ALL = "the ranks differ, and no line tells which of them is wrong"
ALIKE = "every rank wrote these lines, and no line tells of one that is at fault alone"

# Texts that only a rule, only a series and only the list of severe words search for, and their
# symptoms.
SOUGHT = {
    "ip-10-0-0-1   NotReady   <none>   5m": "B11",
    "\n".join(f"{1.0 if at < 10 else 3.0}s/it" for at in range(20)): "G02",
    "panic lists grain": "H19",
}


def make_rule(identifier: str = "R1", kind: str = "cause", **fields: Any) -> SymptomRule:
    """A specific cause of the family memory, unless said otherwise."""
    values = {"family": "memory", "rank": 5, "weight": 0.9, **fields}
    return SymptomRule(id=identifier, kind=kind, title=f"title of {identifier}", look=(), **values)


def line(
    number: int,
    text: str = "x",
    file: str = "log",
    rank: int | None = None,
    time: float | None = None,
) -> LogText:
    return LogText(file, number, text, rank, time)


DONE = line(200, "training completed")


def seen(rule: SymptomRule, *lines: LogText | int, **flags: Any) -> Seen:
    """Matches of a rule in lines, or in lines of these numbers; a line's number is its order as
    well.
    """
    found = Seen(rule, **{"strong": True, **flags})
    for place in lines:
        if isinstance(place, int):
            match = line(place)
        else:
            match = place
        found.add(match, match.number)
    return found


def watch(*lines: LogText) -> Series:
    series = Series()
    assert list(series.watch(lines)) == list(lines)
    return series


def losses(count: int, *, after: int = 100, file: str = "log") -> list[LogText]:
    """Lines with finite losses behind line `after` of a file."""
    return [
        line(after + step, f"step {step} loss 2.{step}", file=file) for step in range(1, count + 1)
    ]


def diagnose(
    *found: Seen, series: Series | None = None, scans: tuple[FileScan, ...] = ()
) -> Diagnosis:
    evidence = Evidence()
    evidence.seen = {finding.rule.id: finding for finding in found}
    evidence.series = series or Series()
    evidence.scans = list(scans)
    return judge(evidence)


def named(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.rule.id, finding.role) for finding in diagnosis.findings]


def root_of(*found: Seen, series: Series | None = None) -> str | None:
    diagnosis = diagnose(*found, series=series)
    roots = [finding.rule.id for finding in diagnosis.findings if finding.role == "root"]
    assert diagnosis.abstained is (roots == [])
    assert len(roots) <= 1
    if roots:
        return roots[0]
    return None


# Confidence


@pytest.mark.parametrize(
    ("found", "confidence"),
    [
        (seen(make_rule(weight=0.9), 1), 0.9),
        (seen(make_rule(weight=0.5), 1), 0.5),
        (seen(make_rule(weight=0.49), 1), None),
        (seen(make_rule(), 1, strong=False, hints={"a"}), None),
        (seen(make_rule(), 1, strong=False, hints={"a", "b"}), 0.58),  # 1 - 0.65 ** 2 = 0.5775
        (seen(make_rule(), 1, strong=False, hints={"a", "b", "c"}), 0.65),  # 1 - 0.65 ** 3 = 0.725
        (seen(make_rule(need=("n",)), 1), None),
        (seen(make_rule(need=("n",)), 1, needed=True), 0.9),
        (seen(make_rule(least=3), 1, 2), None),
        (seen(make_rule(least=3), 1, 2, 3), 0.9),
        (seen(make_rule(least=3), 1, verdict=True), 0.9),
        (seen(make_rule(need=("n",)), 1, verdict=True), None),
        (Seen(make_rule(need=("n",)), strong=True, needed=True), None),  # a need without a line
    ],
)
def test_a_root_needs_confidence_of_a_half(found: Seen, confidence: float | None) -> None:
    diagnosis = diagnose(found)
    assert [round(finding.confidence, 2) for finding in diagnosis.findings] == (
        [] if confidence is None else [confidence]
    )
    assert diagnosis.abstained is (confidence is None)


def test_a_cascade_needs_confidence_of_three_tenths_and_a_single_hint_gives_it() -> None:
    root = seen(make_rule(), 1)
    for weight, expected in ((0.3, [0.9, 0.3]), (0.29, [0.9])):
        effect = seen(make_rule("R2", "effect", weight=weight), 2)
        assert [finding.confidence for finding in diagnose(root, effect).findings] == expected
    hinted = seen(make_rule("R2", "effect"), 2, strong=False, hints={"a"})
    assert [finding.confidence for finding in diagnose(root, hinted).findings] == [0.9, 0.35]


def test_a_rival_of_half_confidence_counts() -> None:
    found = [seen(make_rule(), 1), seen(make_rule("R2", family="cuda", weight=0.5), 2)]
    assert diagnose(*found).findings[0].confidence == pytest.approx(0.81)


@pytest.mark.parametrize("rivals", range(5))
def test_each_rival_of_another_family_takes_a_tenth_of_the_confidence(rivals: int) -> None:
    found = [seen(make_rule(), 1)]
    found += [seen(make_rule(f"R{at}", family="cuda"), at) for at in range(2, 2 + rivals)]
    assert diagnose(*found).findings[0].confidence == pytest.approx(0.9 * 0.9 ** min(rivals, 3))


@pytest.mark.parametrize(
    "other",
    [
        make_rule("R2", family="memory"),
        make_rule("R2", family="cuda", weight=0.49),
        make_rule("R2", family="cuda", rank=3),
        make_rule("R2", family="memory", weight=0.5),
        make_rule("R2", "effect", family="cuda"),
    ],
)
def test_a_symptom_of_the_family_or_below_the_root_is_no_rival(other: SymptomRule) -> None:
    findings = diagnose(seen(make_rule(), 1), seen(other, 2)).findings
    assert [(finding.role, finding.confidence) for finding in findings] == [
        ("root", 0.9),
        ("cascade", other.weight),
    ]


def test_a_summary_is_no_rival_of_advice() -> None:
    advice = seen(make_rule("R1", "advice"), 1)
    findings = diagnose(advice, seen(make_rule("R2", "summary", family="cuda"), 2)).findings
    assert [(finding.rule.id, finding.role, finding.confidence) for finding in findings] == [
        ("R1", "root", 0.9),
        ("R2", "cascade", 0.9),
    ]


def test_a_summary_of_no_confidence_is_shown_with_a_twentieth() -> None:
    diagnosis = diagnose(seen(make_rule("R1", "summary", weight=0.01), 1))
    assert [(finding.role, finding.confidence) for finding in diagnosis.findings] == [
        ("advice", 0.05)
    ]
    assert diagnose(seen(make_rule("R1", "summary", need=("n",)), 1)).findings == ()


# Levels and order


@pytest.mark.parametrize(
    ("higher", "lower"),
    [
        (make_rule("R1", rank=4), make_rule("R2", rank=3)),
        (make_rule("R1", rank=3), make_rule("R2", "effect", rank=9)),
        (make_rule("R1", "effect"), make_rule("R2", "echo")),
        (make_rule("R1", "echo"), make_rule("R2", "summary")),
    ],
)
def test_a_higher_level_is_the_root_even_if_it_is_logged_later(
    higher: SymptomRule, lower: SymptomRule
) -> None:
    assert named(diagnose(seen(lower, 1), seen(higher, 90))) == [("R1", "root"), ("R2", "cascade")]


def test_cascades_are_two_by_level_and_then_in_order() -> None:
    found = [
        seen(make_rule("R0"), 9),
        seen(make_rule("R1", "summary"), 1),
        seen(make_rule("R2", "echo"), 2),
        seen(make_rule("R3", "effect"), 5),
        seen(make_rule("R4", "effect"), 4),
    ]
    assert named(diagnose(*found)) == [("R0", "root"), ("R4", "cascade"), ("R3", "cascade")]
    assert named(diagnose(*found[:3])) == [("R0", "root"), ("R2", "cascade"), ("R1", "cascade")]
    advice = seen(make_rule("R5", "advice"), 3)
    assert named(diagnose(*found, advice)) == [("R0", "root"), ("R4", "cascade"), ("R3", "cascade")]
    assert named(diagnose(*found[:2], advice)) == [
        ("R0", "root"),
        ("R1", "cascade"),
        ("R5", "advice"),
    ]


def test_advice_is_sorted_by_confidence_and_then_by_order() -> None:
    advice = [
        seen(make_rule(f"R{weight}", "advice", weight=weight), at)
        for weight, at in ((0.6, 1), (0.8, 4))
    ]
    advice.append(seen(make_rule("R8", "advice", weight=0.8), 3))
    found = diagnose(seen(make_rule("R0"), 9), *advice)
    assert named(found) == [("R0", "root"), ("R8", "advice"), ("R0.8", "advice")]


@pytest.mark.parametrize(
    ("first", "second", "root"),
    [
        (line(1, time=20.0), line(2, time=10.0), "R2"),
        (line(1, time=10.0), line(2, time=10.0), "R1"),
        (line(1, time=20.0), line(2), "R1"),
        (line(1), line(2, time=10.0), "R1"),
        (line(2), line(1), "R2"),
        (line(2, time=0.0), line(1, time=0.0), "R2"),
    ],
)
def test_the_earliest_is_that_of_the_smallest_time_if_all_have_one(
    first: LogText, second: LogText, root: str
) -> None:
    assert root_of(seen(make_rule("R1"), first), seen(make_rule("R2"), second)) == root


def test_of_matches_of_one_line_the_more_specific_is_the_earliest() -> None:
    assert root_of(seen(make_rule("R1", rank=5), 1), seen(make_rule("R2", rank=6), 1)) == "R2"
    assert root_of(seen(make_rule("R1", rank=6), 1), seen(make_rule("R2", rank=5), 1)) == "R1"


@pytest.mark.parametrize(
    ("rank", "other_rank", "apart", "root"),
    [
        (1, 2, 40, "R2"),
        (1, 2, 41, "R1"),
        (1, 1, 1, "R1"),
        (5, 7, 8, "R2"),
        (5, 7, 9, "R1"),
        (5, 6, 1, "R1"),
        (7, 5, 1, "R1"),
        (2, 3, 1, "R1"),
    ],
)
def test_a_more_specific_match_nearby_describes_the_same_exception(
    rank: int, other_rank: int, apart: int, root: str
) -> None:
    assert (
        root_of(
            seen(make_rule("R1", rank=rank), 1), seen(make_rule("R2", rank=other_rank), 1 + apart)
        )
        == root
    )


@pytest.mark.parametrize(
    ("cause", "root"),
    [
        (seen(make_rule("R2", "effect"), 60), "R2"),
        (seen(make_rule("R2", "effect"), 140), "R2"),
        (seen(make_rule("R2", "effect"), 141), "R1"),
        (seen(make_rule("R2", "effect"), 59), "R1"),
        (seen(make_rule("R2", "effect", weight=0.5), 101), "R2"),
        (seen(make_rule("R2", "effect", weight=0.49), 101), "R1"),
        (seen(make_rule("R3", "effect"), 101), "R1"),
    ],
)
def test_a_symptom_that_leads_to_the_first_failure_is_the_root_within_40_lines(
    cause: Seen, root: str
) -> None:
    assert root_of(seen(make_rule("R1", follows=("R2", "R9")), 100), cause) == root


def test_of_several_symptoms_that_lead_to_a_failure_the_earliest_is_the_root() -> None:
    first = seen(make_rule("R1", follows=("R2", "R3")), 100)
    causes = [seen(make_rule("R2", "effect"), 110), seen(make_rule("R3", "effect"), 105)]
    assert root_of(first, *causes) == "R3"


@pytest.mark.parametrize("identifier", ["F02", "G01", "G02", "G11", "E06"])
def test_a_symptom_of_a_series_explains_no_exception(identifier: str) -> None:
    of_series = seen(make_rule(identifier, family="throughput"), 1)
    assert root_of(of_series, seen(make_rule("R1"), 90)) == "R1"
    assert root_of(of_series) == identifier


# Survival


@pytest.mark.parametrize(
    "family", ["memory", "quality", "throughput", "hardware", "cost", "startup"]
)
def test_a_failure_that_training_survived_is_a_root_only_if_it_harms_a_run_without_ending_it(
    family: str,
) -> None:
    found = seen(make_rule(family=family), 100)
    lasting = family in ("quality", "throughput", "hardware", "cost")
    assert root_of(found, series=watch(*losses(2))) == "R1"
    assert root_of(found, series=watch(*losses(3))) == ("R1" if lasting else None)
    assert root_of(found, series=watch(*losses(3, file="other"))) == "R1"
    assert root_of(found, series=watch(*losses(3, after=90))) == "R1"  # before the failure
    found.verdict = True
    assert root_of(found, series=watch(*losses(3))) == "R1"


def test_the_last_match_of_a_failure_decides_whether_training_survived_it() -> None:
    assert root_of(seen(make_rule(), 1, 200), series=watch(*losses(3))) == "R1"


def test_non_finite_losses_are_no_root_once_all_later_ones_are_finite() -> None:
    found = seen(make_rule("F01", family="quality"), 100)
    assert root_of(found, series=watch(*losses(1))) is None
    assert (
        root_of(found, series=watch(*losses(1), line(105, "loss inf"), *losses(1, after=110)))
        == "F01"
    )
    assert root_of(found) == "F01"
    found.verdict = True
    assert root_of(found, series=watch(*losses(1))) == "F01"


@pytest.mark.parametrize(
    ("rule", "at", "root"),
    [
        (make_rule("R1"), 100, None),
        (make_rule("R1", rank=3), 100, None),
        (make_rule("R1"), 201, "R1"),
        (make_rule("R1", "effect"), 100, "R1"),
        (make_rule("R1", family="hardware"), 100, "R1"),
        (make_rule("R1", family="quality"), 100, "R1"),
        (make_rule("R1", family="throughput"), 100, "R1"),
        (make_rule("R1", family="cost"), 100, None),
    ],
)
def test_a_cause_before_the_end_of_a_completed_run_is_no_root(
    rule: SymptomRule, at: int, root: str | None
) -> None:
    assert root_of(seen(rule, at), series=watch(DONE)) == root


def test_a_completed_run_has_its_root_if_one_of_its_causes_lasts() -> None:
    found = [seen(make_rule("R1"), 100), seen(make_rule("R2", family="hardware"), 101)]
    assert root_of(*found, series=watch(DONE)) == "R1"
    assert (
        root_of(seen(make_rule("R1"), 100), seen(make_rule("R3"), 201), series=watch(DONE)) == "R1"
    )


@pytest.mark.parametrize(
    ("rank", "kind", "effect_time", "cause_time", "root"),
    [
        (2, "effect", 1000.0, 1120.5, "R2"),
        (1, "effect", 1000.0, 1120.5, "R2"),
        (2, "effect", 1000.0, 1120.0, "R1"),
        (2, "effect", 1000.0, 1119.0, "R1"),
        (3, "effect", 1000.0, 1300.0, "R1"),
        (2, "echo", 1000.0, 1300.0, "R1"),
        (2, "effect", None, 1300.0, "R1"),
        (2, "effect", 1000.0, None, "R1"),
    ],
)
def test_a_generic_exception_two_minutes_after_an_effect_comes_from_clean_up(
    rank: int, kind: str, effect_time: float | None, cause_time: float | None, root: str
) -> None:
    effect = seen(make_rule("R2", kind), line(1, time=effect_time))
    assert root_of(effect, seen(make_rule("R1", rank=rank), line(9, time=cause_time))) == root


def test_of_several_effects_before_clean_up_the_earliest_is_the_root() -> None:
    effects = [seen(make_rule(f"R{at}", "effect"), line(at, time=1000.0 + at)) for at in (5, 3, 4)]
    assert root_of(*effects, seen(make_rule("R9", rank=1), line(9, time=1200.0))) == "R3"


def test_an_effect_is_no_clean_up_of_another_effect() -> None:
    slow = seen(make_rule("G02", "effect"), line(1, time=1000.0))
    assert root_of(slow, seen(make_rule("R1", "effect", rank=2), line(9, time=1300.0))) == "R1"


# Advice and summaries


@pytest.mark.parametrize(
    ("weight", "hints", "root"),
    [(0.6, (), "R1"), (0.59, (), None), (0.9, ("a",), None), (0.9, ("a", "b"), "R1")],
)
def test_advice_is_the_root_of_logs_without_a_failure(
    weight: float, hints: tuple[str, ...], root: str | None
) -> None:
    found = seen(make_rule("R1", "advice", weight=weight), 1, strong=not hints, hints=set(hints))
    assert root_of(found) == root
    assert root_of(found, series=watch(DONE)) is None


def test_the_best_advice_is_the_most_confident_and_then_the_earliest() -> None:
    advice = [
        seen(make_rule("R1", "advice", weight=0.7), 1),
        seen(make_rule("R2", "advice", weight=0.8), 4),
        seen(make_rule("R3", "advice", weight=0.8), 3),
    ]
    assert named(diagnose(*advice)) == [("R3", "root"), ("R2", "advice"), ("R1", "advice")]


def test_advice_is_no_root_beside_a_failure_that_training_survived() -> None:
    for weight, shown in ((0.6, [("R2", "advice")]), (0.59, [])):
        advice = seen(make_rule("R2", "advice", weight=weight), 2)
        diagnosis = diagnose(seen(make_rule("R1"), 100), advice, series=watch(*losses(3)))
        assert named(diagnosis) == shown
    for weight in (0.5, 0.9):
        survived = seen(make_rule("R1", weight=weight), 100)
        assert (
            root_of(survived, seen(make_rule("R2", "advice"), 2), series=watch(*losses(3))) is None
        )
    weak = seen(make_rule("R1", weight=0.49), 100)
    assert root_of(weak, seen(make_rule("R2", "advice"), 2), series=watch(*losses(3))) == "R2"


def test_advice_beside_a_root_needs_confidence_of_a_half() -> None:
    for weight, shown in ((0.5, [("R1", "root"), ("R2", "advice")]), (0.49, [("R1", "root")])):
        assert (
            named(
                diagnose(
                    seen(make_rule("R1"), 1), seen(make_rule("R2", "advice", weight=weight), 2)
                )
            )
            == shown
        )


@pytest.mark.parametrize(
    ("identifier", "family", "lines", "root"),
    [
        ("R1", "throughput", (1, 2), "R1"),
        ("R1", "monitoring", (1, 2), "R1"),
        ("R1", "throughput", (1,), None),
        ("R1", "data", (1, 2), None),
        ("A32", "startup", (1, 2), "A32"),
        ("A32", "startup", (1,), None),
        ("A31", "startup", (1, 2), None),
    ],
)
def test_of_sound_losses_only_advice_about_the_run_in_several_lines_is_a_root(
    identifier: str, family: str, lines: tuple[int, ...], root: str | None
) -> None:
    found = seen(make_rule(identifier, "advice", family=family), *lines)
    assert root_of(found, series=watch(*losses(9))) == identifier
    assert root_of(found, series=watch(*losses(10))) == root
    assert root_of(found, series=watch(*losses(10), DONE)) is None


def test_advice_is_shown_beside_a_root_of_sound_losses() -> None:
    found = [seen(make_rule("R1", family="hardware"), 1), seen(make_rule("R2", "advice"), 2)]
    assert named(diagnose(*found, series=watch(*losses(10)))) == [("R1", "root"), ("R2", "advice")]


def test_a_summary_of_half_confidence_is_the_root_of_logs_without_a_failure() -> None:
    summaries = [seen(make_rule(f"R{at}", "summary", weight=0.5), at) for at in (1, 2)]
    assert named(diagnose(*summaries)) == [("R1", "root"), ("R2", "cascade")]
    weak = seen(make_rule("R1", "summary", weight=0.49), 1)
    assert named(diagnose(weak)) == [("R1", "advice")]
    assert named(diagnose(weak, series=watch(*losses(10)))) == []
    assert named(diagnose(weak, seen(make_rule("R2"), 2))) == [("R2", "root"), ("R1", "cascade")]


def test_a_summary_weaker_than_a_root_does_not_hide_advice() -> None:
    summary = seen(make_rule("R1", "summary", weight=0.9), 1)
    assert named(diagnose(summary, seen(make_rule("R2", "advice", weight=0.6), 2))) == [
        ("R2", "root"),
        ("R1", "cascade"),
    ]


# Stack frames and words


def traceback(
    path: str, error: str, *, at: int = 10, function: str = "run"
) -> tuple[LogText, LogText]:
    return line(at, f'  File "{path}", line 8, in {function}'), line(at + 1, error)


@pytest.mark.parametrize(
    ("rule", "path", "error", "root"),
    [
        (make_rule("R1", family="program", rank=5), STORAGE, "ValueError: x", "H19"),
        (make_rule("R1", family="program", rank=6), STORAGE, "ValueError: x", "R1"),
        (make_rule("R1", family="memory", rank=5), STORAGE, "ValueError: x", "R1"),
        (make_rule("R1", family="program"), "/app/train.py", "ValueError: x", "R1"),
        (make_rule("R1", family="program"), STORAGE, "FileNotFoundError: No such file", "H02"),
        (make_rule("R1", family="program"), DATA, "FileNotFoundError: No such file", "E09"),
        (make_rule("R1", family="program"), MONITORING, "FileNotFoundError: No such file", "J11"),
        (make_rule("R1", family="program"), DATA, "ValueError: x", "E17"),
        (make_rule("R1", family="program"), DATA, "EOFError", "E01"),
        (make_rule("R1", family="program"), DATA, "EOFError: x", "E17"),
        (make_rule("R1", family="program"), DATA, "BrokenPipeError: No such file", "E01"),
        (make_rule("R1", family="program"), STORAGE, "BrokenPipeError: x", "H19"),
        (make_rule("O02", family="program", rank=7), DATA, "TypeError: x", "E17"),
        (make_rule("O02", family="program", rank=7), STORAGE, "TypeError: x", "O02"),
        (make_rule("E09", family="data"), STORAGE, "No such file", "H02"),
        (make_rule("E09", family="data"), MONITORING, "No such file", "J11"),
        (make_rule("E09", family="data"), DATA, "No such file", "E09"),
        (make_rule("H01", family="storage"), DATA, "x", "E17"),
        (make_rule("H01", family="storage"), MONITORING, "x", "J11"),
        (make_rule("H01", family="storage"), "/env/flash_attn/a.py", "x", "H01"),
        (make_rule("D06", family="synchronization"), DATA, "x", "E17"),
        (make_rule("D06", family="synchronization"), STORAGE, "x", "D06"),
    ],
)
def test_a_vague_exception_belongs_to_the_family_of_the_code_that_raised_it(
    rule: SymptomRule, path: str, error: str, root: str
) -> None:
    frame, exception = traceback(path, error)
    assert root_of(seen(rule, exception), series=watch(frame, exception)) == root


def test_a_family_from_stack_frames_has_the_confidence_of_its_rule() -> None:
    frame, exception = traceback(DATA, "ValueError: x")
    hinted = seen(make_rule("R1", family="program"), exception, strong=False, hints={"a", "b"})
    root = diagnose(hinted, series=watch(frame, exception)).findings[0]
    assert (root.rule.id, root.evidence) == ("E17", (exception,))
    assert root.confidence == pytest.approx(0.9 * 0.65)  # the exception by itself is a rival


def test_the_words_of_these_tests_have_their_leads() -> None:
    for lead, text in {**LEADS, **STRONG_LEADS}.items():
        assert guess_family([text]) == ("storage", pytest.approx(lead)), text
    assert guess_family([PROGRAM_LEAD]) == ("program", pytest.approx(3.2))


@pytest.mark.parametrize(
    ("rule", "lead", "root"),
    [
        (make_rule("R1", family="program"), 3.1, "H19"),
        (make_rule("R1", family="program"), 3.0, "H19"),
        (make_rule("R1", family="program"), 2.9, "R1"),
        (make_rule("R1", family="program", rank=6), 3.1, "R1"),
        (make_rule("R1", family="memory"), 3.1, "R1"),
    ],
)
def test_words_replace_a_vague_root_from_a_lead_of_three(
    rule: SymptomRule, lead: float, root: str
) -> None:
    exception = line(11, LEADS[lead])
    finding = diagnose(seen(rule, exception), series=watch(exception)).findings[0]
    assert (finding.rule.id, finding.role, finding.evidence) == (root, "root", (exception,))
    assert finding.confidence == pytest.approx(0.9 * confidence_of(lead) if root == "H19" else 0.9)
    assert confidence_of(3.1) == pytest.approx(0.5 + 0.2 * (1 - math.exp(-1.1 / 3)))


def test_words_do_not_replace_a_program_error_by_another() -> None:
    exception = line(11, PROGRAM_LEAD)
    assert (
        root_of(seen(make_rule("R1", family="program"), exception), series=watch(exception)) == "R1"
    )


@pytest.mark.parametrize(
    ("near", "root"),
    [
        (line(11, LEADS[3.1]), "H19"),
        (line(8, LEADS[3.1]), "H19"),
        (line(7, LEADS[3.1]), "R1"),
        (line(12, LEADS[3.1]), "R1"),
        (line(10, LEADS[3.1], file="other"), "R1"),
    ],
)
def test_only_the_words_of_the_three_lines_before_a_vague_exception_count(
    near: LogText, root: str
) -> None:
    exception = line(11, "x")
    assert (
        root_of(seen(make_rule("R1", family="program"), exception), series=watch(near, exception))
        == root
    )


def test_the_words_of_a_vague_exception_count_after_any_number_of_other_lines() -> None:
    others = [line(at, f"invalid {'x' * at}") for at in range(1, 15)]
    exception = line(40, LEADS[3.1])
    series = watch(*others, exception)
    assert exception not in series.severe.values()
    assert root_of(seen(make_rule("R1", family="program"), exception), series=series) == "H19"


def test_words_name_the_family_of_logs_without_a_symptom() -> None:
    first = line(5, LEADS[2.5])
    second = line(9, "error")
    (finding,) = diagnose(series=watch(first, second)).findings
    assert (finding.rule.id, finding.role, finding.evidence) == ("H19", "root", (first,))
    assert finding.confidence == pytest.approx(confidence_of(2.5))
    assert named(diagnose(series=watch(first, *losses(2)))) == [("H19", "root")]
    assert named(diagnose(series=watch(first, *losses(3)))) == []
    assert named(diagnose(series=watch(first, DONE))) == []
    assert named(diagnose(series=watch(line(5, "error: x")))) == []


def test_words_do_not_replace_a_vague_root_that_training_survived_or_of_a_completed_run() -> None:
    exception = line(110, LEADS[3.1])
    vague = seen(make_rule("R1", family="program"), exception)
    later = seen(make_rule("R2", "effect", follows=("R1",)), 120, 300)
    assert root_of(later, vague, series=watch(exception)) == "H19"
    assert root_of(later, vague, series=watch(exception, *losses(3, after=110))) == "R1"
    vague_effect = seen(make_rule("R1", "effect", family="program"), exception)
    assert root_of(vague_effect, series=watch(exception)) == "H19"
    assert root_of(vague_effect, series=watch(exception, DONE)) == "R1"


def test_a_traceback_without_its_exception_names_the_area_of_its_code() -> None:
    frame = line(10, f'  File "{DATA}", line 8, in __next__')
    (finding,) = diagnose(series=watch(frame)).findings
    assert (finding.rule.id, finding.role, finding.evidence, finding.confidence) == (
        "E17",
        "root",
        (frame,),
        0.5,
    )
    assert named(diagnose(series=watch(line(10, '  File "/app/train.py", line 8, in run')))) == []
    assert named(diagnose(series=watch(frame, DONE))) == []


@pytest.mark.parametrize(
    ("lead", "rival", "root"),
    [
        (6.1, make_rule("R2", family="storage"), "R2"),
        (6.0, make_rule("R2", family="storage"), "R2"),
        (6.1, make_rule("R2", family="storage", weight=0.5), "R2"),
        (5.9, make_rule("R2", family="storage"), "R1"),
        (6.1, make_rule("R2", family="cuda"), "R1"),
        (6.1, make_rule("R2", family="storage", rank=3), "R1"),
        (6.1, make_rule("R2", family="storage", follows=("R1",)), "R1"),
        (6.1, make_rule("R2", family="storage", weight=0.49), "R1"),
    ],
)
def test_words_of_a_lead_of_six_prefer_another_cause_of_the_level(
    lead: float, rival: SymptomRule, root: str
) -> None:
    at_fault = line(50, STRONG_LEADS[lead])
    found = [seen(make_rule("R1"), 10), seen(rival, at_fault)]
    assert root_of(*found, series=watch(line(10), at_fault)) == root


def test_words_prefer_no_cause_that_training_survived_and_the_earliest_of_several() -> None:
    at_fault = line(50, STRONG_LEADS[6.1])
    root = seen(make_rule("R1"), 300)
    survived = seen(make_rule("R2", family="storage"), at_fault)
    assert root_of(root, survived, series=watch(at_fault, *losses(3))) == "R1"
    rivals = [seen(make_rule(f"R{at}", family="storage"), at) for at in (60, 50, 55)]
    assert root_of(seen(make_rule("R1"), 10), *rivals, series=watch(at_fault)) == "R50"


def test_words_of_the_family_of_the_root_change_nothing() -> None:
    at_fault = line(50, STRONG_LEADS[6.1])
    found = [
        seen(make_rule("R1", family="storage", rank=7), 12),
        seen(make_rule("R2", family="storage"), 10),
    ]
    assert root_of(*found, series=watch(at_fault)) == "R1"


# Ranks


def ranked(rule: SymptomRule, *ranks: int | None, times: tuple[float | None, ...] = ()) -> Seen:
    stamps = times or (None,) * len(ranks)
    return seen(
        rule,
        *(line(at, f"x {at}", rank=rank, time=stamps[at - 1]) for at, rank in enumerate(ranks, 1)),
    )


def accused(*found: Seen, ranks_of_files: int = 0) -> tuple[tuple[int, ...], str]:
    scans = tuple(FileScan(f"logs/rank-{rank}.log") for rank in range(ranks_of_files))
    finding = diagnose(*found, scans=scans).findings[0]
    return finding.suspects, finding.note


@pytest.mark.parametrize(
    ("rule", "verdict", "expected"),
    [
        (make_rule(suspects="others"), False, ((0, 3), OTHERS)),
        (make_rule(suspects="all"), False, ((0, 1, 2, 3), ALL)),
        (make_rule(suspects="others"), True, ((), "")),
        (make_rule(), False, ((), "")),
    ],
)
def test_a_rank_that_waits_makes_the_other_ranks_of_the_logs_suspect(
    rule: SymptomRule, verdict: bool, expected: tuple[tuple[int, ...], str]
) -> None:
    found = ranked(rule, 1, 2)
    found.verdict = verdict
    assert accused(found, ranks_of_files=4) == expected


def test_ranks_of_other_symptoms_are_ranks_of_the_logs() -> None:
    waiting = ranked(make_rule(suspects="others"), 1)
    assert accused(waiting, ranked(make_rule("R2", "effect"), 8, 6)) == ((6, 8), OTHERS)


def test_accused_ranks_are_those_of_each_line_and_of_the_first_line_of_each_rank() -> None:
    rule = make_rule(
        suspects="others", accuses=(r"after 300 ms: no (\d+)", r"ranks? (\d+(?:, \d+)*) failed")
    )
    texts = [(0, "x"), (1, "x"), (None, "ranks 9, 4 failed"), (2, "after 300 ms: no 7")]
    texts += [(2, "after 300 ms: no 8"), (None, "after 300 ms: no 5")]
    found = seen(rule, *(line(at, text, rank=rank) for at, (rank, text) in enumerate(texts, 1)))
    # The lines that are kept are the first three, and the first of each rank.
    assert accused(found, ranks_of_files=4) == ((4, 7, 9), "")


def test_the_rank_whose_last_collective_is_the_earliest_is_accused() -> None:
    text = "[PG ID 0 PG GUID 0(default_pg) Rank {0}] timeout. last enqueued NCCL work: {1}"
    works = {0: 62, 1: 61, 2: 62, 3: 60}
    found = seen(
        make_rule("R1", "effect", suspects="others"),
        *(
            line(at, text.format(rank, work), rank=rank)
            for at, (rank, work) in enumerate(works.items(), 1)
        ),
    )
    assert accused(found) == ((1, 3), "")


@pytest.mark.parametrize(
    ("rule", "ranks", "times", "files", "alike"),
    [
        (make_rule(), (0, 1), (10.0, 10.9), 2, True),
        (make_rule(), (0, 1), (10.0, 11.0), 2, False),
        (make_rule(), (0, 1), (11.0, 10.0), 2, False),
        (make_rule(), (0, 1, 2), (10.0, 12.0, 10.2), 3, True),
        (make_rule(), (0, 1), (10.0, None), 2, True),
        (make_rule(), (0, 1), (None, None), 0, True),
        (make_rule(), (0, 1), (None, None), 3, False),
        (make_rule(), (0,), (None,), 0, False),
        (make_rule(family="startup"), (0, 1), (10.0, 60.0), 2, True),
        (make_rule("R1", "effect"), (0, 1), (None, None), 2, False),
        (make_rule(suspects="all"), (0, 1), (None, None), 2, False),
        (make_rule(accuses=(r"x (\d)",)), (0, 1), (None, None), 2, False),
    ],
)
def test_a_cause_that_all_ranks_wrote_within_a_second_accuses_none(
    rule: SymptomRule,
    ranks: tuple[int, ...],
    times: tuple[float | None, ...],
    files: int,
    alike: bool,
) -> None:
    suspects, note = accused(ranked(rule, *ranks, times=times), ranks_of_files=files)
    assert (note == ALIKE) is alike
    assert not (alike and suspects)


def test_a_verdict_is_not_alike_on_all_ranks() -> None:
    found = ranked(make_rule(), 0, 1)
    assert accused(found) == ((), ALIKE)
    found.verdict = True
    assert accused(found) == ((), "")


def test_the_rank_of_the_first_line_comes_first_in_the_root_only() -> None:
    root, cascade = diagnose(
        ranked(make_rule(), 3, 1, None, 2), ranked(make_rule("R2", "effect"), 3, 1, 2)
    ).findings
    assert (root.ranks, cascade.ranks) == ((3, 1, 2), (1, 2, 3))
    assert diagnose(ranked(make_rule(), 3, 0, 1)).findings[0].ranks == (3, 0, 1)
    assert diagnose(ranked(make_rule(), 0, 3, 1)).findings[0].ranks == (0, 1, 3)
    assert diagnose(ranked(make_rule(), None, 3, 1)).findings[0].ranks == (1, 3)


# Output


def test_a_finding_is_written_as_json_with_its_evidence() -> None:
    rule = make_rule(fix=("first", "second"), causes={"a": 0.7}, suspects="all", weight=0.777)
    found = seen(
        rule, line(3, "no\x07 memory", file="a.log", rank=1, time=5.0), line(4), line(5), line(6)
    )
    scans = (FileScan("a.log", 9), FileScan("b", refused="binary file"))
    assert diagnose(found, scans=scans).to_json() == {
        "schema": 1,
        "findings": [
            {
                "symptom": "R1",
                "family": "memory",
                "role": "root",
                "confidence": 0.85,
                "evidence": [
                    {
                        "file": "a.log",
                        "line": 3,
                        "text": shorten("no\x07 memory"),
                        "rank": 1,
                        "time": 5.0,
                    },
                    {"file": "log", "line": 4, "text": "x", "rank": None, "time": None},
                    {"file": "log", "line": 5, "text": "x", "rank": None, "time": None},
                ],
                "fix": "first; second",
                "title": "title of R1",
                "causes": {"a": 0.7},
                "ranks": [1],
                "suspects": [1],
                "note": ALL,
                "matches": 4,
            }
        ],
        "abstained": False,
        "candidates": [
            {"symptom": "R1", "title": "title of R1", "probability": 0.85, "separate": ""}
        ],
        "files": [
            {"file": "a.log", "lines": 9, "refused": None, "gaps": None},
            {"file": "b", "lines": 0, "refused": "binary file", "gaps": None},
        ],
    }


def test_a_long_line_is_shortened_to_300_characters() -> None:
    assert shorten("x" * 300) == "x" * 300
    assert shorten("x" * 301) == "x" * 299 + "…"
    assert "\x07" not in shorten("a\x07b")


def test_a_series_shows_a_symptom_that_no_line_matches() -> None:
    bad = [line(at, f"step {at} loss nan") for at in (1, 2)]
    (finding,) = diagnose(series=watch(*bad)).findings
    assert (finding.rule.id, finding.role, finding.confidence) == ("F01", "root", 0.9)
    assert (finding.evidence, finding.count) == (tuple(bad), 2)
    matched = seen(make_rule("F01", family="quality"), 2)
    (finding,) = diagnose(matched, series=watch(*bad)).findings
    assert finding.count == 1


@pytest.mark.parametrize("text", SOUGHT)
def test_logs_are_searched_for_triggers_of_rules_series_and_words(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text(f"{text}\n")
    diagnosis = diagnose_files([tmp_path / "log"])
    assert [finding.rule.id for finding in diagnosis.findings] == [SOUGHT[text]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n".encode())))
    (finding,) = diagnose_files([None]).findings
    assert (finding.rule.id, finding.evidence[0].file) == (SOUGHT[text], "-")


def test_a_diagnosis_cannot_be_changed() -> None:
    diagnosis = diagnose(seen(make_rule(), 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.abstained = True  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.findings[0].role = "cascade"  # type: ignore[misc]


def test_lines_keep_their_order_across_files(tmp_path: Path) -> None:
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    disk = "OSError: [Errno 28] No space left on device"
    (tmp_path / "first.log").write_text("loss: 1\nloss: 2\n" + memory)
    (tmp_path / "second.log").write_text(disk)
    names = ("first.log", "second.log")
    diagnosis = diagnose_files([tmp_path / name for name in names])
    assert [finding.rule.id for finding in diagnosis.findings] == ["C01", "H10"]
    assert [(scan.file, scan.refused) for scan in diagnosis.scans] == [
        (str(tmp_path / name), None) for name in names
    ]

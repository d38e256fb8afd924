"""The matching of lines against rules: required literals, triggers, roles of expressions, and what
a match records.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.diagnose.matching import (
    Matcher,
    Pattern,
    Seen,
    choose_triggers,
    required_literals,
)
from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.rules import SymptomRule, load_rules

WORDS = st.text("abxyz ", min_size=4, max_size=12).filter(lambda text: text.strip() == text)

COMMON = (
    "step",
    "rank",
    "info",
    "train",
    "torch",
    "tensor",
    "model",
    "data",
    "time",
    "loss",
    " the",
    "with",
    "epoch",
)

TASK = "[7/train/{0} (pid 1)] "
JOB = "0123abcd-0123-0123-0123-0123456789ab"

FRAME = '  File "a.py", line 3, in run'


def make_rule(identifier: str, *look: str, **fields: Any) -> SymptomRule:
    return SymptomRule(
        id=identifier,
        family="memory",
        title=identifier,
        kind="cause",
        look=look,
        **{"rank": 5, **fields},
    )


def line(number: int, text: str, rank: int | None = None) -> LogText:
    return LogText("log", number, text, rank)


def collect(rules: list[SymptomRule], *texts: str, order: int = 0) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    lines = [line(number, text) for number, text in enumerate(texts, 1)]
    assert Matcher(rules).collect(lines, seen, order) == order + len(texts)
    return seen


def ids(rules: list[SymptomRule], text: str) -> list[str]:
    return [rules[number].id for number, _, _ in Matcher(rules).match(text)]


# Literals and triggers


@pytest.mark.parametrize(
    ("expression", "literals"),
    [
        ("disk full", ("disk full",)),
        ("Disk FULL", ("disk full",)),
        ("abc", ("abc",)),
        ("ab.cdef", ("cdef",)),
        ("abcd.*ef", ("abcd",)),
        ("abc.defg", ("defg",)),
        ("(?:abcd)+x", ("abcd",)),
        ("(?:abcde){2,}xyz", ("abcde",)),
        ("(?:abcde){2,}?xyz", ("abcde",)),
        ("(?:abcde)*xyz", ("xyz",)),
        ("(?:abcde)?xyz", ("xyz",)),
        ("(abcd)x", ("abcd",)),
        ("xyz(?:abcd|efgh)", ("abcd", "efgh")),
        ("xyz(?:abcd|ef)", ("xyz",)),
        ("(?:abc|def)(?:ghi|jkl|mno)", ("abc", "def")),
        ("(?:def|ghi)abc", ("abc",)),
        ("(?:abcdef|ghi)wxyz", ("wxyz",)),
        ("error 404 x", ("error 404 x",)),
        ("12345 abc", ("12345 abc",)),
        ("12345 ab|cdef", ("12345 ab", "cdef")),
        ("12345 a|cdef", ()),
        ("a1b2c3d", ()),
        ("ab", ()),
        (r"\d+", ()),
    ],
)
def test_each_match_of_an_expression_has_one_of_its_literals(
    expression: str, literals: tuple[str, ...]
) -> None:
    if literals:
        assert required_literals(expression) == literals
    else:
        with pytest.raises(
            ValueError, match=re.escape(f"{expression!r} has no fixed text of 3 characters")
        ):
            required_literals(expression)


def test_every_rule_has_literals_in_its_examples() -> None:
    checked = 0
    for rule in load_rules().rules:
        for expression in rule.look:
            for example in rule.examples:
                match = re.search(expression, example, re.IGNORECASE)
                if match is not None:
                    assert any(
                        literal in match[0].lower() for literal in required_literals(expression)
                    ), rule.id
                    checked += 1
    assert checked > 250


def test_every_expression_of_a_last_line_is_valid() -> None:
    # The matcher compiles all other expressions
    expressions = [expression for rule in load_rules().rules for expression in rule.last]
    assert len({re.compile(expression, re.IGNORECASE) for expression in expressions}) >= 5


@given(literals=st.lists(WORDS, min_size=1, max_size=8, unique=True))
def test_each_literal_has_a_trigger(literals: list[str]) -> None:
    triggers = choose_triggers(literals)
    for literal in literals:
        assert any(trigger in literal for trigger in triggers)


@pytest.mark.parametrize(
    ("literals", "triggers"),
    [
        (["full disk", "full tape"], ["full "]),  # shorter than 7, and as long as possible
        (["qwertyuiop", "qwertyuizz"], ["qwertyu", "wertyui"]),
        (["disk"], ["disk"]),
        (["xy1234z words"], ["z words"]),
        (["zz1kkkk"], ["kkkk"]),
        (["rank 12", "rank 13"], ["ank "]),  # "rank" is in logs of healthy runs
        (["größer", "größte"], ["größer", "größte"]),  # a trigger is ASCII
        (["aaab", "aaac", "baab", "baac"], None),
    ],
)
def test_triggers_are_the_longest_texts_that_most_literals_share(
    literals: list[str], triggers: list[str] | None
) -> None:
    chosen = choose_triggers(literals)
    if triggers is None:
        assert all(any(trigger in literal for trigger in chosen) for literal in literals)
    else:
        assert chosen == triggers[: len(chosen)] and len(chosen) >= 1


@pytest.mark.parametrize("word", COMMON)
def test_a_word_of_healthy_logs_is_no_trigger(word: str) -> None:
    assert choose_triggers([f"q{word}", f"z{word}"]) == [f"q{word}", f"z{word}"]


@pytest.mark.parametrize(
    ("shared", "triggers"),
    [
        ("kvj", ["qkvj", "zkvj"]),
        ("kvjb", ["kvjb"]),
        ("kvjbn", ["kvjbn"]),
        ("kvjbng", ["kvjbng"]),
        ("kvjbngf", ["kvjbngf"]),
        ("kvjbngfh", ["kvjbngf"]),
    ],
)
def test_a_trigger_has_four_to_seven_characters(shared: str, triggers: list[str]) -> None:
    assert choose_triggers([f"q{shared}", f"z{shared}"]) == triggers


def test_a_matcher_names_its_triggers_as_bytes() -> None:
    matcher = Matcher([make_rule("R1", "disk is full"), make_rule("R2", "tape is full")])
    assert matcher.triggers == (b" is ful",)


# Matches of a line


def test_of_several_rules_the_highest_rank_matches_and_other_roles_always_do() -> None:
    rules = [
        make_rule("R1", "disk full", rank=4),
        make_rule("R2", "disk", rank=6),
        make_rule("R3", "full", rank=6),
        make_rule("R4", "zzzz", rank=1, hint=("disk",), need=("full",), cleared=("disk full",)),
    ]
    found = Matcher(rules).match("disk full")
    assert sorted(found) == [
        (1, "look", "disk"),
        (2, "look", "full"),
        (3, "cleared", "disk full"),
        (3, "hint", "disk"),
        (3, "need", "full"),
    ]
    assert ids(rules, "nothing") == []
    assert sorted(ids(rules, "DISK FULL")) == ["R2", "R3", "R4", "R4", "R4"]


def test_a_line_that_an_expression_excludes_is_no_match() -> None:
    rules = [
        make_rule("R1", "disk full", unless=("test", "dry run")),
        make_rule("R2", "disk", rank=1),
    ]
    assert ids(rules, "disk full") == ["R1"]
    assert ids(rules, "a Test: disk full") == ["R2"]
    assert ids(rules, "disk full, dry run") == ["R2"]


def test_lines_that_differ_in_digits_share_a_result_unless_an_expression_counts() -> None:
    matcher = Matcher(
        [
            make_rule("R1", r"disk \d{2} full"),
            make_rule("R2", "tape full"),
            make_rule("R3", "x{2,3}yzw"),
        ]
    )
    for text, number in (
        ("disk 12 full", 1),
        ("disk 1 full", 0),
        ("disk 34 full", 1),
        ("disk 5 full", 0),
    ):
        assert len(matcher.match(text)) == number, text
    both = Matcher([make_rule("R1", r"disk \d{2} full"), make_rule("R2", "disk", rank=1)])
    assert [both.match(text)[0][0] for text in ("disk 12 full", "disk 1 full")] == [0, 1]
    first = matcher.match("tape full 1")
    assert matcher.match("tape full 22") is first
    assert matcher.match("tape full, at last") is not first
    repeated = matcher.match("xxyzw 1")
    assert len(repeated) == 1 and matcher.match("xxyzw 2") is repeated


def test_a_prefix_of_a_launcher_is_no_part_of_a_line() -> None:
    rules = [make_rule("R1", "^disk full")]
    assert ids(rules, "disk full") == ["R1"]
    assert ids(rules, "[default3]:disk full") == ["R1"]
    assert ids(rules, "the disk full") == []
    inside = [make_rule("R1", r"^end \[default4\]:disk")]
    assert ids(inside, "end [default4]:disk") == ["R1"]
    assert ids(inside, "[default3]:end [default4]:disk") == ["R1"]


# What is recorded


def test_a_match_counts_each_line_once_and_keeps_the_first_three() -> None:
    found = Seen(make_rule("R1", "x"))
    assert (found.count, found.order) == (0, 0)
    lines = [line(number, "x") for number in range(1, 6)]
    for number, text in enumerate(lines, 11):
        found.add(text, number)
        found.add(text, number)
    assert (found.count, found.first, found.last, found.order) == (5, lines[0], lines[4], 11)
    assert found.lines == lines[:3]
    assert (found.strong, found.needed, found.verdict, found.kept) == (False, False, False, [])


def test_a_match_keeps_the_first_line_of_each_rank_but_the_last_count_of_collectives() -> None:
    found = Seen(make_rule("R1", "x"))
    texts = [
        (0, "a"),
        (0, "b"),
        (None, "c"),
        (1, "last enqueued work: 5"),
        (1, "Last enqueued work: 6"),
        (1, "d"),
    ]
    for number, (rank, text) in enumerate(texts, 1):
        found.add(line(number, text, rank), number)
    assert {rank: match.text for rank, match in found.ranks.items()} == {
        0: "a",
        1: "Last enqueued work: 6",
    }
    many = Seen(make_rule("R1", "x"))
    for rank in range(4100):
        many.add(line(rank + 1, "x", rank), rank)
    assert len(many.ranks) == 4096 and many.count == 4100


@pytest.mark.parametrize(
    ("waits", "starts", "left"),
    [
        ([TASK.format(1), TASK.format(2)], TASK.format(2), 1),
        ([TASK.format(1), TASK.format(2)], TASK.format(1), 1),
        ([TASK.format(1)], TASK.format(2), 1),
        ([TASK.format(1)], TASK.format(1), None),
        ([TASK.format(1), TASK.format(1)], TASK.format(1), None),
        (["[7/train] "], "[7/train] ", None),
        ([f"job {JOB} ", f"job {JOB}:1 "], f"{JOB} ", 1),
        (["pod/a ", "pods/b "], "pod/a ", 1),
        (["pod/team/a ", "pod/team/b "], "pod/a ", 1),
        (['pod="a" '], "pod/a ", None),
        (["pods team/a "], "Successfully assigned team/a ", None),
        (["Successfully assigned a "], "pod/a ", None),
        (["", TASK.format(1)], TASK.format(1), None),  # a line about nothing is about what starts
        ([TASK.format(1)], "", 1),
        (["", ""], "", None),
    ],
)
def test_a_line_that_ends_a_symptom_removes_the_lines_about_its_object(
    waits: list[str], starts: str, left: int | None
) -> None:
    rule = make_rule("R1", "is waiting", cleared=("has started",))
    seen = collect([rule], *(f"{name}is waiting" for name in waits), f"{starts}has started")
    assert (seen["R1"].count if "R1" in seen else None) == left


def test_a_reduced_symptom_keeps_its_evidence() -> None:
    rule = make_rule("R1", "is waiting", hint=("why",), need=("needed",), cleared=("has started",))
    texts = [f"{TASK.format(1)}is waiting", "it is needed", f"{TASK.format(2)}is waiting, why", "x"]
    found = collect([rule], *texts, f"{TASK.format(1)}has started", order=10)["R1"]
    assert (found.count, found.order, found.strong, found.needed) == (1, 13, True, True)
    assert (found.hints, [match.number for match in found.lines]) == ({"why"}, [3])
    again = collect([rule], texts[0], f"{TASK.format(1)}has started", texts[2])["R1"]
    assert (again.count, again.needed, [match.number for match in again.lines]) == (1, False, [3])


def test_only_a_rule_that_ends_keeps_its_lines_and_at_most_a_thousand() -> None:
    ends = make_rule("R1", "x", cleared=("y",))
    stays = make_rule("R2", "x")
    for rule, kept in ((ends, 1000), (stays, 0)):
        found = Seen(rule)
        for number in range(1, 1003):
            found.add(line(number, f"{TASK.format(number)}x"), number)
        assert (len(found.kept), found.count) == (kept, 1002)
    assert found.without("") is None


def test_expressions_of_each_role_are_recorded() -> None:
    rule = make_rule("R1", "disk full", hint=("is slow", "is hot"), need=("on a node",))
    seen = collect(
        [rule, make_rule("R2", "tape")],
        "disk is slow",
        "the disk is hot",
        "the rack is hot",
        order=5,
    )
    found = seen["R1"]
    assert (found.count, found.strong, found.needed, found.order) == (3, False, False, 6)
    assert found.hints == {"is slow", "is hot"}
    assert seen.keys() == {"R1"}
    assert Matcher([rule]).collect([line(1, "disk full"), line(2, "x")], {}) == 2
    found = collect([rule], "on a node", "disk full")["R1"]
    assert (found.count, found.strong, found.needed, found.hints) == (1, True, True, set())
    found = collect([rule], "disk full", "disk is slow")["R1"]
    assert (found.strong, found.hints) == (True, {"is slow"})


def test_a_line_may_end_one_symptom_and_be_evidence_of_others() -> None:
    rules = [
        make_rule("R1", "node has started"),
        make_rule("R2", "is waiting", cleared=("node has started",)),
        make_rule("R3", "is waiting", need=("node has started",)),
        make_rule("R4", "node has started"),
    ]
    seen = collect(rules, "is waiting", "node has started")
    assert seen.keys() == {"R1", "R3", "R4"}
    assert seen["R3"].needed
    for order in (rules[::-1], rules[1:] + rules[:1]):
        assert collect(order, "is waiting", "node has started").keys() == {"R1", "R3", "R4"}


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        ([FRAME, "    print('disk full')"], 0),
        ([FRAME, '    assert x, "disk full"'], 1),
        ([FRAME, "  disk full"], 1),
        ([FRAME, "   disk full"], 1),
        ([FRAME, "x", "    print('disk full')"], 1),
        ([f"[rank0]: {FRAME}", "[rank0]:     print('disk full')"], 0),
        ([f"[rank0]: {FRAME}", "    print('disk full')"], 1),
        ([FRAME, "    x = 1", "disk full"], 1),
        ([FRAME, FRAME, "    print('disk full')", "disk full"], 1),
        (["    print('disk full')"], 1),
    ],
)
def test_the_source_line_of_a_frame_is_no_message(texts: list[str], count: int) -> None:
    seen = collect([make_rule("R1", "disk full")], *texts)
    assert (seen["R1"].count if seen else 0) == count


def test_a_pattern_cannot_be_changed() -> None:
    pattern = Pattern(re.compile("x"), 1, "look", ("x",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        pattern.rule = 2  # type: ignore[misc]

"""Diagnosis of the symptoms found in logs: it names the root failure, unless the evidence is too
weak.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbflow.core.untrusted_text import one_line
from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.facts import Fact, NcclError, Timeouts
from ebbflow.diagnose.matching import Seen
from ebbflow.diagnose.nccl_errors import find_nccl_cause
from ebbflow.diagnose.reading import FileScan, LogText, rank_of_path
from ebbflow.diagnose.rules import VALUES, SymptomRule, load_rules
from ebbflow.diagnose.series import Series
from ebbflow.diagnose.series_symptoms import judge_series
from ebbflow.diagnose.vocabulary import MARGIN, confidence_of, guess_family

THIN = 0.5  # a root below this confidence is not named
_LIKELY = 0.6  # the weight of advice that may be the only explanation
_MOST_FINDINGS = 3
_LEVELS = {"cause": 4, "effect": 2, "echo": 1, "summary": 0, "advice": -1}
_LASTING = ("quality", "throughput", "hardware", "cost")
# Families that harm a run which reaches its end
_HARMING = ("quality", "throughput", "hardware")
_GENERIC_LEVEL = 3  # level of causes that only report that there was an exception
_GENERIC_RANK = 3
# Exceptions up to this rank are attributed to the code that raised them, or by words
_VAGUE_RANK = 5
_NEAR_LINES = 3
_CLEAR = 0.85  # confidence of a specific cause without a rival
_SHARES = (0.5, 0.25)  # of what the root's probability leaves, for the second and third candidate
# Probability that a root is the exact symptom, by the class of its evidence: measured on labelled
# threads by `python -m benchmarks diagnose --texts FOLDER`
_CALIBRATION = VALUES["calibration"]
_BESIDE_TRAINING = {"J12"}
_NEAR_FACT = 12  # lines between a fact and a symptom of the same failure
_SAME_FAILURE = 40  # matches within so many candidate lines usually describe the same failure
# The last collective that a rank of the default group has called: the rank with the smallest number
# is behind.
_ENQUEUED = re.compile(
    r"\[PG ID 0 [^]]*?Rank (\d+)\].*?last enqueued(?: NCCL)? work: (-?\d+)", re.IGNORECASE
)
_NOTES = {
    "others": "the lines above come from a rank that waits, and not from the one at fault",
    "all": "the ranks differ, and no line tells which of them is wrong",
    "alike": "every rank wrote these lines, and no line tells of one that is at fault alone",
}
# Rules for an absent file, by the area of the code that opens it
_MISSING_FILE = {"storage": "H02", "data": "E09"}
# Rules whose message does not tell the family; the code that raised it does.
_BY_PLACE = {
    "O02": ("data",),
    "E09": ("storage", "monitoring"),
    "H01": ("data", "monitoring"),
    "D06": ("data",),
}
# What a process meets whose data worker ends while it sends a batch.
_UNEQUAL_SAMPLES = re.compile("Sizes of tensors must match|each tensor to be equal size")
_WORKER_GONE = re.compile(r"\bEOFError$|Connection(?:Reset|Refused)Error|BrokenPipeError")
_SERIES_ONLY = ("F02", "G01", "G02", "G11", "E06")  # what only a series shows explains no exception
_OVERRULING_MARGIN = 6.0  # of words, for another cause of the same level
_TEXT_LENGTH = 300
# Of several ranks with the same cause, one that has it so much earlier is named
_LEAD_SECONDS = 1.0
# A cause that is logged this long after an effect did not lead to it.
_AFTERMATH_SECONDS = 120.0


@dataclass(frozen=True)
class Finding:
    """A symptom found in the logs, with its evidence and the confidence in it.

    Its role is root, cascade, advice or history (a failure that the job has survived).
    """

    rule: SymptomRule
    role: str
    confidence: float
    evidence: tuple[LogText, ...]
    ranks: tuple[int, ...]  # that wrote it
    count: int
    suspects: tuple[
        int, ...
    ] = ()  # ranks that the lines accuse, or that did not write them although others wait
    note: str = ""  # how far the lines tell which rank is at fault
    probability: float | None = None  # calibrated; None: it is no root

    def to_json(self) -> dict[str, Any]:
        return {
            "symptom": self.rule.id,
            "family": self.rule.family,
            "role": self.role,
            "confidence": round(
                self.confidence if self.probability is None else self.probability, 2
            ),
            "evidence": [
                {
                    "file": line.file,
                    "line": line.number,
                    "text": shorten(line.text),
                    "rank": line.rank,
                    "time": line.time,
                }
                for line in self.evidence
            ],
            "fix": "; ".join(self.rule.fix),
            "title": self.rule.title,
            "causes": self.rule.causes,
            "ranks": list(self.ranks),
            "suspects": list(self.suspects),
            "note": self.note,
            "matches": self.count,
        }


@dataclass(frozen=True)
class PossibleCause:
    """A possible cause of the failure, with its calibrated probability.

    `separate` is the test that separates it from the first candidate; it is empty for the first
    one.
    """

    rule: SymptomRule
    probability: float
    separate: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "symptom": self.rule.id,
            "title": self.rule.title,
            "probability": round(self.probability, 2),
            "separate": self.separate,
        }


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis: the findings and the files that were read.

    `abstained` is whether no finding is named as the root.
    """

    findings: tuple[Finding, ...]
    abstained: bool
    scans: tuple[FileScan, ...]
    candidates: tuple[PossibleCause, ...] = ()  # at most three causes, the likeliest first

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "findings": [finding.to_json() for finding in self.findings],
            "abstained": self.abstained,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "files": [
                {
                    "file": scan.file,
                    "lines": scan.lines,
                    "refused": scan.refused,
                    "gaps": scan.describe_gaps(),
                }
                for scan in self.scans
            ],
        }


def shorten(text: str) -> str:
    """Replace unprintable characters of a log line, and shorten it to at most 300 characters."""
    shown = one_line(text)
    if len(shown) <= _TEXT_LENGTH:
        return shown
    return f"{shown[: _TEXT_LENGTH - 1]}…"


def diagnose_files(files: Sequence[Path | None]) -> Diagnosis:
    """Diagnose log files; None in the list stands for standard input."""
    evidence = Evidence()
    evidence.read_files(files)
    return judge(evidence)


def judge(evidence: Evidence, *, ended_well: bool = False) -> Diagnosis:
    """Choose at most three findings: the root failure, then its consequences, advice, and failures
    of earlier episodes.

    ended_well: whether the job is known to have ended well, so that no finding is a root.
    """
    series = evidence.series
    seen = evidence.silences() | evidence.seen
    for identifier, lines in judge_series(series).items():
        rule = load_rules().find(identifier)
        if rule and identifier not in seen:
            found = seen.setdefault(identifier, Seen(rule, strong=True))
            for order, line in lines:
                found.add(line, order)
    facts = evidence.facts()
    seen = _judge_facts(facts, seen)
    known = {key: found for key, found in seen.items() if _confidence(found) > 0}
    if ended_well:
        verdicts = [matches for matches in known.values() if matches.verdict]
        return Diagnosis(_past(verdicts), True, tuple(evidence.scans))
    suspects = [matches for matches in known.values() if matches.rule.kind != "advice"]
    root = _choose_root(known, suspects, series)
    past = []
    for identifier, matches in evidence.history.items():
        if identifier not in known and matches.rule.kind not in ("advice", "summary"):
            past.append(matches)
    if root is None and not series.sound:  # an episode that shows nothing: the one before it
        root = _first_failure(past, series)
        suspects += past
    findings = []
    if root is not None:
        ranks_of_files = {rank_of_path(Path(scan.file)) for scan in evidence.scans}
        ranks = {rank for rank in ranks_of_files if rank is not None}
        accused = _accuse(root, ranks.union(*(found.ranks for found in suspects)))
        finding = replace(_finding(root, "root", suspects), **accused)
        finding = replace(finding, probability=_CALIBRATION[evidence_class(finding)])
        findings.append(_add_detail(finding, facts))
        rest = sorted(suspects, key=lambda found: (-_level(found), found.order))
        after = [found for found in rest if found is not root and _confidence(found) >= 0.3]
        findings += [_finding(found, "cascade", suspects) for found in after[: _MOST_FINDINGS - 1]]
    advice = [
        found
        for found in known.values()
        if found.rule.kind == "advice"
        and found is not root
        and _confidence(found) >= (THIN if root else _LIKELY)
    ]
    if root is None:  # a summary names no cause, but says where to look for one
        advice += [found for found in suspects if found.rule.kind == "summary"]
    if root is not None or not series.sound:
        advice.sort(key=lambda found: (-_confidence(found), found.order))
        findings += [
            _finding(found, "advice", advice) for found in advice[: _MOST_FINDINGS - len(findings)]
        ]
    if len(findings) < _MOST_FINDINGS and root not in past:
        findings += _past(past)[: _MOST_FINDINGS - len(findings)]
    candidates = _list_candidates(findings[0], suspects) if root is not None else ()
    return Diagnosis(tuple(findings), root is None, tuple(evidence.scans), candidates)


def evidence_class(root: Finding) -> str:
    """Classify a root's evidence as "vague", "clear" or "contested".

    The root's calibrated probability depends on this class.
    """
    rule = root.rule
    is_guess = rule.id == load_rules().other(rule.family)
    vague_rank = _VAGUE_RANK if rule.family == "program" else _GENERIC_RANK
    is_general = rule.kind == "cause" and rule.rank <= vague_rank
    if is_guess or is_general or root.confidence <= THIN:
        return "vague"
    if rule.kind == "cause" and root.confidence >= _CLEAR:
        return "clear"
    return "contested"


def find_reported_cause(messages: Iterable[tuple[int, str]]) -> Finding | None:
    """Diagnose the error messages of failed ranks while the job still runs.

    Return the root failure if it is a specific cause, and None if it is only an effect of another
    failure.

    Args:
        messages: rank and message of each failure, which may have several lines
    """
    evidence = Evidence()
    for rank, message in messages:
        lines = enumerate(message.splitlines(), start=1)
        evidence.read(LogText(f"rank {rank}", number, text, rank) for number, text in lines)
    for finding in judge(evidence).findings:
        is_cause = finding.rule.kind == "cause" and finding.rule.rank > _GENERIC_RANK
        if finding.role == "root" and is_cause and finding.confidence >= THIN:
            return finding
    return None


def _judge_facts(facts: Sequence[Fact], seen: dict[str, Seen]) -> dict[str, Seen]:
    """Copy `seen`, and add the symptoms that the facts prove.

    Symptoms that a proven symptom replaces (`FactTest.instead_of`) are removed.
    """
    judged = dict(seen)
    for rule in load_rules().rules:
        for test in rule.facts:
            proofs = [fact for fact in facts if test.holds(fact)]
            if not proofs:
                continue
            changed = replace(rule, kind=test.kind or rule.kind, weight=test.weight or rule.weight)
            symptom = Seen(changed, strong=True)
            for fact in proofs:
                symptom.add(fact.line, fact.order)
            for identifier in test.instead_of:
                other = judged.get(identifier)
                if other is not None and not other.verdict and _are_near(other, proofs):
                    del judged[identifier]
            judged[rule.id] = symptom
    return _judge_nccl_errors(facts, judged)


def _judge_nccl_errors(facts: Sequence[Fact], seen: dict[str, Seen]) -> dict[str, Seen]:
    """Copy `seen`, and add the symptoms that NCCL's error messages prove.

    Symptoms that a proven symptom replaces are removed.
    """
    judged = dict(seen)
    named = dict[str, Seen]()
    for fact in facts:
        row = find_nccl_cause(fact.detail) if isinstance(fact, NcclError) else None
        rule = load_rules().find(row.symptom) if row is not None else None
        if row is None or rule is None:
            continue
        for identifier in row.instead_of:
            other = judged.get(identifier)
            if identifier == rule.id or other is None or other.verdict:
                continue
            if _are_near(other, [fact]):
                del judged[identifier]
        symptom = named.get(rule.id)
        if symptom is None:
            changed = replace(rule, kind=row.kind or rule.kind, weight=row.weight or rule.weight)
            symptom = named[rule.id] = Seen(changed, strong=True)
        symptom.add(fact.line, fact.order)
    return judged | named


def _are_near(found: Seen, facts: Sequence[Fact]) -> bool:
    """Return whether any of the facts was logged near a symptom's lines.

    Timed-out collectives count as near, wherever they were logged.
    """
    for fact in facts:
        is_near = found.first is not None and found.first.file == fact.line.file
        if fact.kind == Timeouts.kind or (is_near and abs(found.order - fact.order) <= _NEAR_FACT):
            return True
    return False


def _add_detail(finding: Finding, facts: Sequence[Fact]) -> Finding:
    """Add a more specific cause and fix to a finding, if a fact in its lines provides them."""
    numbers = {(line.file, line.number) for line in finding.evidence}
    for fact in facts:
        if isinstance(fact, NcclError) and (fact.line.file, fact.line.number) in numbers:
            row = find_nccl_cause(fact.detail)
            if row is not None and row.symptom == finding.rule.id:
                rule = replace(finding.rule, fix=(row.fix, *finding.rule.fix))
                note = "; ".join(filter(None, (finding.note, row.cause)))
                return replace(finding, rule=rule, note=note)
    for test in finding.rule.details:
        for fact in facts:
            if (fact.line.file, fact.line.number) in numbers and test.holds(fact):
                rule = replace(finding.rule, fix=(test.fix, *finding.rule.fix))
                note = "; ".join(filter(None, (finding.note, test.cause)))
                return replace(finding, rule=rule, note=note)
    return finding


def _list_candidates(root: Finding, suspects: Sequence[Seen]) -> tuple[PossibleCause, ...]:
    """List the root and up to two other possible causes.

    Causes that the logs also show come first, then those that the root's rule lists under
    `confused`. They share what the root's probability leaves.
    """
    probability = root.probability or 0.0
    others: dict[str, str] = {}
    for suspect in suspects:
        rule = suspect.rule
        is_rival = rule.kind == "cause" and rule.rank > _GENERIC_RANK and rule.id != root.rule.id
        if is_rival and _confidence(suspect) >= THIN:
            line = suspect.lines[0]
            where = f"{line.file}:{line.number}"
            others[rule.id] = root.rule.confused.get(rule.id) or f"which came first: see {where}"
    others = others | {
        symptom: test for symptom, test in root.rule.confused.items() if symptom not in others
    }
    candidates = [PossibleCause(root.rule, probability)]
    for share, (symptom, test) in zip(_SHARES, others.items(), strict=False):
        rule = load_rules().find(symptom)
        if rule is not None:
            candidates.append(PossibleCause(rule, (1 - probability) * share, test))
    return tuple(candidates)


def _choose_root(known: dict[str, Seen], suspects: list[Seen], series: Series) -> Seen | None:
    root = _root(suspects, series)
    if root is None and series.finished is None:
        root = _only_advice(
            each for each in known.values() if not series.sound or _tells_of_the_run(each)
        )
    root = _by_words(root, suspects, series)
    if root is None and series.finished is None:  # a summary tells at least who reports the failure
        root = next(
            (found for found in suspects if _is_summary(found) and _confidence(found) >= THIN), None
        )
    return root


def _past(found: Iterable[Seen]) -> tuple[Finding, ...]:
    """Return up to two findings for failures that the job has survived, causes before effects."""
    likely = [matches for matches in found if _confidence(matches) >= THIN]
    likely.sort(key=lambda matches: (-_level(matches), matches.order))
    return tuple(_finding(matches, "history", likely) for matches in likely[: _MOST_FINDINGS - 1])


def _confidence(found: Seen) -> float:
    """Return the confidence in one symptom, regardless of other symptoms.

    It is 0 if no line matches the rule's `need`, or too few lines match the rule.
    """
    rule = found.rule
    if (rule.need and not found.needed) or (found.count < rule.least and not found.verdict):
        return 0.0
    if found.strong:
        return rule.weight
    if found.silent:
        return THIN
    return min(0.65, 1 - 0.65 ** len(found.hints))


def _level(found: Seen) -> int:
    generic = found.rule.kind == "cause" and found.rule.rank <= _GENERIC_RANK
    if generic:
        return _GENERIC_LEVEL
    return _LEVELS[found.rule.kind]


def _root(suspects: list[Seen], series: Series) -> Seen | None:
    """Return the first failure, or a nearby symptom that may have caused it.

    The rule of the first failure lists such symptoms under `follows`.
    """
    first = _first_failure(suspects, series)
    if first is None:
        return None
    causes = [
        each
        for each in suspects
        if each.rule.id in first.rule.follows and _confidence(each) >= THIN
    ]
    return _earliest(
        [each for each in causes if abs(each.order - first.order) <= _SAME_FAILURE] or [first]
    )


def _first_failure(suspects: list[Seen], series: Series) -> Seen | None:
    # A failure that training survived is no root, except in families that harm a run without ending
    # it.
    able = [found for found in suspects if _confidence(found) >= THIN and not _is_summary(found)]
    able = [found for found in able if _lasted(found, series)]
    # Training often goes on after a notice or a refused machine, until something else ends it
    able = [symptom for symptom in able if not _went_on_after(symptom, series)] or able
    # The trouble of a tool beside training ends no run
    able = [symptom for symptom in able if symptom.rule.id not in _BESIDE_TRAINING] or able
    if not able:
        return None
    level = max(_level(found) for found in able)
    top = [found for found in able if _level(found) == level]
    top = [found for found in top if found.rule.id not in _SERIES_ONLY] or top
    if (
        level >= _GENERIC_LEVEL
        and series.went_on(top)
        and not any(each.rule.family in _HARMING for each in top)
    ):
        return None
    chosen = _earliest(top)
    effects = [found for found in able if _level(found) < level and found.rule.kind == "effect"]
    if effects and chosen.rule.rank <= 2 and _follows_late(chosen, _earliest(effects)):
        # A generic exception long after an effect, such as a timeout, comes from clean-up
        return _earliest(effects)
    # A nearby match of a more specific rule usually describes the same exception.
    if chosen.rule.rank == 1:
        margin = 1
        reach = _SAME_FAILURE
    else:
        margin = 2
        reach = 8
    near = [found for found in top if found.rule.rank >= chosen.rule.rank + margin]
    return _earliest(
        [found for found in near if abs(found.order - chosen.order) <= reach] or [chosen]
    )


def _follows_late(failure: Seen, effect: Seen) -> bool:
    """Return whether a failure was logged too long after an effect to have caused it."""
    before = effect.lines[0].time
    after = failure.lines[0].time
    return before is not None and after is not None and after - before > _AFTERMATH_SECONDS


def _by_words(root: Seen | None, suspects: list[Seen], series: Series) -> Seen | None:
    """Compare the family of `root` with the stack frames and the words of the error lines.

    Return a symptom of another family if that family fits them better, else `root`.
    """
    if root is None:
        return _by_words_alone(series)
    at = root.lines[0]
    vague = root.rule.family == "program" and root.rule.rank <= _VAGUE_RANK
    family = series.raised_in(at)
    if family is not None and (vague or family in _BY_PLACE.get(root.rule.id, ())):
        rule = load_rules().find(_symptom_of_code(family, at.text))
        return replace(root, rule=rule, strong=True) if rule else root
    lines = list(series.severe.values())
    if vague:  # the lines of other failures would drown the exception's
        lines = [line for line in lines if _is_just_before(line, at)]
        lines.insert(0, at)
    guess = guess_family(line.text for line in lines)
    if guess is None:
        return root
    family, margin = guess
    if vague and family != "program" and margin >= 1.5 * MARGIN:
        return _unknown_failure(family, margin, at, series) or root
    rivals = []
    if margin >= _OVERRULING_MARGIN and family != root.rule.family:
        rivals = [suspect for suspect in suspects if _may_overrule(suspect, root, family, series)]
    return _earliest(rivals) if rivals else root


def _is_just_before(line: LogText, at: LogText) -> bool:
    return line.file == at.file and 0 <= at.number - line.number <= _NEAR_LINES


def _may_overrule(suspect: Seen, root: Seen, family: str, series: Series) -> bool:
    """Return whether `suspect` may replace `root`, because `family` fits the error lines better.

    The suspect must be of that family and of the same level as `root`, and not be its consequence.
    """
    return (
        suspect.rule.family == family
        and _level(suspect) == _level(root)
        and root.rule.id not in suspect.rule.follows
        and _lasted(suspect, series)
        and _confidence(suspect) >= THIN
    )


def _by_words_alone(series: Series) -> Seen | None:
    """Name a failure if no rule names a root.

    The words of severe lines or the stack frames decide its family.
    """
    lines = list(series.severe.values())
    guess = guess_family(line.text for line in lines)
    if guess is not None:
        family, margin = guess
        return _unknown_failure(family, margin, lines[0], series)
    end = series.last_frame  # a traceback without its exception
    if end is None:
        return None
    family = series.raised_in(end)
    if family is None:
        return None
    return _unknown_failure(family, MARGIN, end, series)


def _unknown_failure(family: str, margin: float, line: LogText, series: Series) -> Seen | None:
    """Make a failure of a family that none of its specific rules describes.

    Return None if the run completed, or if training continued after `line`.
    """
    book = load_rules()
    rule = book.find(book.other(family))
    if rule is None or series.finished or series.survived(line):
        return None
    found = Seen(replace(rule, weight=confidence_of(margin)), strong=True)
    found.add(line, 0)
    return found


def _symptom_of_code(family: str, text: str) -> str:
    """Return the symptom id for an exception that was raised in a family's code."""
    if family == "data" and _WORKER_GONE.search(text):
        return "E01"
    if family == "data" and _UNEQUAL_SAMPLES.search(text):
        return "E11"
    if "No such file" in text and family in _MISSING_FILE:
        return _MISSING_FILE[family]
    return load_rules().other(family)


def _lasted(found: Seen, series: Series) -> bool:
    """Return whether a failure may have ended or harmed the run.

    This is excluded for most families if normal training follows the failure.
    """
    if found.verdict:
        return True
    if found.rule.id == "F01":
        return not series.recovered(found.last)
    return found.rule.family in _LASTING or not series.survived(found.last)


def _went_on_after(found: Seen, series: Series) -> bool:
    """Return whether training continued after a message about capacity or money."""
    return found.rule.family == "cost" and not found.verdict and series.survived(found.last)


def _only_advice(known: Iterable[Seen]) -> Seen | None:
    """Return the best advice if the logs show no failure, for example if a run is only slow.

    Return None if they show a failure.
    """
    found = list(known)
    if any(
        each.rule.kind not in ("advice", "summary") and _confidence(each) >= THIN for each in found
    ):
        return None
    advice = [
        each
        for each in found
        if each.rule.kind == "advice" and each.rule.weight >= _LIKELY and _confidence(each) >= THIN
    ]
    return max(advice, key=lambda each: (_confidence(each), -each.order), default=None)


def _is_summary(found: Seen) -> bool:
    return found.rule.kind == "summary"


def _tells_of_the_run(found: Seen) -> bool:
    """Return whether advice matters even if the losses are normal.

    This is advice about monitoring, speed or clocks, found in several lines.
    """
    return found.count > 1 and (
        found.rule.family in ("monitoring", "throughput") or found.rule.id == "A32"
    )


def _earliest(found: list[Seen]) -> Seen:
    """Return the symptom whose first line has the earliest time.

    If any of the times is unknown, return the symptom that comes first in the logs.
    """
    in_order = sorted(found, key=lambda each: (each.order, -each.rule.rank))
    if any(each.lines[0].time is None for each in found):
        return in_order[0]
    return min(in_order, key=lambda each: each.lines[0].time or 0.0)


def _accuse(found: Seen, known: set[int]) -> dict[str, Any]:
    """Return the `suspects` and the `note` of a symptom's finding.

    Suspects are the ranks that the symptom's lines accuse. If the ranks that wrote the lines only
    wait, the suspects are all other ranks of the logs.
    """
    lines = [*found.lines, *found.ranks.values()]
    rule = found.rule
    named: set[int] = set()
    reached: dict[int, int] = {}  # the last enqueued work, by rank
    for line in lines:
        for pattern in rule.accuses:
            hit = re.search(pattern, line.text)
            if hit:
                named.update(map(int, re.findall(r"\d+", hit[1])))
        enqueued = _ENQUEUED.search(line.text)
        if enqueued:
            reached[int(enqueued[1])] = int(enqueued[2])
    if not named:
        named = {rank for rank, work in reached.items() if work < max(reached.values())}
    if not (found.verdict or named or rule.suspects) and _are_alike(found, known):
        return {"note": _NOTES["alike"]}
    if found.verdict or named or not rule.suspects:
        return {"suspects": tuple(sorted(named))}
    others = known - set(found.ranks if rule.suspects == "others" else ())
    return {"suspects": tuple(sorted(others)), "note": _NOTES[rule.suspects]}


def _are_alike(found: Seen, known: set[int]) -> bool:
    """Return whether all of several ranks logged the cause at about the same time."""
    if found.rule.kind != "cause" or len(found.ranks) < max(2, len(known)):
        return False
    # At a start, the time tells only which rank was started first.
    times = sorted(line.time or 0.0 for line in found.ranks.values())
    return found.rule.family == "startup" or not times[0] or times[1] - times[0] < _LEAD_SECONDS


def _finding(found: Seen, role: str, others: list[Seen]) -> Finding:
    confidence = _confidence(found)
    if role == "root":
        rivals = [
            each
            for each in others
            if each.rule.family != found.rule.family
            and _level(each) == _level(found)
            and _confidence(each) >= THIN
        ]
        confidence *= 0.9 ** min(len(rivals), 3)
    first = found.lines[0].rank
    ranks = tuple(sorted(found.ranks))
    if role == "root" and first is not None:
        ranks = (first, *(rank for rank in ranks if rank != first))
    return Finding(found.rule, role, max(confidence, 0.05), tuple(found.lines), ranks, found.count)

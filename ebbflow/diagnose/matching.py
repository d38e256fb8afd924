"""Matching of log lines against the rules' regular expressions, fast enough for a million lines.

Each expression has required literals: texts of which every matching line contains at least one.
Each literal contains one of the short texts in `Matcher.triggers`. The reader searches whole blocks
of a file for the triggers. Lines that differ only in digits share one cached result, unless an
expression that may match them depends on digits.
"""

import functools
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ebbflow.diagnose.reading import LogText
from ebbflow.diagnose.rules import VALUES, SymptomRule, load_rules

_MOST_CACHED = 200_000
_TRIGGER_LENGTHS = (7, 6, 5, 4)
# Words that are too common in logs of healthy runs to be triggers.
_COMMON = (
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
_NOISE = re.compile("|".join(VALUES["noise"]))
_DENIAL = re.compile("|".join(VALUES["denial"]))
_OPTIONAL_LIBRARY = re.compile("|".join(VALUES["optional_library"]))
_PREFIX = re.compile(f"(?:{'|'.join(VALUES['prefix'])})+")
# Words before a match that make it a sentence about a fault, unless a word tells that it happened
_SPEECH = re.compile("|".join(VALUES["speech"]), re.IGNORECASE)
_HAPPENED = re.compile("|".join(VALUES["happened"]), re.IGNORECASE)
_SPEECH_LENGTH = 80
_FRAME = re.compile(r'File "[^"]+", line \d+')
# A frame's source line, indented deeper than the frame, is no message. An assertion is: it may have
# no other.
_QUOTED_CODE = re.compile(r"  +(?!assert )\S")
# The task, Batch job or pod that a line is about.
_OBJECT = re.compile(
    r"\[(\d+/\w+(?:/\d+)?)\b|(?<![\w-])([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}(?::\d+)?)"
    r"|(?:\bpods?(?:/|=\"|[ :]+\"?(?=[\w.-]+/))|Successfully assigned )(?:[\w.-]+/)?([\w.-]+)"
)
_MOST_KEPT = 1000
_DIGIT = re.compile(r"[\d.]")
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


@dataclass(frozen=True)
class Pattern:
    """A compiled regular expression of a rule.

    `rule` is the rule's index, `role` the rule's field (look, hint, …).
    """

    regex: re.Pattern[str]
    rule: int
    role: str
    literals: tuple[str, ...]


@dataclass
class Seen:
    """Matches of one rule: how many there are, the first lines, and the first line of each rank."""

    rule: SymptomRule
    lines: list[LogText] = field(default_factory=list)
    count: int = 0
    ranks: dict[int, LogText] = field(default_factory=dict)
    hints: set[str] = field(default_factory=set)
    strong: bool = False
    first: LogText | None = None
    last: LogText | None = None
    needed: bool = False
    silent: bool = False  # whether the only evidence is that a log ends with a normal line
    verdict: bool = False  # whether agents or guards of a job of ours recorded it
    order: int = 0  # position among all candidate lines
    # Lines with their order and object, of a rule that has `cleared`.
    kept: list[tuple[LogText, int, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # matching lines by file

    def add(self, line: LogText, order: int) -> None:
        """Record a matching line. A line that several expressions match counts once."""
        if self.last is line:
            return
        self.count += 1
        self.counts[line.file] += 1
        if self.first is None:
            self.first = line
            self.order = order
        self.last = line
        if self.rule.cleared and len(self.kept) < _MOST_KEPT:
            self.kept.append((line, order, _object_of(line)))
        if len(self.lines) < 3:
            self.lines.append(line)
        # Which tells how far the rank has come
        new = line.rank not in self.ranks or "ast enqueued" in line.text
        if line.rank is not None and new and len(self.ranks) < 4096:
            self.ranks[line.rank] = line

    def split(self, file: str) -> "tuple[Seen | None, Seen | None]":
        """Split the matches into those in `file` and those in all other files.

        A part without matches is None.
        """
        mine = self.counts[file]
        if not mine:
            return None, self
        if mine == self.count:
            return self, None
        return self._part({file}), self._part(self.counts.keys() - {file})

    def _part(self, files: Set[str]) -> "Seen":
        """Return the matches in some of the files, as far as their lines were kept."""
        part = replace(self, first=None, verdict=False)
        part.lines = [line for line in self.lines if line.file in files]
        part.ranks = {rank: line for rank, line in self.ranks.items() if line.file in files}
        part.kept = [entry for entry in self.kept if entry[0].file in files]
        part.counts = Counter({file: self.counts[file] for file in files})
        part.count = part.counts.total()
        if not part.lines:
            part.lines = list(part.ranks.values())[:3]
        if not part.lines and self.last is not None:
            part.lines = [self.last]
        part.first = part.lines[0]
        return part

    def without(self, cleared: str) -> "Seen | None":
        """Return the matches that concern another known task, job or pod than `cleared`.

        Return None if there are none.
        """
        left = [(line, order) for line, order, name in self.kept if name not in ("", cleared)]
        new = Seen(self.rule, hints=self.hints, strong=self.strong, needed=self.needed)
        for line, order in left:
            new.add(line, order)
        if left:
            return new
        return None


class Matcher:
    """Index of the rules' regular expressions, which finds those that match a line."""

    def __init__(self, rules: Sequence[SymptomRule]) -> None:
        self.rules = rules
        patterns: list[Pattern] = []
        self._unless: list[list[re.Pattern[str]]] = []
        for number, rule in enumerate(rules):
            for role in ("look", "hint", "need", "cleared"):
                for regex in _compile_all(getattr(rule, role)):
                    patterns.append(Pattern(regex, number, role, required_literals(regex.pattern)))
            self._unless.append(_compile_all(rule.unless))
        self._by_literal: dict[str, list[Pattern]] = defaultdict(list)
        for pattern in patterns:
            for literal in pattern.literals:
                self._by_literal[literal].append(pattern)
        words = choose_triggers(self._by_literal)
        self.triggers = tuple(word.encode() for word in words)
        self._literals_of: dict[str, list[str]] = {}
        for word in words:
            self._literals_of[word] = [literal for literal in self._by_literal if word in literal]
        self._counts_digits: dict[int, bool] = {}
        for pattern in patterns:
            without_repetitions = re.sub(r"\{[\d,]+\}", "", pattern.regex.pattern)
            counts = re.search(r"\\d|[0-9]", without_repetitions) is not None
            self._counts_digits[id(pattern)] = counts
        self._cache: dict[str, tuple[tuple[int, str, str], ...] | None] = {}

    def match(self, text: str) -> tuple[tuple[int, str, str], ...]:
        """Return (index of the rule, role, expression) for each expression that matches a line.

        If several rules match with the role "look", only the matches of the rules with the highest
        `rank` are returned.
        """
        skeleton = text.translate(_NO_DIGITS)
        cached = self._cache.get(skeleton, False)
        if cached is not None and cached is not False:
            return cached  # type: ignore[return-value]
        text = strip_prefix(text)
        if _is_noise(text):
            return ()
        low = text.lower()
        tried: dict[int, Pattern] = {}
        for word, literals in self._literals_of.items():
            if word not in low:
                continue
            for literal in literals:
                if literal in low:
                    tried.update((id(pattern), pattern) for pattern in self._by_literal[literal])
        digits = any(self._counts_digits[key] for key in tried)
        found = [
            pattern
            for pattern in tried.values()
            if _is_told(pattern.regex, text) and not self._is_excused(pattern.rule, text)
        ]
        if found and _is_denial(text):
            found = []
        highest = max(
            (self.rules[pattern.rule].rank for pattern in found if pattern.role == "look"),
            default=0,
        )
        result = tuple(
            (pattern.rule, pattern.role, pattern.regex.pattern)
            for pattern in found
            if pattern.role != "look" or self.rules[pattern.rule].rank == highest
        )
        if len(self._cache) < _MOST_CACHED and cached is False:
            if digits:
                self._cache[skeleton] = None
            else:
                self._cache[skeleton] = result
        return result

    def _is_excused(self, rule: int, text: str) -> bool:
        return any(regex.search(text) for regex in self._unless[rule])

    def collect(self, lines: Iterable[LogText], seen: dict[str, Seen], order: int = 0) -> int:
        """Add the matches in `lines` to `seen`, by rule id.

        order: number of lines processed so far; the function returns the new number.
        """
        frame = None  # the last frame of a traceback
        column = 0  # where its `File` begins
        for line in lines:
            order += 1
            found = _FRAME.search(line.text)
            if found:
                frame = line
                column = found.start()
            elif (
                frame and line.number == frame.number + 1 and _QUOTED_CODE.match(line.text, column)
            ):
                continue
            for number, role, expression in self.match(line.text):
                rule = self.rules[number]
                if role == "cleared":
                    mine = seen.pop(rule.id, None)
                    rest = mine and mine.without(_object_of(line))
                    if rest:
                        seen[rule.id] = rest
                    continue
                mine = seen.get(rule.id) or seen.setdefault(rule.id, Seen(rule))
                if role == "need":
                    mine.needed = True
                    continue
                mine.strong = mine.strong or role == "look"
                if role == "hint":
                    mine.hints.add(expression)
                mine.add(line, order)
        return order


def strip_prefix(text: str) -> str:
    """Remove the prefix that launchers, schedulers and log shippers add to a line."""
    if _PREFIX.match(text):
        return _PREFIX.sub("", text, count=1)
    return text


def is_no_evidence(text: str) -> bool:
    """Return whether a line cannot be evidence of a failure.

    Such a line quotes code, settings or a help text, denies a fault, or was written by Ebbflow
    itself.
    """
    stripped = strip_prefix(text)
    return _is_noise(stripped) or _is_denial(stripped)


@functools.cache
def load_matcher() -> Matcher:
    return Matcher(load_rules().rules)


def required_literals(expression: str) -> tuple[str, ...]:
    """Find texts for a quick check: each line that matches contains at least one of them.

    The texts are in lower case. Raises ValueError if the expression requires no text of at least 3
    characters.
    """
    from re import _parser  # type: ignore[attr-defined]

    best = _best(_parser.parse(expression, re.IGNORECASE))
    if not best:
        raise ValueError(f"{expression!r} has no fixed text of 3 characters")
    return tuple(sorted(best))


def choose_triggers(literals: Iterable[str]) -> list[str]:
    """Choose a small set of short texts so that each literal contains at least one of them.

    The algorithm is greedy set cover.
    """
    uncovered = set(literals)
    holders: dict[str, set[str]] = defaultdict(set)
    for literal in uncovered:
        for length in _TRIGGER_LENGTHS:
            for at in range(len(literal) - length + 1):
                part = literal[at : at + length]
                if (
                    part.isascii()
                    and not _DIGIT.search(part)
                    and not any(word in part or part in word for word in _COMMON)
                ):
                    holders[part].add(literal)
    chosen: list[str] = []
    queue = [(-len(held), -len(part), part) for part, held in holders.items() if len(held) > 1]
    heapq.heapify(queue)
    while queue:
        count, length, part = heapq.heappop(queue)
        covers = holders[part] & uncovered
        if len(covers) == -count:
            chosen.append(part)
            uncovered -= covers
        elif len(covers) > 1:
            heapq.heappush(queue, (-len(covers), length, part))
    return chosen + sorted({max(_DIGIT.split(literal), key=len) for literal in uncovered})


def _is_noise(text: str) -> bool:
    return _NOISE.search(text) is not None


def _is_denial(text: str) -> bool:
    """Return whether a line denies a fault, prepares for one, or is about an optional library."""
    if ".so" in text and _OPTIONAL_LIBRARY.search(text):
        return True
    return _DENIAL.search(text) is not None


def _object_of(line: LogText) -> str:
    match = _OBJECT.search(line.text)
    if match:
        return match[match.lastindex or 0]
    return ""


def _is_told(regex: re.Pattern[str], text: str) -> bool:
    """Return whether an expression matches a report of a fault, not only a mention.

    For example, "on CUDA out of memory the batch is halved" only mentions a fault.
    """
    match = regex.search(text)
    if match is None:
        return False
    before = text[: match.start()]
    if not _SPEECH.search(before[-_SPEECH_LENGTH:]):
        return True
    return _HAPPENED.search(before) is not None


def _compile_all(texts: Iterable[str]) -> list[re.Pattern[str]]:
    return [re.compile(text, re.IGNORECASE) for text in texts]


def _best(sequence: Any) -> set[str]:
    """Find texts such that each match of a parsed regular expression contains at least one.

    If there are several such sets, return the one with the longest texts.
    """
    found: list[set[str]] = []
    run = ""
    for name, value in [*sequence, ("END", None)]:
        kind = str(name)
        if kind == "LITERAL":
            run += chr(value)
            continue
        if len(run) >= 3:
            found.append({run.lower()})
        run = ""
        if kind == "SUBPATTERN":
            found.append(_best(value[3]))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            found.append(_best(value[2]))
        elif kind == "BRANCH":
            parts = [_best(branch) for branch in value[1]]
            found.append(set().union(*parts) if all(parts) else set())
    found = [each for each in found if each]
    found = [each for each in found if _shortest(each) >= 3]
    return max(found, key=lambda each: (_shortest(each), -len(each)), default=set())


def _shortest(literals: set[str]) -> int:
    """Return the length of the shortest literal.

    The length of a literal is that of its longest part without digits and dots.
    """
    return min(max(map(len, _DIGIT.split(literal))) for literal in literals)

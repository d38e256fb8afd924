"""Symptom rules of `ebbflow diagnose`: loaded from `rules/*.yaml`, and rendered as text or JSON.

A file contains one family of symptoms: `family` (its name), `letter`, `title`, `frames` (a pattern
of the paths of code whose exceptions belong to the family), `other` (the rule for failures that
only stack frames or words point to), `defaults` (for fields of its rules) and `rules`. Fields of a
rule:

    id, title       the family's letter and two digits. A to J are symptoms from the guides that `guides` names.
    kind            cause: can explain other failures. effect: a failure that often follows a cause elsewhere. echo: a
                    failure that nearly always follows another one. summary: repeats other failures.
                    advice: never ends a run by itself.
    look            regular expressions, ignoring case; one matching line is enough evidence.
    hint            weaker expressions; one matching line is not enough evidence, but two are.
    need            expressions; at least one must match somewhere in the same logs.
    unless          expressions; a line that matches one of them is no evidence.
    facts           [{KIND: expression}]: the symptom is found if the expression is true of a fact of the kind, such as
                    {memory: free + unallocated >= requested}; see facts.py. `instead_of`: symptoms of the same lines
                    that it replaces; `kind` and `weight`: those of the rule, if it is found by this fact.
    details         [{KIND: expression, cause: text, fix: text}]: what a fact adds to the symptom
    last            expressions of normal lines: if one is the last line of a log, the rank is silent since.
    cleared         expressions; a line that matches one of them ends the symptom: earlier lines are no evidence.
    least           number of matching lines that are evidence (1)
    rank            1 (generic) to 9 (specific); of several rules that match a line, the highest wins. Default 5.
    follows         ids of symptoms that lead to this one: if one is near, it is the root, even if it is logged later.
    weight          confidence if a `look` matches; the default depends on `kind`.
    causes          {cause: likelihood}
    confused        {symptom: the test or line that separates it from this one}, the likeliest first
    collect         evidence to collect
    fix             changes to make, and `commands`
    keys            [{key: KEY of a configuration, with `to`: value, `factor`: number, or `ladder`: values in order}]:
                    changes of a job of Ebbflow, from the value that it has
    cost            what the failure costs
    suspects        others: the rank that writes it waits for another one; all: no rank's line tells which is wrong
    accuses         expressions whose group has the numbers of the faulty ranks, in lines of the symptom
    curable         false: an exception with this text comes again in each start, so the job ends
    guides, source  where the symptom is described
    examples        lines that the rule must match
    others          lines that the rule must not match
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ebbflow.diagnose.facts import KINDS as KINDS_OF_FACTS
from ebbflow.diagnose.facts import Fact, compile_expression

Value = str | float | bool | None  # of a configuration key
RULES_FOLDER = Path(__file__).resolve().parent / "rules"
# Patterns that are no symptoms
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast as the other one
VALUES = yaml.load(Path(__file__).with_name("values.yaml").read_bytes(), _LOADER)
# Kind: default weight
KINDS = {"cause": 0.9, "effect": 0.75, "echo": 0.55, "summary": 0.4, "advice": 0.6}


@dataclass(frozen=True, kw_only=True)
class FactTest:
    """An expression of a rule that is tested on the facts of one kind.

    A test in the rule's `facts` proves the symptom; one in its `details` adds a cause and a fix.
    """

    fact: str  # the kind
    expression: str
    instead_of: tuple[str, ...] = ()
    kind: str | None = None
    weight: float | None = None
    cause: str = ""
    fix: str = ""

    def holds(self, fact: Fact) -> bool:
        """Return whether a fact has the kind of this test and fits its expression."""
        return fact.kind == self.fact and fact.fits(self.expression)


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """A recommended change of one configuration key.

    The key is set to a value, multiplied by a factor, or moved to the next value of a list
    (`ladder`).
    """

    key: str
    to: Value = None
    factor: float | None = None
    ladder: tuple[str, ...] = ()

    def apply(self, now: Value) -> Value:
        """Return the new value of the key, or None if the change cannot help any more."""
        if self.ladder:
            if now not in self.ladder[:-1]:
                return None
            return self.ladder[self.ladder.index(str(now)) + 1]
        if self.factor is None:
            return None if now == self.to else self.to
        if isinstance(now, bool) or not isinstance(now, int | float):
            return None
        changed = now * self.factor
        if isinstance(now, int):
            changed = max(1, math.ceil(changed) if self.factor > 1 else int(changed))
        return None if changed == now else changed

    def describe(self) -> str:
        """Describe the change without the key's current value."""
        if self.ladder:
            return f"{self.key}: the next of {', '.join(self.ladder)}"
        if self.factor is not None:
            return f"{self.key}: its value × {self.factor:g}"
        return f"{self.key}: {_yaml(self.to)}"

    def describe_from(self, now: Value) -> str | None:
        """Describe the change from the key's current value, as a line of the configuration.

        Return None if the change cannot help.
        """
        new = self.apply(now)
        if new is None:
            return None
        return f"{self.key}: {_yaml(new)} (now {_yaml(now)})"


@dataclass(frozen=True, kw_only=True)
class SymptomRule:
    """Rule that detects and explains one symptom. The module's docstring describes its fields."""

    id: str
    family: str
    title: str
    kind: str
    look: tuple[str, ...]
    hint: tuple[str, ...] = ()
    need: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    facts: tuple[FactTest, ...] = ()
    details: tuple[FactTest, ...] = ()
    last: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()
    least: int = 1
    rank: int = 5
    follows: tuple[str, ...] = ()
    weight: float = 0.9
    causes: dict[str, float] = field(default_factory=dict)
    confused: dict[str, str] = field(default_factory=dict)
    collect: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    keys: tuple[KeyChange, ...] = ()
    cost: str = ""
    curable: bool = True
    suspects: str = ""
    accuses: tuple[str, ...] = ()
    guides: tuple[str, ...] = ()
    source: str = ""
    examples: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def matches(self, text: str) -> bool:
        """Return whether any `look` pattern and no `unless` pattern matches the text."""
        found = any(re.search(pattern, text, re.IGNORECASE) for pattern in self.look)
        return found and not any(re.search(pattern, text, re.IGNORECASE) for pattern in self.unless)

    def to_json(self) -> dict[str, Any]:
        names = (
            "id",
            "family",
            "title",
            "kind",
            "causes",
            "collect",
            "fix",
            "cost",
            "guides",
            "source",
        )
        keys = [change.describe() for change in self.keys]
        return {name: getattr(self, name) for name in names} | {"keys": keys}

    def render(self) -> str:
        """Render the symptom for `ebbflow explain`."""
        parts = [f"{self.id}  {self.title}  (family {self.family}, {self.kind})"]
        if self.causes:
            parts.append("causes")
            parts += [f"  {share:4.0%}  {cause}" for cause, share in self.causes.items()]
        lists = {
            "collect": self.collect,
            "fix": self.fix,
            "looks like": self.examples,
            "follows": self.follows,
        }
        for name, entries in lists.items():
            if entries:
                parts += [name, *(f"  {entry}" for entry in entries)]
        if self.confused:
            parts.append("could also be")
            parts += [f"  {symptom}: {test}" for symptom, test in self.confused.items()]
        if self.keys:
            parts.append("in a job of Ebbflow")
            parts += [f"  {change.describe()}" for change in self.keys]
        if self.cost:
            parts += [f"costs: {self.cost}"]
        if self.guides:
            parts += [f"guides: {', '.join(self.guides)}"]
        if self.source:
            parts += [f"source: {self.source}"]
        return "\n".join(parts)


_LISTS = tuple(each.name for each in fields(SymptomRule) if each.type == tuple[str, ...])


@dataclass(frozen=True)
class Family:
    """Group of symptoms with one subject, such as memory.

    `letter` is the first letter of the symptoms' ids. `frames` is a pattern for the paths of code
    whose exceptions belong to the family. `other` is the rule for failures of the family that no
    other rule describes.
    """

    name: str
    letter: str
    title: str
    frames: str = ""
    other: str = ""


@dataclass(frozen=True)
class RuleBook:
    """All rules of the diagnosis, grouped into families of causes."""

    families: tuple[Family, ...]
    rules: tuple[SymptomRule, ...]
    verdicts: tuple[tuple[re.Pattern[str], str], ...]  # what a verdict of agents and guards means

    def read_verdict(self, text: str) -> str | None:
        """Return the symptom id for a failure that an agent or a guard reported, or None."""
        return next((symptom for pattern, symptom in self.verdicts if pattern.search(text)), None)

    def find(self, identifier: str) -> SymptomRule | None:
        return next((rule for rule in self.rules if rule.id == identifier.upper()), None)

    def other(self, family: str) -> str:
        return next(each.other for each in self.families if each.name == family)

    def to_json(self) -> dict[str, Any]:
        families = [
            {"name": each.name, "letter": each.letter, "title": each.title}
            for each in self.families
        ]
        return {
            "schema": 1,
            "families": families,
            "symptoms": [rule.to_json() for rule in self.rules],
        }

    def render(self) -> str:
        lines = []
        for family in self.families:
            lines.append(f"{family.name}: {family.title}")
            lines += [
                f"  {rule.id}  {rule.title}" for rule in self.rules if rule.family == family.name
            ]
        return "\n".join(lines)


@functools.cache
def load_rules() -> RuleBook:
    """Load all rules. Raises ValueError if a rule is invalid."""
    families = []
    rules = []
    for path in sorted(RULES_FOLDER.glob("*.yaml")):
        document = yaml.load(path.read_bytes(), _LOADER)
        families.append(
            Family(
                *(
                    document.get(name, "")
                    for name in ("family", "letter", "title", "frames", "other")
                )
            )
        )
        for entry in document["rules"]:
            try:
                rules.append(_rule({**document.get("defaults", {}), **entry}, document["family"]))
            except (TypeError, ValueError, KeyError, re.error) as error:
                raise ValueError(f"{path.name}: {entry.get('id', entry)}: {error}") from error
    counts = Counter(rule.id for rule in rules)
    doubled = {identifier for identifier, count in counts.items() if count > 1}
    if doubled:
        raise ValueError(f"two rules have the id {', '.join(sorted(doubled))}")
    families.sort(key=lambda family: family.letter)
    rules.sort(key=lambda rule: rule.id)
    verdicts = yaml.load((RULES_FOLDER.parent / "verdicts.yaml").read_bytes(), _LOADER)
    return RuleBook(
        tuple(families),
        tuple(rules),
        tuple((re.compile(text, re.IGNORECASE), symptom) for text, symptom in verdicts),
    )


def _rule(entry: dict[str, Any], family: str) -> SymptomRule:
    known = {field.name for field in fields(SymptomRule) if field.name != "family"}
    unknown = entry.keys() - known
    if unknown:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    kind = entry.get("kind", "cause")
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    if not all(isinstance(share, int | float) for share in entry.get("causes", {}).values()):
        raise ValueError(f"each cause needs its likelihood: {entry['causes']}")
    values = {**entry, "kind": kind, "family": family, "weight": entry.get("weight", KINDS[kind])}
    changes = [dict(change) for change in values.get("keys", ())]
    for change in changes:
        change["ladder"] = tuple(change.get("ladder", ()))
    values["keys"] = tuple(KeyChange(**change) for change in changes)
    for name in ("facts", "details"):
        values[name] = tuple(_fact_test(dict(test)) for test in values.get(name, ()))
    for name in _LISTS:
        values[name] = _texts(values.get(name, ()))
    return SymptomRule(**values)


def _fact_test(entry: dict[str, Any]) -> FactTest:
    kinds = entry.keys() & KINDS_OF_FACTS.keys()
    if len(kinds) != 1:
        raise ValueError(f"{entry} needs one of {', '.join(KINDS_OF_FACTS)}")
    fact = kinds.pop()
    expression = str(entry.pop(fact))
    compile_expression(expression, fact)
    instead_of = tuple(entry.pop("instead_of", ()))
    return FactTest(fact=fact, expression=expression, instead_of=instead_of, **entry)


def _yaml(value: Value) -> str:
    """Format a value as it is written in a configuration file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        entries: Iterable[Any] = (value,)
    else:
        entries = value
    if not all(isinstance(each, str) for each in entries):
        raise ValueError(f"{value!r} is not text or a list of texts")
    return tuple(entries)

"""What many schedules went through, added up, so that it is seen not to be little."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_WIDTH = 116
_KILL = "kill of "


@dataclass
class Outcome:
    """Of one seed. problems: what did not hold. log: where its processes' output lies, when it
    failed.
    """

    seed: int
    storm: str
    store: str
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    tally: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    log: str | None = None


def added_up(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def text(outcomes: list[Outcome], seconds: float) -> str:
    """Several lines."""
    tally = added_up(outcome.tally for outcome in outcomes)
    kills = Counter(
        {name.removeprefix(_KILL): count for name, count in tally.items() if name.startswith(_KILL)}
    )
    rest = Counter({name: count for name, count in tally.items() if not name.startswith(_KILL)})
    places = Counter(
        outcome.storm if outcome.store == "s3" else "in a folder" for outcome in outcomes
    )
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    requests = sum(outcome.requests for outcome in outcomes)
    head = (
        f"{len(outcomes)} schedules in {seconds:.0f} s, {failed} failed; {requests:,} requests "
        "to the failing store"
    )
    return "\n".join(
        [
            head,
            _row("schedules by storm", places),
            _row(f"{kills.total()} kills: of", kills),
            _row("went through", rest),
            _row("faults met", added_up(outcome.faults for outcome in outcomes)),
        ]
    )


def _row(title: str, counts: Counter[str]) -> str:
    words = ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
    return textwrap.fill(f"{title}: {words}", _WIDTH, subsequent_indent="    ")

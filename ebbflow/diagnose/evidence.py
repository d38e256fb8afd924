"""Collect evidence from log lines: matches of the rules, typed facts, and series of numbers.

A log is divided into episodes, one for each start of its job. Only the last episode of a file is
judged; matches of the earlier ones are history.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ebbflow.diagnose.facts import Fact, FactReader, has_fact
from ebbflow.diagnose.matching import Seen, is_no_evidence, load_matcher
from ebbflow.diagnose.reading import FileScan, LogText, candidates, names_a_master, scan_logs
from ebbflow.diagnose.rules import VALUES, load_rules
from ebbflow.diagnose.series import Series
from ebbflow.diagnose.vocabulary import TRIGGERS

_RESTART = re.compile("|".join(VALUES["restart"]), re.IGNORECASE)
_MAYBE_RESTART = re.compile("|".join(VALUES["maybe_restart"]), re.IGNORECASE)
_ENDED = re.compile("|".join(VALUES["ended"]), re.IGNORECASE)
_RESTART_TRIGGERS = tuple(text.encode() for text in VALUES["restart_triggers"])
_FACT_TRIGGERS = tuple(text.encode() for text in VALUES["fact_triggers"])
_STEP = re.compile("|".join(VALUES["step"]), re.IGNORECASE)
# The process that writes for a task or a GPU of a host
_PROCESS = re.compile(
    r"\[(?P<task>\d+/\w+/\d+) \(pid (?P<pid>\d+)\)\]"
    r"|^(?P<host>[\w.-]+):(?P<process>\d+):\d+ (?P<device>\[\d+\])"
)
# Folders of attempts: of torchrun, of schedulers, and of generations of an Ebbflow job
_ATTEMPT_FOLDER = re.compile(
    r"(?:attempt|generation|retry|restart)[-_. ]?(\d+)|^(\d{6})-[0-9a-f]+$"
)


class Evidence:
    """Evidence from each log since the last start of its job, and rule matches from before it."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}  # matches by rule id
        self.series = Series()
        self.history: dict[str, Seen] = {}  # matches of earlier episodes, by rule id
        self.scans: list[FileScan] = []
        self._order = 0
        self._position = 0  # of the line that is read, among all lines
        self._facts = FactReader()
        self._last: dict[str, LogText] = {}  # last line, by file
        self._progress: dict[str, _Progress] = {}  # by file

    def read(self, lines: Iterable[LogText]) -> None:
        """Add the evidence in log lines. The lines of each file must be in order."""
        watched = self.series.watch(self._divide(lines))
        self._order = load_matcher().collect(watched, self.seen, self._order)

    def read_files(self, files: Sequence[Path | None]) -> None:
        """Add the evidence in files; None stands for standard input.

        If the files lie in folders of several attempts, all attempts but the last are history.
        """
        triggers = tuple(
            {
                *load_matcher().triggers,
                *Series.triggers,
                *TRIGGERS,
                *_RESTART_TRIGGERS,
                *_FACT_TRIGGERS,
            }
        )
        last = max((_attempt_of(path) for path in files), default=0)
        first_worker = int(names_a_master(files))
        for path in sorted(files, key=_attempt_of):
            for log in scan_logs(path):
                self.read(candidates(log, triggers, first_worker, len(files)))
                self.scans.append(log.scan)
                if log.scan.last is not None:
                    self._last[log.scan.file] = log.scan.last
                if _attempt_of(path) not in (0, last):
                    self._close(log.scan.file)

    def add_verdict(self, symptom: str, line: LogText) -> None:
        """Add a symptom that an agent or a guard of an Ebbflow job has recorded itself."""
        rule = load_rules().find(symptom)
        if rule is None:
            return
        self._order += 1
        found = self.seen.setdefault(symptom, Seen(rule))
        found.strong = found.needed = found.verdict = True
        found.add(line, self._order)

    def facts(self) -> list[Fact]:
        """Return the facts in the current episodes of the logs."""
        return self._facts.facts()

    def silences(self) -> dict[str, Seen]:
        """Return the symptoms of logs that end too early.

        The last line of such a log is normal, such as the start of a rendezvous, but a healthy job
        would log more lines after it.
        """
        silent: dict[str, Seen] = {}
        rules = [rule for rule in load_rules().rules if rule.last]
        for line in self._last.values():
            for rule in rules:
                if any(re.search(pattern, line.text, re.IGNORECASE) for pattern in rule.last):
                    found = silent.setdefault(rule.id, Seen(rule, silent=True))
                    found.add(line, self._order)
        return silent

    def _divide(self, lines: Iterable[LogText]) -> Iterator[LogText]:
        for line in lines:
            progress = self._progress.setdefault(line.file, _Progress())
            lower = line.text.lower()
            if _begins_episode(line, lower, progress):
                self._close(line.file)
            self._last[line.file] = line
            self._position += 1
            if (has_fact(lower) or self._facts.awaits_next) and not is_no_evidence(line.text):
                self._facts.read(line, self._position, self.series)
            yield line

    def _close(self, file: str) -> None:
        """Move a file's matches to the history, and drop its series and facts."""
        self._progress[file] = _Progress()
        self.series.forget(file)
        self._facts.forget(file)
        for identifier, matches in list(self.seen.items()):
            earlier, rest = matches.split(file)
            if earlier is None:
                continue
            self.history[identifier] = earlier
            if rest is None:
                del self.seen[identifier]
            else:
                self.seen[identifier] = rest


@dataclass
class _Progress:
    """State of the current episode of one file, by which the next episode is recognized."""

    step: int | None = None
    may_begin: bool = False  # whether a line that often follows a restart came after the last step
    ended: bool = False  # whether the launcher reported the end of a rank
    processes: dict[str, str] = field(default_factory=dict)  # process id, by task or GPU


def _attempt_of(path: Path | None) -> int:
    """Return 1 plus the number of the attempt in a file's path, or 0 if the path names none."""
    parts = () if path is None else path.parts[-4:]
    for part in reversed(parts):
        match = _ATTEMPT_FOLDER.search(part)
        if match:
            return 1 + int(match[1] or match[2])
    return 0


def _begins_episode(line: LogText, lower: str, progress: _Progress) -> bool:
    """Return whether the job starts again with this line, and update `progress`.

    A launcher's banner alone may come from another node. It counts only if the current episode has
    logged steps or the end of a rank. A falling step counter counts only after a line that often
    follows a restart, because counters within an epoch fall at each new epoch.
    """
    text = line.text
    step = None
    match = _STEP.search(text)
    if match:
        step = int(match[1])
    had_run = progress.ended or progress.step is not None
    tells = any(word in lower for word in VALUES["restart_triggers"])
    begins = tells and had_run and _RESTART.search(text) is not None
    if had_run and _changes_process(text, progress):
        begins = True
    if step is not None and progress.step is not None and progress.may_begin:
        begins = begins or step < progress.step
    if begins:
        return True
    if _ENDED.search(text):
        progress.ended = True
    if tells and had_run and _MAYBE_RESTART.search(text):
        progress.may_begin = True
    elif step is not None:
        progress.step = step
        progress.may_begin = False
    return False


def _changes_process(text: str, progress: _Progress) -> bool:
    """Return whether the process that writes for a task or a GPU has changed."""
    match = _PROCESS.search(text)
    if match is None:
        return False
    writer = match["task"] or f"{match['host']} {match['device']}"
    process = match["pid"] or match["process"]
    return progress.processes.setdefault(writer, process) != process
